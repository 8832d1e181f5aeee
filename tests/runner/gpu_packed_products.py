"""Which tiling of a product over packed weights is quickest on a CUDA GPU, by recorded chains. Not a pytest file.

    python tests/runner/gpu_packed_products.py --shapes llama-8b,llama-1b --seconds 60

Each is compared with the unpacked product first. Goes on after a failure; prints all failures at the end and exits
with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product as product_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpu_products as gpu  # first: it makes the package importable
import mlx.core as mx

from headrace.runner.kernels.language import compile_ahead
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.products import choice as product_choice
from headrace.runner.products import small_rows
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.packed_weights import PackedWeights
from headrace.runner.products.small_rows import Dense, Product
from headrace.runner.products.tiling import MOST_SHARED_BYTES, Tiling

PACKED_ROWS = (1, 8)
MOST_OUTPUTS = 8192


def sweep(products: KernelProducts, shapes: Sequence[str]) -> None:
    """Device microseconds of tilings over 4-bit weights, in steps as they are replayed; * is tried at a start."""
    recorder = Recorder.for_device()
    if recorder is None:
        gpu.say("FAILED: nothing can be recorded")
        return
    cases = [
        (shape, label, outputs, inner, kind)
        for shape in shapes
        for label, outputs, inner, kind in gpu.product_cases(shape)
    ]

    def forms() -> None:
        for _, _, outputs, inner, kind in cases:
            for rows in PACKED_ROWS:
                x, product = gpu.random_product(rows, outputs, inner, kind, mx.bfloat16)
                product = replace(product, dense=packed_dense(outputs, inner))
                for tiling in packed_candidates(rows, product):
                    products(x, replace(product, tiling=tiling))

    compile_ahead(forms)
    gpu.say("compiled; us by tiles/wide/warps/deep/resident")
    for shape, label, outputs, inner, kind in cases:
        layers = [packed_dense(outputs, inner) for _ in range(product_choice.MEASURED_TOGETHER)]
        mx.eval([[one.packed.words, one.packed.scales, one.packed.biases] for one in layers if one.packed])
        for rows in PACKED_ROWS:
            name = f"{shape} {label} {outputs} x {inner}, {rows} rows"
            gpu.attempt(name, partial(packed_one, products, recorder, name, rows, layers, kind))


def packed_dense(outputs: int, inner: int) -> Dense:
    words = mx.random.randint(0, 1 << 31, (outputs, inner // 8)).astype(mx.uint32)
    scales = (mx.random.normal((outputs, inner // 64)) * 0.01).astype(mx.bfloat16)
    return Dense(None, None, PackedWeights(words, scales, -8 * scales, 4, 64))


def packed_one(
    products: KernelProducts,
    recorder: Recorder,
    name: str,
    rows: int,
    layers: Sequence[Dense],
    kind: dict[str, bool],
) -> str | None:
    x, product = gpu.random_product(rows, *layers[0].shape, kind, mx.bfloat16)
    mx.eval([x, product.residual] if product.residual is not None else x)
    made = [replace(product, dense=dense) for dense in layers]
    right = small_rows.unpacking_product(x, made[0])
    found, faults = [], []
    tried = products.tilings(rows, mx.bfloat16, made[0])
    for tiling in packed_candidates(rows, made[0]):

        def by(x: mx.array, product: Product, tiling: Tiling = tiling) -> mx.array:
            return products(x, replace(product, tiling=tiling))

        try:
            wrong = small_rows.largest_difference(by(x, made[0]), right)
            if not wrong <= product_choice.TOLERANCE:
                faults.append(f"{tiling} differs by {wrong:.3g}")
                continue
            found.append((product_choice._cost(by, made, x, recorder).device * 1e6, tiling))
        except Exception as error:
            faults.append(f"{tiling}: {str(error).splitlines()[0][:100]}")
    found.sort(key=lambda pair: pair[0])
    shown = [(us, tiling) for place, (us, tiling) in enumerate(found) if place < 14 or tiling in tried]
    gpu.say(f"{name}: " + ", ".join(f"{'*' if tiling in tried else ''}{tiling} {us:.1f}" for us, tiling in shown))
    return "; ".join(faults) or None


def packed_candidates(rows: int, product: Product) -> list[Tiling]:
    """Those that are tried at a start, and others, as many blocks to a multiprocessor as registers allow."""
    outputs, inner = product.dense.shape
    found = [one for one in KernelProducts.tilings(rows, mx.bfloat16, product) if isinstance(one, Tiling)]
    shared = rows == 1 and 2 * inner <= MOST_SHARED_BYTES
    for wide, warps, deep in product_of((1, 2, 4), (2, 4, 8, 16), (1, 2, 3, 4)):
        registers = 32 + 8 * wide + 14 * wide * deep + (0 if shared else 16)
        if wide * deep > 6 or registers * warps * 32 > 65536 or (product.gated and wide == 1):
            continue
        if warps == 16 and outputs > MOST_OUTPUTS:
            continue
        resident = min(65536 // (registers * warps * 32), 2048 // (warps * 32))
        found.append(Tiling(1, wide, warps, deep, resident, product.norm is not None and not shared, shared))
    return [one for one in dict.fromkeys(found) if outputs % (16 * one.wide) == 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama-8b,llama-1b")
    parser.add_argument("--seconds", type=float, default=120.0, help="start no more after these")
    args = parser.parse_args()
    gpu.limit_s[0] = args.seconds
    if mx.default_device() != mx.gpu or mx.metal.is_available():
        sys.exit("needs a CUDA GPU")
    sweep(KernelProducts(), args.shapes.split(","))
    gpu.say(f"{len(gpu.failures)} failures")
    for failure in gpu.failures:
        print("FAILED", failure)
    sys.exit(1 if gpu.failures else 0)


if __name__ == "__main__":
    main()
