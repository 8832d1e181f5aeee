"""The Metal form of the decode kernel, compiled as C++ against a shim of the Metal names and run on the CPU.

It shows that the source is sound C++, that indices, reductions and barriers are right; it has not run on Metal.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace.runner.attention import paged_decode_source as source
from headrace.runner.attention.paged_decode import _shape

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
SHIM = Path(__file__).parent / "metal_shim" / "shim.hpp"


@dataclass(frozen=True)
class Case:
    dim: int
    heads: int
    kv_heads: int
    lengths: tuple[int, ...]
    type: str = "float"
    window: int = 0
    sinks: bool = False
    softcap: float = 0.0
    splits: int | None = None
    block_size: int = 16


def program(case: Case, splits: int) -> str:
    shape = _shape(len(case.lengths), case.heads, case.kv_heads, case.dim, 16384)
    constants = {
        "D": case.dim,
        "G": shape.queries,
        "GT": shape.queries_per_block,
        "KV": case.kv_heads,
        "BS": case.block_size,
        "HAS_SINKS": int(case.sinks),
        "LP": shape.lanes,
        "H": case.heads,
    }
    lines = [f'#include "{SHIM}"', "using namespace metal;", source.METAL_PRELUDE, f"using T = {case.type};"]
    lines += [f"constexpr int {name} = {value};" for name, value in constants.items()]
    inputs = (
        "const T* q, const T* k, const T* v, const int* tables, const int* bases, const int* ends, "
        "const int* sizes, const float* params, const float* sinks"
    )
    lines += [f"void split_kernel({inputs}, float* part_out, float* stats) {{ {source.DECODE_BODY} }}"]
    lines += [f"#define WHOLE\nvoid whole_kernel({inputs}, T* out) {{ {source.DECODE_BODY} }}"]
    lines += [
        "void combine_kernel(const float* parts, const float* stats, const int* sizes, const float* sinks, "
        f"T* out) {{ {source.COMBINE_BODY} }}",
        f"""extern "C" void run({inputs}, int rows, float* parts, float* stats, T* out) {{
          uint3 grid = {{uint(sizes[1]) * 128, uint(H / GT), uint(rows)}};
          if (sizes[1] == 1) {{
            shim::launch(grid, 128,
              [&] {{ whole_kernel(q, k, v, tables, bases, ends, sizes, params, sinks, out); }});
          }} else {{
            shim::launch(grid, 128,
              [&] {{ split_kernel(q, k, v, tables, bases, ends, sizes, params, sinks, parts, stats); }});
            shim::launch({{D, H, uint(rows)}}, D, [&] {{ combine_kernel(parts, stats, sizes, sinks, out); }});
          }}
        }}""",
    ]
    return "\n".join(lines)


def run_case(case: Case, folder: Path) -> None:
    rng = np.random.default_rng(7)
    rows, size = len(case.lengths), case.block_size
    counts = [-(-length // size) for length in case.lengths]
    ids = rng.permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    tables = np.zeros((rows, max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], ids = ids[:count], ids[count:]
    dtype = {"float": np.float32, "half": np.float16}[case.type]
    pool = (size * (sum(counts) + 1), case.kv_heads, case.dim)
    q = rng.normal(size=(rows, case.heads, case.dim)).astype(dtype)
    k, v = rng.normal(size=pool).astype(dtype), rng.normal(size=pool).astype(dtype)
    sinks = rng.normal(size=case.heads).astype(np.float32)
    splits = case.splits or 1
    scale = case.dim**-0.5
    path = folder / "kernel.cpp"
    path.write_text(program(case, splits))
    library = folder / "kernel.so"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(path)],
        check=True,
        capture_output=True,
    )
    parts = np.zeros((rows, case.heads, splits, case.dim), np.float32)
    stats = np.zeros((rows, case.heads, splits, 2), np.float32)
    out = np.zeros((rows, case.heads, case.dim), dtype)
    arrays = [
        q,
        k,
        v,
        tables,
        np.zeros(rows, np.int32),
        np.array(case.lengths, np.int32),
        np.array([tables.shape[1], splits, case.window], np.int32),
        np.array([scale, case.softcap], np.float32),
        sinks,
    ]
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]
    results = [array.ctypes.data_as(ctypes.c_void_p) for array in (parts, stats, out)]
    ctypes.CDLL(str(library)).run(*pointers, ctypes.c_int(rows), *results)
    expected = reference(case, q, k, v, tables, sinks, scale)
    assert np.abs(out.astype(np.float64) - expected).max() < (1e-5 if case.type == "float" else 5e-3)


def reference(
    case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, tables: np.ndarray, sinks: np.ndarray, scale: float
) -> np.ndarray:
    """Attention by its definition, in float64."""
    out = np.zeros(q.shape)
    for row, length in enumerate(case.lengths):
        positions = np.arange(max(0, length - case.window) if case.window else 0, length)
        slots = tables[row, positions // case.block_size] * case.block_size + positions % case.block_size
        for head in range(case.heads):
            kv = head // (case.heads // case.kv_heads)
            scores = k[slots, kv].astype(np.float64) @ q[row, head].astype(np.float64) * scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            if case.sinks:
                scores = np.append(scores, sinks[head])
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[row, head] = weights[: len(slots)] @ v[slots, kv].astype(np.float64)
    return out


@pytest.mark.parametrize(
    "case",
    [
        Case(64, 4, 4, (1, 2, 17, 130)),
        Case(64, 9, 3, (1, 15, 16, 200)),
        Case(80, 4, 2, (33, 129)),
        Case(96, 6, 1, (31, 64)),
        Case(128, 8, 1, (5, 260)),
        Case(192, 4, 2, (40,)),
        Case(256, 4, 1, (70, 3)),
        Case(128, 16, 1, (65,)),
        Case(64, 8, 2, (1, 100, 300), window=64),
        Case(64, 4, 2, (9, 140), sinks=True),
        Case(64, 4, 2, (150,), softcap=2.0),
        Case(64, 4, 2, (3, 400, 129), splits=4),
        Case(80, 4, 2, (700, 1), splits=7, sinks=True, window=300),
        Case(128, 4, 2, (50, 130), type="half"),
        Case(64, 4, 1, (200, 90), type="half", splits=3),
    ],
    ids=str,
)
def test_equals_the_definition(case: Case, tmp_path: Path) -> None:
    run_case(case, tmp_path)
