"""The kernel objects' calls, with kernels emulated on the CPU: inputs, constants, grids and outputs fit."""

from __future__ import annotations

import shutil
import sys
from itertools import product as product_of
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated_cuda import emulated
from test_decoder_block import FunctionalRotate, model_with

from headrace.runner.attention.dispatch import install
from headrace.runner.attention.rotate_store import RotateAndStore
from headrace.runner.kernels.language import CUDA_NAMES
from headrace.runner.kv.store import PoolStore
from headrace.runner.products import kernel_products
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.small_rows import Dense, Norm, Product, largest_difference, plain_product
from headrace.runner.products.tiling import SHARED_BYTES, tilings
from headrace.runner.substitutions import moe_decode
from headrace.runner.substitutions.block_check import compare
from headrace.runner.substitutions.decoder_block import FusedBlock, attention_parts, dense_feed_forward
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.moe_decode import CudaExperts, Experts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, compiled: Path) -> None:
    for module in (kernel_products, moe_decode):
        monkeypatch.setattr(module, "cuda_kernel", emulated(compiled))


def normal(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"norm": True},
        {"norm": True, "bias": True},
        {"residual": True},
        {"residual": True, "bias": True},
        {"norm": True, "gated": True},
        {"norm": True, "gated": True, "bias": True},
    ],
    ids=str,
)
def test_products(form: dict[str, bool], dtype: mx.Dtype) -> None:
    products = KernelProducts()
    gated = bool(form.get("gated"))
    for rows in (3,) if dtype == mx.float16 else (1, 37):
        x = normal(rows, 1, 96, dtype=dtype)
        dense = Dense(normal(64, 96, dtype=dtype), normal(64, dtype=dtype) if form.get("bias") else None)
        norm = Norm(normal(96, dtype=dtype), 1e-5) if form.get("norm") else None
        residual = normal(rows, 1, 64, dtype=dtype) if form.get("residual") else None
        product = Product(dense, norm, residual, gated)
        got, expected = products(x, product), plain_product(x, product)
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert largest_difference(got, expected) < 1.5e-2


def test_attention_output_needs_no_reshape() -> None:
    x, dense, residual = normal(2, 4, 1, 16), Dense(normal(32, 64)), normal(2, 1, 32)
    product = Product(dense, residual=residual)
    assert largest_difference(KernelProducts()(x, product), plain_product(x, product)) < 1.5e-2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 128])
def test_tilings_fit_the_machine(rows: int, gated: bool, packed: bool) -> None:
    """Outputs are covered exactly; sums fit into 48 KB of shared memory; there are some, but few to compile."""
    for outputs in (16, 32, 48, 96, 512, 1024, 2048, 3072, 4096, 8960, 16384, 28672, 128256, 151936):
        if outputs % (32 if gated else 16):
            continue
        for normed, inner in product_of((False, True), (2048, 14336, 1 << 20)):
            found = tilings(rows, outputs, inner, gated=gated, normed=normed, packed=packed)
            assert 1 <= len(found) <= 3
            for tiling in found:
                assert outputs % (16 * tiling.wide) == 0 and (not gated or tiling.wide % 2 == 0)
                sums = tiling.warps // 2 * tiling.wide * tiling.tiles * 128 + tiling.warps * tiling.tiles * 8
                assert 4 * (sums + tiling.tiles * 8) <= 48 << 10
                assert tiling.warps * 32 <= 1024 and tiling.warps % 2 == 0 and tiling.warps * 2 >= tiling.tiles
                assert normed or not tiling.apart
                assert not tiling.shared or (packed and rows == 1 and not tiling.apart)
                together = tiling.resident or 1
                assert together * tiling.threads <= 2048
                assert together * (tiling.shared_bytes(inner, 4) + 4 * sums + 1024) <= SHARED_BYTES


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_block_of_kernels_is_the_unmodified_block(name: str) -> None:
    install(None)
    model = model_with(name)
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    module = model.model.layers[0]
    attention, feed_forward = attention_parts(module), dense_feed_forward(module)
    assert attention is not None and feed_forward is not None
    block = FusedBlock(module, attention, feed_forward, KernelProducts(), FunctionalRotate())
    assert [compare(block, None, rows=rows) for rows in (5, 33)] == [None, None]


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_block_writes_packed_pools_in_place(name: str, bits: int | None, compiled: Path) -> None:
    install(None)
    model = model_with(name, head_dim=32)
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    make = emulated(compiled)
    store, rotate = PoolStore(make, CUDA_NAMES), RotateAndStore(make, CUDA_NAMES)
    module = model.model.layers[0]
    attention, feed_forward = attention_parts(module), dense_feed_forward(module)
    assert attention is not None and feed_forward is not None
    block = FusedBlock(module, attention, feed_forward, KernelProducts(), rotate)
    assert [compare(block, store, rows=rows, bits=bits) for rows in (5, 33)] == [None, None]


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rows", [1, 6])
def test_experts(rows: int, dtype: mx.Dtype, normalized: bool) -> None:
    count, hidden, width, choices = 8, 64, 32, 3
    experts = Experts(
        Norm(normal(hidden, dtype=dtype), 1e-5),
        Dense(normal(count, hidden, dtype=dtype)),
        normal(count, width, hidden, dtype=dtype),
        normal(count, width, hidden, dtype=dtype),
        normal(count, hidden, width, dtype=dtype),
        choices,
        normalized,
    )
    h = normal(rows, 1, hidden, dtype=dtype)
    kernel = CudaExperts()
    logits = plain_product(h, Product(experts.router, experts.norm))
    chosen, weights = kernel.route(logits, experts)
    x = mx.fast.rms_norm(h, experts.norm.weight, experts.norm.eps)[:, 0].astype(mx.float32)
    total = h[:, 0].astype(mx.float32)
    for which in range(choices):
        gate, up, down = (
            matrices[chosen[:, which]].astype(mx.float32) for matrices in (experts.gate, experts.up, experts.down)
        )
        g, u = (gate @ x[..., None])[..., 0], (up @ x[..., None])[..., 0]
        part = (down @ (g * mx.sigmoid(g) * u)[..., None])[..., 0]
        total = total + part * weights[:, which : which + 1]
    got = kernel(h, experts, plain_product)
    assert got.shape == h.shape and got.dtype == dtype
    assert largest_difference(got[:, 0], total) < 2e-2
