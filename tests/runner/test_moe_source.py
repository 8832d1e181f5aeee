"""The experts' CUDA source, compiled as C++ against a shim of the CUDA names and run on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_small_rows_source import EPS, SHIM, bits_of, build, pointer, value_of

from headrace.runner.products import small_rows_source
from headrace.runner.substitutions import moe_source as source

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
BF16 = "__nv_bfloat16"


@dataclass(frozen=True)
class Case:
    rows: int
    experts: int
    choices: int
    inner: int
    outputs: int
    parts: tuple[str, ...] = ()
    wide: int = 2
    warps: int = 4
    type: str = BF16
    crowded: bool = False  # every row chooses the first expert
    tiles: int = 1


def experts_program(case: Case) -> str:
    gated = "GATE" in case.parts
    result = "T" if gated else "float"
    lines = [f"#define {part}" for part in case.parts]
    lines += [f'#include "{SHIM}"', f"using T = {case.type};", small_rows_source.PRODUCT]
    constants = {"E": case.experts, "MT": case.tiles, "NT": case.wide, "W": case.warps, "DEEP": 2}
    constants["EPS"] = int(np.float32(EPS).view(np.int32))
    lines += [f"constexpr int {name} = {value};" for name, value in constants.items()]
    names = (
        "const int* w_shape, const int* chosen_shape, const T* x, const T* w, const T* up, const int* chosen, "
        f"const float* weights, const T* norm, {result}* y"
    )
    lines += [f"void kernel({names}) {{ {source.EXPERTS} }}"]
    lines += [
        f"""extern "C" void run(int blocks, int slots, {names}) {{
          shim::launch_cuda({{uint(blocks), uint(slots), 1}}, W * 32,
            [&] {{ kernel(w_shape, chosen_shape, x, w, up, chosen, weights, norm, y); }});
        }}"""
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 3, 64, 32, ("GATE", "NORM")),
        Case(5, 8, 2, 96, 32, ("GATE", "NORM"), wide=4),
        Case(11, 4, 1, 64, 32, ("GATE", "NORM"), crowded=True),
        Case(3, 16, 2, 64, 48, ("GATE",), type="__half"),
        Case(2, 16, 4, 160, 32, wide=1),
        Case(10, 4, 2, 64, 64, crowded=True),
        Case(37, 4, 1, 64, 32, ("GATE", "NORM"), crowded=True, tiles=2),
        Case(37, 4, 2, 64, 32, crowded=True, tiles=4),
    ],
    ids=str,
)
def test_experts_multiply_the_rows_that_chose_them(case: Case, tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    gated = "GATE" in case.parts
    chosen = np.stack([rng.permutation(case.experts)[: case.choices] for _ in range(case.rows)]).astype(np.int32)
    if case.crowded:
        chosen[:, 0] = 0
        chosen[:, 1:] = 1 + chosen[:, 1:] % (case.experts - 1)
    pairs = case.rows * case.choices
    shapes = {
        "x": (case.rows if gated else pairs, case.inner),
        "w": (case.experts, case.outputs, case.inner),
        "up": (case.experts, case.outputs, case.inner),
        "norm": (case.inner,),
    }
    bits = {name: bits_of(rng.normal(size=shape), case.type) for name, shape in shapes.items()}
    weights = rng.uniform(size=(case.rows, case.choices)).astype(np.float32)
    y = (
        np.full((pairs, case.outputs), 0x7FC0, np.uint16)
        if gated
        else np.full((pairs, case.outputs), np.nan, "f4")
    )
    sizes = [np.array(shapes["w"], np.int32), np.array(chosen.shape, np.int32)]
    arrays = [bits["x"], bits["w"], bits["up"], chosen, weights, bits["norm"]]
    library = build(experts_program(case), tmp_path)
    blocks = case.outputs // (16 * (case.wide // 2 if gated else case.wide))
    slots = min(pairs, case.experts)
    library.run(ctypes.c_int(blocks), ctypes.c_int(slots), *map(pointer, sizes), *map(pointer, arrays), pointer(y))
    values = {name: value_of(array, case.type) for name, array in bits.items()}
    expected = experts_reference(case, values, chosen, weights)
    got = value_of(y, case.type) if gated else y
    assert np.abs(got - expected).max() <= 8e-3 * np.abs(expected).max()


def experts_reference(
    case: Case, at: dict[str, np.ndarray], chosen: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    x = at["x"]
    if "NORM" in case.parts:
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * at["norm"]
    results = []
    for pair, expert in enumerate(chosen.reshape(-1)):
        if "GATE" in case.parts:
            gate, up = (at[name][expert] @ x[pair // case.choices] for name in ("w", "up"))
            results.append(gate / (1 + np.exp(-gate)) * up)
        else:
            results.append(at["w"][expert] @ x[pair] * weights.reshape(-1)[pair])
    return np.stack(results)


@pytest.mark.parametrize(("experts", "choices"), [(8, 3), (128, 8), (60, 4), (256, 40)])
@pytest.mark.parametrize("normalize", [0, 1])
def test_routing(experts: int, choices: int, normalize: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    rows = 5
    bits = bits_of(rng.normal(size=(rows, experts)) * 2, BF16)
    scale = int(np.float32(0.5).view(np.int32))
    constants = f"constexpr int E = {experts}, C = {choices}, NORMALIZE = {normalize}, SCALE = {scale};"
    text = "\n".join(
        [
            f'#include "{SHIM}"',
            f"using T = {BF16}; {constants}",
            f"void kernel(const T* logits, int* chosen, float* weights) {{ {source.ROUTE} }}",
            'extern "C" void run(int rows, const T* logits, int* chosen, float* weights) {',
            "  shim::launch_cuda({uint(rows), 1, 1}, 32, [&] { kernel(logits, chosen, weights); });",
            "}",
        ]
    )
    chosen, weights = np.full((rows, choices), -1, np.int32), np.zeros((rows, choices), np.float32)
    build(text, tmp_path).run(ctypes.c_int(rows), pointer(bits), pointer(chosen), pointer(weights))
    logits = value_of(bits, BF16)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :choices]
    assert (chosen == expected).all()
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    picked = np.take_along_axis(shares, expected, axis=1)
    wanted = (picked / picked.sum(axis=1, keepdims=True) if normalize else picked) * 0.5
    assert np.allclose(weights, wanted, rtol=1e-4)


def test_combination(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    rows, choices, outputs = 3, 4, 300
    parts = rng.normal(size=(rows * choices, outputs)).astype(np.float32)
    residual = bits_of(rng.normal(size=(rows, outputs)), BF16)
    text = "\n".join(
        [
            f'#include "{SHIM}"',
            f"using T = {BF16}; constexpr int C = {choices};",
            "void kernel(const int* parts_shape, const float* parts, const T* residual, T* y) {",
            source.COMBINE + "}",
            'extern "C" void run(const int* parts_shape, const float* parts, const T* residual, T* y) {',
            f"  shim::launch_cuda({{3, {rows}, 1}}, 128, [&] {{ kernel(parts_shape, parts, residual, y); }});",
            "}",
        ]
    )
    y = np.zeros((rows, outputs), np.uint16)
    shape = np.array(parts.shape, np.int32)
    build(text, tmp_path).run(*map(pointer, (shape, parts, residual, y)))
    expected = parts.reshape(rows, choices, outputs).sum(axis=1) + value_of(residual, BF16)
    assert np.abs(value_of(y, BF16) - expected).max() <= 8e-3 * np.abs(expected).max()
