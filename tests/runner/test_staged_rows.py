"""The staged kernel for products of few rows, emulated on the CPU: indices, ring, clusters, epilogues and launch.

Copies arrive as late as they are waited for or at once, in turns; shared memory is NaN until it is written.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated_cuda import emulated

from headrace.runner.products import kernel_products
from headrace.runner.products.choice import MEASURED_ROWS
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.small_rows import Dense, Norm, Product
from headrace.runner.products.tiling import SHARED_BYTES, Staged, staged_tilings

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
EPS = 1e-5


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def host(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def expected(x: mx.array, product: Product) -> np.ndarray:
    """The definition in float64."""
    dense, norm, residual = product.dense, product.norm, product.residual
    if norm is not None:
        x = mx.fast.rms_norm(x, norm.weight, norm.eps)
    y = host(x).reshape(x.shape[0], -1) @ host(dense.held).T  # type: ignore[arg-type]
    if dense.bias is not None:
        y = y + host(dense.bias)
    if product.gated:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    return y if residual is None else y + host(residual).reshape(y.shape)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("rows", "outputs", "inner", "tiling", "parts", "dtype"),
    [
        (1, 128, 192, Staged(2, 64, 1, 3, 1), "", mx.bfloat16),
        (5, 128, 320, Staged(1, 64, 1, 4, 2), "residual", mx.bfloat16),
        (8, 256, 192, Staged(1, 128, 2, 3, 1), "gate", mx.float16),
        (9, 128, 192, Staged(2, 128, 1, 4, 1), "residual", mx.bfloat16),
        (16, 128, 320, Staged(2, 64, 2, 2, 1), "bias", mx.float16),
        (17, 256, 64, Staged(4, 128, 1, 4, 1), "gate", mx.bfloat16),
        (32, 128, 448, Staged(4, 64, 2, 3, 2), "bias residual", mx.bfloat16),
        (32, 128, 320, Staged(4, 128, 1, 2, 4), "gate bias", mx.float16),
        (40, 64, 128, Staged(2, 64, 1, 2, 1), "residual", mx.bfloat16),
        (64, 128, 128, Staged(8, 64, 1, 3, 4), "norm", mx.bfloat16),
        (100, 128, 192, Staged(16, 64, 1, 3, 2), "residual", mx.float16),
        (128, 256, 192, Staged(16, 128, 1, 3, 1), "gate", mx.bfloat16),
        (128, 256, 128, Staged(16, 256, 1, 2, 2), "bias", mx.bfloat16),
        (3, 64, 64, Staged(2, 64, 1, 4, 8), "residual", mx.bfloat16),
    ],
    ids=str,
)
def test_equals_the_definition(
    rows: int,
    outputs: int,
    inner: int,
    tiling: Staged,
    parts: str,
    dtype: mx.Dtype,
    compiled: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_products, "cuda_kernel", emulated(compiled))
    # Rows of NaN stand behind those that are multiplied.
    x = mx.concatenate([normal(rows, 1, inner, dtype=dtype), mx.full((1, 1, inner), mx.nan, dtype)])[:rows]
    product = Product(
        Dense(normal(outputs, inner, dtype=dtype), normal(outputs, dtype=dtype) if "bias" in parts else None),
        Norm(normal(inner, dtype=dtype), EPS) if "norm" in parts else None,
        normal(rows, 1, outputs, dtype=dtype) if "residual" in parts else None,
        "gate" in parts,
    )
    got = KernelProducts()(x, replace(product, tiling=tiling))
    wanted = expected(x, product)
    assert got.dtype == dtype and got.shape[0] == rows and got.size == wanted.size
    difference = np.abs(host(got).reshape(wanted.shape) - wanted).max()
    assert difference <= 8e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("rows", MEASURED_ROWS)
def test_tilings_fit_the_machine(rows: int) -> None:
    for outputs in (16, 64, 512, 1152, 2048, 3072, 4096, 4864, 6144, 8960, 28672, 128256, 151936):
        for inner in (96, 896, 1536, 2048, 4096, 8960, 14336):
            found = staged_tilings(rows, outputs, inner)
            assert len(found) <= 2
            assert bool(found) == (inner % 64 == 0 and outputs % 64 == 0)
            for tiling in found:
                assert outputs % tiling.outputs == 0 and 8 * tiling.tiles >= min(rows, 128)
                limits = tiling.limits
                assert limits.resident * (limits.shared_bytes + 1024) <= SHARED_BYTES
                assert limits.resident * limits.threads <= 1024 and limits.splits <= 8


def test_staged_tilings_are_for_plain_weights_on_devices_that_have_the_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = Product(Dense(mx.zeros((4096, 4096), mx.bfloat16)))

    def staged(rows: int) -> list[bool]:
        return [isinstance(way, Staged) for way in KernelProducts.tilings(rows, mx.bfloat16, product)]

    assert not any(staged(32))
    monkeypatch.setattr(kernel_products, "multiplies_by_warpgroups", lambda: True)
    assert sum(staged(32)) == sum(staged(1)) == 2 and not staged(32)[0]
    assert staged(64) == [True, True]
