"""Products over weights that stay narrow, beside float32 ones, on this CPU: time, bytes read and rate.

    python benchmarks/narrow_products.py [--rows 1,8,16,32,85,512] [--rounds 15] [--processor haswell] [--cpu-time]

Shapes are those of the demo model's layers (q, k, v together; output; gate and up; down; language head) and one
large one. Every form takes its turn in every round, and the best round counts: other processes disturb all alike.
Weights of a form are larger than the caches together, as in a model. ``--processor`` takes a name that g++ knows:
both the narrow products and the float32 ones (native/sgemm.cpp, then for any number of rows) are built for that
one. ``--cpu-time`` computes on one thread and counts the process's time on a core instead of the clock's: for a
machine whose cores are busy with something else.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from headrace.core.machine import usable_cores
from headrace.runner.cpu import blas, blas_probe
from headrace.runner.cpu.blas_candidates import candidates, compile_kernel

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576), (8192, 2048))  # outputs, inputs
WEIGHT_BYTES = 64_000_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,16,32,85,512", help="numbers of rows")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processor", help="built for this one instead of the machine's own, as in g++ -march=")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, time on the core")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    if arguments.processor:
        products = products_for(f"-march={arguments.processor}", 1 if arguments.cpu_time else usable_cores())
    else:
        print(blas.prepare().name)
        from headrace.runner.cpu import products as cpu_products

        choice = cpu_products.choose()
        print(choice.note)
        products = choice.products
    if products is None:
        return 1
    for outputs, inputs in SHAPES:
        forms = forms_of(outputs, inputs, products)
        for rows in map(int, arguments.rows.split(",")):
            clock = time.process_time if arguments.cpu_time else time.perf_counter
            times = measure(forms, rows, inputs, arguments.rounds, clock)
            work = 2e-9 * rows * outputs * inputs
            cells = [
                f"{name} {1e6 * seconds:9.1f} µs {forms[name][1] * 1e-9 / seconds:5.1f} GB/s {work / seconds:6.1f}"
                for name, seconds in times.items()
            ]
            print(f"{outputs:>5} × {inputs:<5} {rows:>4} rows  {'   '.join(cells)} GFLOP/s", flush=True)
    return 0


def products_for(processor: str, threads: int) -> object:
    """The narrow products for a processor, with float32 ones for the same put in front of MLX's."""
    behind = next(one for one in candidates([]) if one.kernel)
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "libsgemm.so"
        compile_kernel(kernel, processor)
        blas_probe.load(behind.path, threads, ctypes.RTLD_GLOBAL, str(kernel))
    from headrace.runner.cpu import products as cpu_products
    from headrace.runner.cpu.narrow_weights import NarrowProducts
    from headrace.runner.kernels import native_extension

    products = NarrowProducts(native_extension.load(cpu_products.extension((processor,))))
    measured = cpu_products.measure(products)
    print(f"native/sgemm.cpp and narrow products, {processor}: {cpu_products.check(products) or 'right'}")
    print(f"times float32 at 1, 16 and 256 rows: 4 bits {measured.packed}, 16 bits {measured.plain}")
    return products


Form = tuple[list[Callable], int]  # products over different weights of the same shape, bytes of one


def forms_of(outputs: int, inputs: int, products: object) -> dict[str, Form]:
    import mlx.core as mx

    forms: dict[str, Form] = {}

    def add(name: str, make: Callable, run: Callable) -> None:
        first = make()
        count = max(1, WEIGHT_BYTES // first.nbytes)
        copies = [first, *(mx.array(first) + 0 for _ in range(count - 1))]
        mx.eval(copies)
        forms[name] = ([lambda x, w=w: run(x, w) for w in copies], first.nbytes)

    values = 0.1 * mx.random.normal((outputs, inputs))
    add("float32", lambda: values, lambda x, w: x @ w.T)
    plain = products.plain(values.astype(mx.bfloat16))
    add("bfloat16", lambda: plain.strips, lambda x, w: products.product(x, type(plain)(plain.form, w)))
    for bits in (8, 4):
        words, scales, biases = mx.quantize(values, group_size=32, bits=bits)
        packed = products.packed(words, scales.astype(mx.float16), biases.astype(mx.float16), bits)

        def run(x: mx.array, w: mx.array, packed: object = packed) -> mx.array:
            return products.product(x, type(packed)(packed.form, w))

        add(f"{bits} bits", lambda packed=packed: packed.strips, run)
    return forms


def measure(
    forms: dict[str, Form], rows: int, inputs: int, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Seconds of one product, by form."""
    import mlx.core as mx

    x = mx.random.normal((rows, inputs))
    mx.eval(x)
    best = dict.fromkeys(forms, float("inf"))
    for _ in range(rounds):
        for name, (products, _) in forms.items():
            some = products if rows < 64 else products[:2]
            mx.eval([product(x) for product in some[:1]])
            started = clock()
            mx.eval([product(x) for product in some])
            best[name] = min(best[name], (clock() - started) / len(some))
    return best


if __name__ == "__main__":
    sys.exit(main())
