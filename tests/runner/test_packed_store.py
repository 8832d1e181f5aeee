"""The kernel that packs keys and values while it stores them, its CUDA form run on the CPU against ``kv_packing``.

Keys and values of the form that does not pack are those of ``test_store_form.py``; packed, they must give the
codes, scales and biases of the formula that ``rotate_store.py`` states, bit for bit, and those of MLX on the CPU
but for ties, which that rounds to even.
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

from headrace.runner.attention.rotate_store import RotarySpec, RotateAndStore
from headrace.runner.kernels.language import CUDA_NAMES
from headrace.runner.kv.packing import Packed, VectorPacking, scale_dtype
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.store import PoolStore
from headrace.runner.kv.view import ForwardBatch, GroupBatch, LayerView

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
HEADS, KV, SLOTS = 4, 2, (3, 62, 40, 0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def view_of(layer: LayerShape, store: PoolStore) -> LayerView:
    """Four rows over a pool whose arrays hold nothing but ones."""
    pool = KVPool([layer], [2], 32, head_major=False, store=store)
    pool.state = [mx.ones_like(array) for array in pool.state]
    mx.eval(pool.state)
    offsets = mx.array([0, 1234, 77, 5], mx.int32)
    group = GroupBatch(None, mx.array(SLOTS, mx.int32))
    batch = ForwardBatch(offsets=offsets, ends=offsets + 1, starts=[], lengths=[1] * 4, groups=[group])
    return LayerView(pool, 0, batch)


def product(dim: int, dtype: mx.Dtype) -> mx.array:
    """Rows ``[4, (H + 2 KV) * dim]``; among the values are groups of zeros, of one number, and beside zero."""
    x = np.random.default_rng(dim).normal(size=(4, HEADS + 2 * KV, dim)).astype(np.float32)
    x[0, -1] = 0.0
    x[1, -1] = 2.5
    x[2, -1] = np.abs(x[2, -1]) + 1
    x[3, -1] = -np.abs(x[3, -1]) - 1
    x[2, -2] *= 1e-3
    return mx.array(x.reshape(4, -1)).astype(dtype)


def by_formula(x: np.ndarray, packing: VectorPacking) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes ``[..., padded_dim]``, scales and biases ``[..., groups]`` of float32 vectors, all in float32."""

    def rounded(y: np.ndarray) -> np.ndarray:
        return np.copysign(np.floor(np.abs(y) + np.float32(0.5)), y)  # type: ignore[no-any-return]

    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, packing.padded_dim - packing.dim)])
    x = x.reshape(*x.shape[:-1], packing.groups, packing.group_size)
    low, high, most = x.min(-1), x.max(-1), np.float32(2**packing.bits - 1)
    step = np.maximum((high - low) / most, np.float32(1e-7))
    below = np.abs(low) > np.abs(high)
    step, edge = np.where(below, step, -step), np.where(below, low, high)
    steps = rounded(edge / step)
    scale = np.where(steps == 0, step, edge / np.where(steps == 0, np.float32(1), steps))
    bias = np.where(steps == 0, np.float32(0), edge)
    codes = np.clip(rounded((x - bias[..., None]) / scale[..., None]), 0, most)
    return codes.reshape(*x.shape[:-2], -1).astype(np.int64), scale, bias


def codes_of(words: mx.array, packing: VectorPacking) -> np.ndarray:
    shifts = np.arange(0, 32, packing.bits, dtype=np.uint32)
    codes = (np.array(words)[..., None] >> shifts) & np.uint32(2**packing.bits - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.int64)


def check_packed(got: Packed, vectors: mx.array, packing: VectorPacking) -> None:
    """``got`` is what ``vectors [N, KV, D]`` become."""
    exact = np.array(vectors.astype(mx.float32))
    codes, *affine = by_formula(exact, packing)
    assert np.array_equal(codes_of(got.codes, packing), codes)
    dtype = scale_dtype(vectors.dtype)
    for part, wanted in zip(got[1:], affine, strict=True):
        assert part.dtype == dtype and bool(mx.array_equal(part, mx.array(wanted).astype(dtype)))
    usual = packing.pack(vectors)
    same = np.array(got.scales == usual.scales) & np.array(got.biases == usual.biases)
    off = np.abs(codes_of(usual.codes, packing) - codes).reshape(*same.shape, -1)[same]
    assert same.mean() > 0.9 and off.max() <= 1 and (off > 0).mean() < 0.03
    restored = np.array(packing.unpack(got, mx.float32)).reshape(exact.shape)
    steps = np.repeat(np.abs(np.array(got.scales.astype(mx.float32))), packing.group_size, axis=-1)
    rounding = 2 * (2**packing.bits - 1) * (2.0**-9 if dtype == mx.bfloat16 else 2.0**-11)
    assert (np.abs(restored - exact) <= steps[..., : packing.dim] * (1 + rounding) + 1e-6).all()


CASES = [
    *((dim, bits, mx.bfloat16) for dim in (40, 64, 80, 96, 128, 288) for bits in (8, 4)),
    *((128, bits, dtype) for dtype in (mx.float16, mx.float32) for bits in (8, 4)),
    (608, 8, mx.float16),
]


@pytest.mark.parametrize(("dim", "bits", "dtype"), CASES, ids=str)
def test_packs_what_it_would_store(dim: int, bits: int, dtype: mx.Dtype, compiled: Path) -> None:
    make = emulated(compiled)
    store, rotate = PoolStore(make, CUDA_NAMES), RotateAndStore(make, CUDA_NAMES)
    norm = mx.random.normal((dim,), key=mx.random.key(1)).astype(dtype) if dim in (80, 128) else None
    rotated = 32 if dim == 64 else dim
    spec = RotarySpec(
        heads=HEADS,
        kv_heads=KV,
        head_dim=dim,
        inv_freq=1000.0 ** (-mx.arange(rotated // 2) * 2 / rotated),
        rotated_dims=rotated,
        traditional=dim == 96,
        position_scale=0.5,
        q_norm=norm,
        k_norm=norm,
        eps=1e-5,
    )
    layer = LayerShape(0, KV, dim, dim, dtype, bits)
    packed, plain = (view_of(one, store) for one in (layer, replace(layer, bits=None)))
    qkv = product(dim, dtype)
    assert rotate.supports(spec, packed)
    queries = rotate(qkv, packed, spec)
    assert bool(mx.array_equal(queries, rotate(qkv, plain, spec)))
    assert not np.array(packed.pool.marks[0]).any()
    slots, others = mx.array(SLOTS), mx.array(np.delete(np.arange(64), SLOTS))
    pool, packing = packed.pool, layer.key_packing
    assert packing is not None
    for arrays, vectors in (
        ((pool.keys[0], *pool.key_affine[0]), plain.pool.keys[0]),
        ((pool.values[0], *pool.value_affine[0]), plain.pool.values[0]),
    ):
        check_packed(Packed(*(array[slots] for array in arrays)), vectors[slots], packing)
        assert all(bool((array[others] == 1).all()) for array in arrays)
