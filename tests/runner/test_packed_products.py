"""Products over packed weights, the CUDA source run on the CPU: they are those of the weights that MLX unpacks."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated_cuda import emulated

from headrace.runner.products import kernel_products
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.packed_weights import PackedWeights
from headrace.runner.products.small_rows import Dense, Norm, Product, plain_product
from headrace.runner.products.tiling import Tiling
from headrace.runner.substitutions import moe_decode
from headrace.runner.substitutions.moe_decode import CudaExperts, Experts, ExpertsTiling

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
EPS = 1e-5
BF16, F16 = mx.bfloat16, mx.float16
# Results are rounded to these once; the sum of squares and the weights are rounded too.
ROUNDING = {BF16: 8e-3, F16: 2e-3}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    for module in (kernel_products, moe_decode):
        monkeypatch.setattr(module, "cuda_kernel", emulated(compiled))


def normal(*shape: int, dtype: mx.Dtype, by: float = 1.0) -> mx.array:
    return (mx.random.normal(shape) * by).astype(dtype)


def packed_of(*shape: int, bits: int, group: int, dtype: mx.Dtype) -> PackedWeights:
    weights = normal(*shape, dtype=dtype, by=shape[-1] ** -0.5)
    return PackedWeights(*mx.quantize(weights, group_size=group, bits=bits), bits, group)


def wide(array: mx.array | None) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def wide_weights(packed: PackedWeights) -> np.ndarray:
    """scale * code + bias without rounding to 16 bits."""
    scales, biases = packed.scales.astype(mx.float32), packed.biases.astype(mx.float32)
    return wide(mx.dequantize(packed.words, scales, biases, group_size=packed.group, bits=packed.bits))


@dataclass(frozen=True)
class Case:
    rows: int
    outputs: int
    inner: int
    bits: int
    group: int
    parts: tuple[str, ...] = ()
    dtype: Any = BF16
    tiling: Tiling | None = None


CASES = [
    Case(1, 32, 128, 4, 64),
    Case(5, 48, 96, 4, 32, ("norm",)),  # the last chunk is not whole
    Case(8, 64, 1280, 4, 128, ("residual",)),
    Case(3, 64, 448, 4, 64, ("bias", "residual"), F16),
    Case(12, 64, 320, 4, 64, ("norm", "gated")),
    Case(37, 64, 256, 4, 64, ("norm", "gated", "bias")),
    Case(70, 32, 2304, 4, 128, ("norm",)),
    Case(2, 32, 64, 8, 32),
    Case(7, 64, 288, 8, 32, ("norm", "bias")),
    Case(8, 64, 1152, 8, 128, ("residual",)),
    Case(9, 64, 320, 8, 64, ("gated",), F16),
    Case(33, 64, 192, 8, 64, ("norm", "gated")),
    Case(6, 64, 640, 4, 64, ("norm",), tiling=Tiling(1, 4, 4, 3)),
    Case(30, 64, 640, 8, 64, ("norm", "gated"), tiling=Tiling(4, 4, 2, 2)),
    Case(20, 64, 640, 4, 64, ("norm", "gated"), tiling=Tiling(4, 4, 4, 1, 2, apart=True)),
    Case(1, 32, 640, 4, 64, tiling=Tiling(1, 1, 4, 2, shared=True)),
    Case(1, 64, 2304, 4, 64, ("norm",), tiling=Tiling(1, 2, 4, 2, 5, shared=True)),
    Case(1, 64, 448, 4, 64, ("norm", "gated", "bias"), tiling=Tiling(1, 2, 4, 1, shared=True)),
    Case(1, 32, 96, 4, 32, ("bias", "residual"), F16, tiling=Tiling(1, 2, 8, 4, shared=True)),
    Case(1, 64, 1152, 8, 128, ("norm", "gated"), tiling=Tiling(1, 4, 4, 2, shared=True)),
    Case(1, 32, 160, 8, 32, ("residual",), F16, tiling=Tiling(1, 1, 2, 1, shared=True)),
    Case(1, 64, 4096, 4, 64, ("norm", "gated"), tiling=Tiling(1, 2, 2, 3, 7, shared=True)),
    Case(2, 32, 640, 4, 64, ("norm",), tiling=Tiling(1, 1, 4, 2, shared=True)),  # of one row only
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_definition(case: Case) -> None:
    mx.random.seed(1)
    dtype, gated = case.dtype, "gated" in case.parts
    packed = packed_of(case.outputs, case.inner, bits=case.bits, group=case.group, dtype=dtype)
    x = normal(case.rows, 1, case.inner, dtype=dtype)
    bias = normal(case.outputs, dtype=dtype) if "bias" in case.parts else None
    residual = normal(case.rows, 1, case.outputs, dtype=dtype) if "residual" in case.parts else None
    norm = Norm(normal(case.inner, dtype=dtype), EPS) if "norm" in case.parts else None
    product = Product(Dense(None, bias, packed), norm, residual, gated, case.tiling)
    got = KernelProducts()(x, product)
    v = wide(x)[:, 0]
    if norm is not None:
        v = v / np.sqrt((v * v).mean(axis=1, keepdims=True) + EPS) * wide(norm.weight)
    y = v @ wide_weights(packed).T + (0 if bias is None else wide(bias))
    if gated:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    y = y if residual is None else y + wide(residual)[:, 0]
    assert np.abs(wide(got).reshape(y.shape) - y).max() <= ROUNDING[dtype] * np.abs(y).max()


@pytest.mark.parametrize(
    ("rows", "count", "choices", "hidden", "width", "bits", "group", "dtype"),
    [
        (1, 16, 3, 256, 96, 4, 32, BF16),
        (6, 16, 3, 128, 64, 8, 64, BF16),
        (20, 8, 2, 160, 96, 4, 32, F16),
        (70, 8, 3, 128, 128, 4, 64, BF16),
        (40, 16, 2, 128, 128, None, None, BF16),
    ],
)
def test_experts(
    rows: int, count: int, choices: int, hidden: int, width: int, bits: int | None, group: int, dtype: mx.Dtype
) -> None:
    mx.random.seed(2)
    shapes = (count, width, hidden), (count, width, hidden), (count, hidden, width)
    norm = Norm(normal(hidden, dtype=dtype), EPS)
    router = Dense(normal(count, hidden, dtype=dtype, by=hidden**-0.5))
    if bits is None:
        gate, up, down = (normal(*shape, dtype=dtype, by=shape[-1] ** -0.5) for shape in shapes)
        experts = Experts(norm, router, gate, up, down, choices, True)
        matrices = [wide(array) for array in (gate, up, down)]
    else:
        first, second, third = (packed_of(*shape, bits=bits, group=group, dtype=dtype) for shape in shapes)
        experts = Experts(norm, router, None, None, None, choices, True, (first, second, third))
        matrices = [wide_weights(packed) for packed in (first, second, third)]
    h = normal(rows, 1, hidden, dtype=dtype)
    kernel = CudaExperts()
    routed = kernel.route(plain_product(h, Product(router, norm)), experts)
    chosen, weights = (np.array(array) for array in routed)
    v = wide(h)[:, 0]
    x = v / np.sqrt((v * v).mean(axis=1, keepdims=True) + EPS) * wide(norm.weight)
    y = v.copy()
    for row in range(rows):
        for which, expert in enumerate(chosen[row]):
            g, u = (matrix[expert] @ x[row] for matrix in matrices[:2])
            y[row] += weights[row, which] * (matrices[2][expert] @ (g / (1 + np.exp(-g)) * u))
    got = kernel(h, experts, plain_product)
    assert got.shape == h.shape and got.dtype == dtype
    assert np.abs(wide(got)[:, 0] - y).max() <= ROUNDING[dtype] * np.abs(y).max()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_experts_of_more_rows_have_more_tiles(packed: bool, gate: bool) -> None:
    tiles = [ExpertsTiling.of(pairs, 128, packed=packed, gate=gate).tiles for pairs in (8, 256, 1024)]
    assert tiles == sorted(tiles) and tiles[-1] == 2
    assert ExpertsTiling.of(256, 8, packed=packed, gate=gate).tiles == 4
