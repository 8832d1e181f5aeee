"""RMS norm and SiLU gate of rows, by kernels emulated on the CPU, against the definitions in float64."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated_cuda import EmulatedKernel, emulated

from headrace.runner.products import choice as product_choice
from headrace.runner.products import row_operations
from headrace.runner.products.choice import SmallRowsKernel
from headrace.runner.products.row_operations import MLX_ROWS, RowKernels, RowOperations
from headrace.runner.products.small_rows import Dense, Norm, Product, largest_difference, plain_product
from headrace.runner.timing import Cost

EPS = 1e-5
# Unit roundoff.
ROUNDOFF = {mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
DTYPES = [mx.bfloat16, mx.float16]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> RowKernels:
    monkeypatch.setattr(row_operations, "cuda_kernel", emulated(compiled))
    return RowKernels()


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def exact(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 1, 264), (2, 1, 4096), (5, 4872)], ids=str)
def test_norm_equals_the_definition(shape: tuple[int, ...], dtype: mx.Dtype, kernels: RowKernels) -> None:
    x, weight = normal(*shape, dtype=dtype) * 3, normal(shape[-1], dtype=dtype)
    got = kernels.rms_norm(x, weight, EPS)
    assert got.shape == x.shape and got.dtype == dtype
    values = exact(x)
    expected = values / np.sqrt((values**2).mean(axis=-1, keepdims=True) + EPS) * exact(weight)
    # Rounded twice; a float16 result may also be subnormal.
    allowed = 2.01 * ROUNDOFF[dtype] * np.abs(expected) + 2.0**-24
    assert (np.abs(exact(got) - expected) <= allowed).all()
    differences = exact(got) != exact(mx.fast.rms_norm(x, weight, EPS))
    assert differences.mean() < 0.01


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "half"), [(1, 8), (17, 264), (3, 4104)])
def test_gate_equals_the_definition(rows: int, half: int, dtype: mx.Dtype, kernels: RowKernels) -> None:
    both = normal(rows, 2 * half, dtype=dtype) * 4
    both[0, :4] = mx.array([100.0, -100.0, 0.0, -11.0])
    got = kernels.silu_gate(both)
    assert got.shape == (rows, half) and got.dtype == dtype
    gate, up = np.split(exact(both), 2, axis=1)
    expected = gate / (1 + np.exp(-gate)) * up
    assert (np.abs(exact(got) - expected) <= 1.01 * ROUNDOFF[dtype] * np.abs(expected) + 2.0**-24).all()
    assert largest_difference(got, MLX_ROWS.silu_gate(both)) < 1e-2


@needs_compiler
def test_other_rows_are_left_to_mlx(kernels: RowKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no kernel takes these")

    monkeypatch.setattr(EmulatedKernel, "__call__", refuse)
    weight = mx.ones((12,), mx.bfloat16)
    for x, by in (
        (mx.ones((2, 12), mx.bfloat16), weight),
        (mx.ones((2, 16)), mx.ones((16,))),
        (mx.ones((2, 16), mx.bfloat16), mx.ones((16,))),
        (mx.ones((1, 40000), mx.float16), mx.ones((40000,), mx.float16)),
    ):
        assert mx.array_equal(kernels.rms_norm(x, by, EPS), mx.fast.rms_norm(x, by, EPS))
    for both in (mx.ones((2, 24), mx.bfloat16), mx.ones((2, 32))):
        assert mx.array_equal(kernels.silu_gate(both), MLX_ROWS.silu_gate(both))


def test_a_cpu_has_mlx_operations() -> None:
    assert mx.default_device() == mx.gpu or RowKernels.for_device() is MLX_ROWS


@pytest.mark.slow
@needs_compiler
def test_a_library_product_with_kernels_beside_it(kernels: RowKernels) -> None:
    x = normal(17, 1, 64, dtype=mx.bfloat16)
    norm, dense = Norm(normal(64, dtype=mx.bfloat16), EPS), Dense(normal(96, 64, dtype=mx.bfloat16))
    product = Product(dense, norm, gated=True)
    products = SmallRowsKernel(plain_product, beside=kernels)
    assert largest_difference(products(x, product), plain_product(x, product)) < 1.5e-2


class Doubled(RowOperations):
    def silu_gate(self, both: mx.array) -> mx.array:
        return super().silu_gate(both) * 2


def test_kernels_beside_that_are_wrong_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choice, "_cost", lambda by, *_: Cost(1.0, 1.0 if by.args[0] is None else 2.0))
    x, dense = normal(2, 1, 32, dtype=mx.bfloat16), Dense(normal(64, 32, dtype=mx.bfloat16))
    products = SmallRowsKernel(plain_product, beside=Doubled())
    product = Product(dense, gated=True)
    assert largest_difference(products(x, product), plain_product(x, product)) > 0.5
    products.measure([(dense, None)], gated=True)
    assert mx.array_equal(products(x, product), plain_product(x, product))
    assert [fault for fault in products.faults if "library: gate 64 x 32 at 1 rows: differs by" in fault]
    assert len(products.faults) == 1
