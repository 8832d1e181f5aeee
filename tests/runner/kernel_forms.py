"""The decode kernel's Metal and CUDA forms compiled as C++ against shims of those languages' names."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from kernel_cases import Case, build

from headrace.runner.attention import paged_decode, paged_decode_source

SHIMS = Path(__file__).parent / "metal_shim"
FORMS = {
    "metal": ("shim.hpp", "using namespace metal;", paged_decode_source.METAL_PRELUDE, paged_decode.METAL_FLOATS),
    "cuda": ("cuda_names.hpp", "", paged_decode_source.CUDA_PRELUDE, paged_decode.CUDA_FLOATS),
}
TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat"}


def form_of(case: Case, name: str) -> paged_decode.Form:
    return paged_decode.Form.of(
        case.layer,
        case.heads,
        case.block_size,
        FORMS[name][3],
        has_sinks=case.sinks,
        has_softcap=case.softcap > 0,
    )


def compiled(cases: Sequence[Case], name: str, folder: Path) -> ctypes.CDLL:
    """One library with a function ``run_<index>`` per case."""
    shim, using, prelude, _ = FORMS[name]
    parts = [f'#include "{SHIMS / "bfloat.hpp"}"', f'#include "{SHIMS / shim}"', using, prelude]
    parts += [_functions(index, case, name) for index, case in enumerate(cases)]
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text("\n".join(parts))
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(source)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:4000]
    return ctypes.CDLL(str(library))


def _functions(index: int, case: Case, name: str) -> str:
    form = form_of(case, name)
    types = {"tables": "int", "bases": "int", "ends": "int", "sizes": "int", "params": "float", "sinks": "float"}
    types |= {"mark": "int", "q": "T"} | dict.fromkeys("kv", "T" if case.bits is None else "unsigned")
    names = paged_decode.input_names(case.bits)
    inputs = ", ".join(f"const {types.get(one, 'S')}* {one}" for one in names)
    passed = ", ".join(names)
    body = paged_decode_source.DECODE_BODY
    bits = "#undef BITS" if case.bits is None else f"#undef BITS\n#define BITS {case.bits}"
    return f"""
namespace case_{index} {{
{_constants(form)}
{bits}
#undef WHOLE
void split_kernel({inputs}, float* part_out, float* stats) {{ {body} }}
#define WHOLE
void whole_kernel({inputs}, T* out) {{ {body} }}
void combine_kernel(const float* parts, const float* stats, const int* sizes, const float* sinks, T* out) {{
{paged_decode_source.COMBINE_BODY} }}
extern "C" void run_{index}({inputs}, int rows, float* parts, float* stats, T* out) {{
  const uint3 grid = {{uint(sizes[1]) * 128, uint(H / GT), uint(rows)}};
  if (sizes[1] == 1) {{
    shim::launch(grid, 128, [&] {{ whole_kernel({passed}, out); }});
  }} else {{
    shim::launch(grid, 128, [&] {{ split_kernel({passed}, parts, stats); }});
    shim::launch({{DV, H, uint(rows)}}, DV, [&] {{ combine_kernel(parts, stats, sizes, sinks, out); }});
  }}
}}
}}"""


def _constants(form: paged_decode.Form) -> str:
    lines = []
    for name, value in dict(form.template(whole=True) + form.combine_template).items():
        is_type = isinstance(value, mx.Dtype)
        lines.append(f"using {name} = {TYPES[value]};" if is_type else f"constexpr int {name} = {value};")
    return "\n".join(lines)


def run(library: ctypes.CDLL, index: int, case: Case) -> tuple[np.ndarray, Any]:
    """Output ``[B, H, value_dim]`` of a case, and what ``build`` made for it."""
    queries, view, sinks = built = build(case)
    rows, pool = len(case.lengths), view.pool
    sizes = [np.array(view.group.tables).shape[1], case.splits, case.window or 0]
    inputs = [
        _bits(queries),
        *(_bits(x) for x in (pool.keys[0], *pool.key_affine[0], pool.values[0], *pool.value_affine[0])),
        np.array(view.group.tables),
        np.array(view.group.bases),
        np.array(view.batch.ends),
        np.array(sizes, np.int32),
        np.array([case.scale, case.softcap], np.float32),
        np.zeros(1, np.float32) if sinks is None else np.array(sinks),
        np.zeros(1, np.int32),
    ]
    parts = np.zeros((rows, case.heads, case.splits, case.widths[1]), np.float32)
    stats = np.zeros((rows, case.heads, case.splits, 2), np.float32)
    out = _bits(mx.zeros((rows, case.heads, case.widths[1]), case.layer.dtype)).copy()
    pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in inputs]
    results = [array.ctypes.data_as(ctypes.c_void_p) for array in (parts, stats, out)]
    getattr(library, f"run_{index}")(*pointers, ctypes.c_int(rows), *results)
    result = mx.array(out).view(mx.bfloat16) if case.dtype == "bfloat16" else mx.array(out)
    return np.array(result.astype(mx.float32), np.float64), built


def _bits(x: mx.array) -> np.ndarray:
    """An array of the same bits that NumPy can hold."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)
