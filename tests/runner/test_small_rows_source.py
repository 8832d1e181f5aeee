"""The few-rows products' CUDA source, compiled as C++ against a shim of the CUDA names and run on the CPU.

It shows that indices, fragments, reductions, barriers and epilogues are right; bandwidth and the compiler are
``gpu_products.py``'s business.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace.runner.products import small_rows_source as source

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
SHIM = Path(__file__).parent / "cuda_shim" / "shim.hpp"
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    rows: int
    outputs: int
    inner: int
    parts: tuple[str, ...] = ()
    tiles: int = 1
    wide: int = 1
    warps: int = 8
    deep: int = 4
    type: str = "__nv_bfloat16"


def bits_of(values: np.ndarray, type_name: str) -> np.ndarray:
    """The values rounded to the 16-bit type, as uint16."""
    dtype = mx.bfloat16 if type_name == "__nv_bfloat16" else mx.float16
    return np.array(mx.array(values.astype(np.float32)).astype(dtype).view(mx.uint16))


def value_of(bits: np.ndarray, type_name: str) -> np.ndarray:
    dtype = mx.bfloat16 if type_name == "__nv_bfloat16" else mx.float16
    return np.array(mx.array(bits).view(dtype).astype(mx.float32)).astype(np.float64)


def program(case: Case) -> str:
    lines = [f"#define {part}" for part in case.parts]
    lines += [f'#include "{SHIM}"', f"using T = {case.type};", source.PRODUCT]
    constants = {"MT": case.tiles, "NT": case.wide, "W": case.warps, "DEEP": case.deep}
    lines += [f"constexpr int {name} = {value};" for name, value in constants.items()]
    lines += [f"constexpr int EPS = {np.float32(EPS).view(np.int32)};"]
    names = "const T* x, const T* w, const T* norm, const T* bias, const T* residual, T* y"
    lines += [f"void kernel(const int* x_shape, const int* w_shape, {names}) {{ {source.BODY} }}"]
    lines += [
        f"""extern "C" void run(int blocks, const int* x_shape, const int* w_shape, {names}) {{
          shim::launch_cuda({{uint((x_shape[0] + MT * 8 - 1) / (MT * 8)), uint(blocks), 1}}, W * 32,
            [&] {{ kernel(x_shape, w_shape, x, w, norm, bias, residual, y); }});
        }}"""
    ]
    return "\n".join(lines)


def build(text: str, folder: Path) -> ctypes.CDLL:
    path, library = folder / "kernel.cpp", folder / "kernel.so"
    path.write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 32, 64),
        Case(5, 48, 256, warps=4, deep=2),
        Case(8, 64, 1088, wide=2),
        Case(32, 64, 320, tiles=4, wide=4, deep=2),
        Case(13, 32, 544, tiles=2, warps=16),
        Case(3, 32, 160, ("NORM",)),
        Case(29, 64, 288, ("NORM", "BIAS"), tiles=4, wide=2),
        Case(8, 64, 96, ("RESIDUAL",), type="__half"),
        Case(7, 32, 512, ("RESIDUAL", "BIAS"), warps=16),
        Case(6, 96, 192, ("NORM", "GATE"), wide=2),
        Case(32, 128, 224, ("NORM", "GATE"), tiles=4, wide=4, deep=2),
        Case(17, 64, 128, ("GATE", "BIAS"), tiles=4, wide=2, type="__half"),
        Case(45, 32, 96, ("RESIDUAL",), tiles=4),
        Case(70, 64, 128, ("NORM", "GATE", "BIAS"), tiles=4, wide=2),
    ],
    ids=str,
)
def test_equals_the_definition(case: Case, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    gated = "GATE" in case.parts
    width = case.outputs // 2 if gated else case.outputs
    shapes = {
        "x": (case.rows, case.inner),
        "w": (case.outputs, case.inner),
        "norm": (case.inner,),
        "bias": (case.outputs,),
        "residual": (case.rows, width),
    }
    arrays = {name: bits_of(rng.normal(size=shape), case.type) for name, shape in shapes.items()}
    y = np.full((case.rows + 1, width), 0x7FC0, np.uint16)
    library = build(program(case), tmp_path)
    sizes = [np.array(shapes[name], np.int32) for name in ("x", "w")]
    blocks = width // (16 * (case.wide // 2 if gated else case.wide))
    library.run(ctypes.c_int(blocks), *map(pointer, sizes), *map(pointer, arrays.values()), pointer(y))
    assert (y[case.rows :] == 0x7FC0).all()
    expected = reference(case, {name: value_of(bits, case.type) for name, bits in arrays.items()})
    got = value_of(y[: case.rows], case.type)
    assert np.abs(got - expected).max() <= 8e-3 * np.abs(expected).max()


def reference(case: Case, at: dict[str, np.ndarray]) -> np.ndarray:
    x = at["x"]
    if "NORM" in case.parts:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * at["norm"]
    y = x @ at["w"].T
    if "BIAS" in case.parts:
        y = y + at["bias"]
    if "GATE" in case.parts:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    if "RESIDUAL" in case.parts:
        y = y + at["residual"]
    return y
