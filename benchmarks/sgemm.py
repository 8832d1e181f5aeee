"""Times the products of a decode step on this CPU, for every BLAS that is found: one table per library.

    python benchmarks/sgemm.py [--threads N] [--busy N]

``--busy`` starts that many processes that keep a core each, to see what a product takes when cores are shared.
Each library is measured in a process of its own. Weights are larger than the caches together, as in a model.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time

from headrace.core.machine import cpu_model, usable_cores
from headrace.runner.cpu import blas_probe
from headrace.runner.cpu.blas_candidates import candidates

SHAPES = ((8192, 2048), (49152, 576), (1536, 576), (576, 1536))  # outputs, inputs
ROWS = (1, 2, 4, 8, 16, 32, 85, 128)
WEIGHT_BYTES = 64_000_000
REPEATS = 9


def measure(path: str, threads: int, kernel: str | None) -> list[dict[str, float]]:
    """Milliseconds per product: lowest, median and highest of the repeats, for every shape and number of rows."""
    product = blas_probe.Product(blas_probe.load(path, threads, ctypes.RTLD_LOCAL, kernel))
    cells = []
    for outputs, inputs in SHAPES:
        count = max(1, WEIGHT_BYTES // (4 * outputs * inputs))
        weights = [(ctypes.c_float * (outputs * inputs))() for _ in range(count)]
        for rows in ROWS:
            x, y = (ctypes.c_float * (rows * inputs))(), (ctypes.c_float * (rows * outputs))()
            times = []
            for _ in range(REPEATS):
                started = time.perf_counter()
                for w in weights:
                    product(x, w, y, rows, outputs, inputs)
                times.append((time.perf_counter() - started) * 1e3 / count)
            cell = {"outputs": outputs, "inputs": inputs, "rows": rows}
            cells.append(cell | {"low": min(times), "median": statistics.median(times), "high": max(times)})
    return cells


def show(name: str, cells: list[dict[str, float]]) -> None:
    print(f"\n{name}: ms per product, lowest / median / highest of {REPEATS}")
    for cell in cells:
        shape = f"{cell['outputs']:>5} × {cell['inputs']:<5} {cell['rows']:>4} rows"
        print(f"  {shape}  {cell['low']:8.3f} {cell['median']:8.3f} {cell['high']:8.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that keep a core busy")
    parser.add_argument("--one", nargs="+", metavar="LIBRARY", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one[0], arguments.threads, (arguments.one[1:] or [None])[0])))
        return 0
    print(f"{cpu_model()}, {arguments.threads} threads, {arguments.busy} busy processes")
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    try:
        for one in candidates([]):
            command = [sys.executable, __file__, "--threads", str(arguments.threads), "--one", one.path]
            child = subprocess.run(
                [*command, *([one.kernel] if one.kernel else [])], capture_output=True, check=True
            )
            show(one.name, json.loads(child.stdout))
    finally:
        for other in others:
            other.kill()
            other.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
