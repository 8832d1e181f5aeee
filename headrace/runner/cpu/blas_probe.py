"""Loads one BLAS library, checks its float32 product against exact integers and measures it.

Also runs as a program of its own (``python blas_probe.py LIBRARY THREADS [KERNEL]``, one JSON object out), so that
a library that crashes on this processor, as old builds do on new ones, costs a child and not the worker.
Standard library only: it must start fast and must not load another BLAS along with NumPy.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from pathlib import Path

_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE = 101, 111, 112

# Measured products, rows × 2048 outputs of 1024 inputs: one decoding stream, a batch, a prefill chunk.
_OUTPUTS, _INPUTS = 2048, 1024
_ROWS = (1, 16, 256)
_REPEATS = 5

# Rows of the largest products that native/sgemm.cpp computes itself. It computes all of them unless the BLAS is
# clearly faster at a prefill: then a row's result does not depend on how many others there are.
ALL_ROWS, FEW_ROWS = 2**31 - 1, 64
_CLEARLY = 1.1


def load(
    path: str, threads: int, mode: int, kernel: str | None = None, kernel_rows: int = ALL_ROWS
) -> ctypes.CDLL:
    """Load a BLAS with ``threads`` threads; ``mode`` is RTLD_GLOBAL to take over, RTLD_LOCAL to look at it.

    With ``kernel``, the library built from native/sgemm.cpp, that one is loaded so; it brings the threads and
    calls the BLAS, on one thread each, for what it does not compute: products of more than ``kernel_rows`` rows
    and those of another form. Returns the library that has cblas_sgemm.
    """
    own_threads = 1 if kernel else threads
    if "mkl" in Path(path).name:
        os.environ["MKL_THREADING_LAYER"] = "INTEL"  # the default layer needs a GNU OpenMP that may be absent
        os.environ["MKL_NUM_THREADS"] = str(own_threads)
        ctypes.CDLL(str(Path(path).with_name("libiomp5.so")), ctypes.RTLD_GLOBAL)
    os.environ["OPENBLAS_NUM_THREADS"] = str(own_threads)  # read once, when the library starts its threads
    if kernel is None:
        return ctypes.CDLL(path, mode)
    base = ctypes.CDLL(path, ctypes.RTLD_LOCAL)
    library = ctypes.CDLL(kernel, mode)
    library.headrace_sgemm_start(ctypes.cast(base.cblas_sgemm, ctypes.c_void_p), threads)
    library.headrace_sgemm_rows(kernel_rows)
    return library


def core_name(library: ctypes.CDLL) -> str:
    """The processor family whose kernels OpenBLAS picked; "" for other libraries."""
    for prefix in ("", "scipy_"):
        function = getattr(library, f"{prefix}openblas_get_corename", None)
        if function is not None:
            function.restype = ctypes.c_char_p
            return str(function().decode())
    return ""


class Product:
    """``y = x wᵀ`` for float32 x [rows, inputs], w [outputs, inputs]: the form of every linear layer."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sgemm = library.cblas_sgemm
        integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
        shape = (integer, integer, integer, integer, integer, integer)
        self._sgemm.argtypes = [*shape, real, pointer, integer, pointer, integer, real, pointer, integer]
        self._sgemm.restype = None

    def __call__(self, x: object, w: object, y: object, rows: int, outputs: int, inputs: int) -> None:
        layout = (_ROW_MAJOR, _NO_TRANSPOSE, _TRANSPOSE, rows, outputs, inputs)
        self._sgemm(*layout, 1.0, x, inputs, w, inputs, 0.0, y, outputs)


def is_correct(product: Product) -> bool:
    """Small integers multiply exactly in float32, so the result must be equal, not close."""
    source = random.Random(1)
    for rows, outputs, inputs in ((1, 133, 65), (3, 70, 129), (17, 19, 31), (40, 48, 16), (90, 33, 20)):
        x = [source.randint(-4, 4) for _ in range(rows * inputs)]
        w = [source.randint(-4, 4) for _ in range(outputs * inputs)]
        y = (ctypes.c_float * (rows * outputs))()
        product(_floats(x), _floats(w), y, rows, outputs, inputs)
        for row in range(rows):
            mine = x[row * inputs : (row + 1) * inputs]
            for output in range(outputs):
                theirs = w[output * inputs : (output + 1) * inputs]
                if y[row * outputs + output] != sum(a * b for a, b in zip(mine, theirs, strict=True)):
                    return False
    return True


def measure(product: Product) -> list[float]:
    """Seconds for each of the measured products, best of a few runs."""
    w = (ctypes.c_float * (_OUTPUTS * _INPUTS))()
    seconds = []
    for rows in _ROWS:
        x, y = (ctypes.c_float * (rows * _INPUTS))(), (ctypes.c_float * (rows * _OUTPUTS))()
        seconds.append(min(_seconds(product, x, w, y, rows) for _ in range(_REPEATS)))
    return seconds


def _seconds(product: Product, x: object, w: object, y: object, rows: int) -> float:
    started = time.perf_counter()
    product(x, w, y, rows, _OUTPUTS, _INPUTS)
    return time.perf_counter() - started


def _floats(values: list[int]) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * len(values))(*values)


def main(path: str, threads: int, kernel: str | None = None) -> dict[str, object]:
    library = load(path, threads, ctypes.RTLD_LOCAL, kernel)
    product = Product(library)
    if not is_correct(product):
        return {"correct": False}
    seconds, kernel_rows = measure(product), ALL_ROWS
    if kernel is not None:
        library.headrace_sgemm_rows(FEW_ROWS)
        shared_out = measure(product)
        if seconds[-1] > _CLEARLY * shared_out[-1]:
            seconds, kernel_rows = shared_out, FEW_ROWS
    return {
        "correct": True,
        "seconds": sum(seconds),
        "gflops": 2e-9 * _ROWS[-1] * _OUTPUTS * _INPUTS / seconds[-1],
        "kernel_rows": kernel_rows,
        "core": core_name(ctypes.CDLL(path)),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
