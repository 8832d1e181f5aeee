"""``cuda_kernel`` for tests without a GPU: the kernel's text as C++ against the shim, run on the CPU at each call.

The signature is put together as MLX does it: inputs in order, shapes where the text names them, then outputs, with
template values as constants. So a wrong order, grid or constant on the Python side shows.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.runner.products.small_rows_source import MACHINE

SHIM = Path(__file__).parent / "cuda_shim" / "shim.hpp"
TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int",
    mx.uint32: "unsigned",
    mx.bool_: "bool",
}


class EmulatedKernel:
    def __init__(
        self,
        folder: Path,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        shared_memory: int,
    ) -> None:
        assert MACHINE in header or "asm" not in header or "#ifdef __CUDACC__" in header
        clusters = re.search(r"__cluster_dims__\((\d+), 1, 1\)", header)
        self._cluster = int(clusters[1]) if clusters else 1
        self._folder = folder
        self._names = list(input_names), list(output_names)
        self._source, self._header = source, header.replace(MACHINE, "")
        self._shared_memory = shared_memory

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: Sequence[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        assert len(inputs) == len(self._names[0]) and threadgroup[1:] == (1, 1)
        assert grid[0] % (threadgroup[0] * self._cluster) == 0, "blocks and clusters are whole"
        library = self._library([array.dtype for array in inputs], template, output_dtypes)
        arrays, shapes = [host(array) for array in inputs], [np.array(array.shape, np.int32) for array in inputs]
        outputs = [
            np.full(shape, 0x7F, _storage(dtype))
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (*arrays, *shapes, *outputs)]
        library.run(
            *(ctypes.c_uint(size) for size in (grid[0] // threadgroup[0], *grid[1:], threadgroup[0])), *pointers
        )
        return [device(array, dtype) for array, dtype in zip(outputs, output_dtypes, strict=True)]

    def _library(
        self, dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, Any]], output_dtypes: Sequence[mx.Dtype]
    ) -> ctypes.CDLL:
        names, results = self._names
        data = [f"const {TYPES[dtype]}* {name}" for name, dtype in zip(names, dtypes, strict=True)]
        shapes = [f"const int* {name}_shape" for name in names]
        made = [f"{TYPES[dtype]}* {name}" for name, dtype in zip(results, output_dtypes, strict=True)]
        signature = ", ".join([*data, *shapes, *made])
        constants = "\n".join(
            f"using {name} = {TYPES[value]};"
            if isinstance(value, mx.Dtype)
            else f"constexpr int {name} = {value};"
            for name, value in template
        )
        arguments = ", ".join([*names, *(f"{name}_shape" for name in names), *results])
        # MLX's memory begins at a multiple of eight bytes on the CPU.
        text = f"""#include "{SHIM}"
          #define alignas(bytes)
          {self._header}
          void kernel({signature}) {{
          {constants}
          {self._source}
          }}
          extern "C" void run(uint grid_x, uint grid_y, uint grid_z, uint threads, {signature}) {{
            shim::launch_cuda({{grid_x, grid_y, grid_z}}, int(threads), [&] {{ kernel({arguments}); }},
                              {self._shared_memory}, {self._cluster});
          }}"""
        stem = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        if not stem.with_suffix(".so").exists():
            stem.with_suffix(".cpp").write_text(text)
            command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", f"{stem}.so", f"{stem}.cpp"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        return ctypes.CDLL(f"{stem}.so")


def _storage(dtype: mx.Dtype) -> Any:
    whole = {mx.float32: np.float32, mx.int32: np.int32, mx.uint32: np.uint32, mx.bool_: np.bool_}
    return whole.get(dtype, np.uint16)


def host(array: mx.array) -> np.ndarray:
    """The array's bits, contiguous, where they are: what a kernel writes into its inputs stays."""
    array = mx.contiguous(array)
    return np.array(array.view(mx.uint16) if array.dtype.size == 2 else array, copy=False)


def device(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(dtype) if dtype.size == 2 else mx.array(array)


def emulated(folder: Path) -> Any:
    """A stand-in for ``cuda_kernel``; compiled kernels go to ``folder``."""

    def make(
        *,
        name: str,
        input_names: Any,
        output_names: Any,
        source: str,
        header: str = "",
        shared_memory: int = 0,
    ) -> EmulatedKernel:
        return EmulatedKernel(folder, input_names, output_names, source, header, shared_memory)

    return make
