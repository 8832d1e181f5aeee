"""Forwards over random pools, by which attention kernels are compared and timed before a model relies on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from headrace.runner.kv.packing import Packed, VectorPacking
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.view import ForwardBatch, GroupBatch, LayerView


def random_prompts(
    layer: LayerShape,
    heads: int,
    starts: Sequence[int],
    lengths: Sequence[int],
    block_size: int,
    window: int | None,
    *,
    seed: int = 0,
) -> tuple[mx.array, LayerView]:
    """Queries ``[B, heads, L, key_dim]`` and a view of a random pool: ``lengths[i]`` tokens behind ``starts[i]``.

    A window leaves out the blocks behind it, as the scheduler does.
    """
    rng = np.random.default_rng(seed)
    oldest = [0 if window is None else max(0, start - window + 1) for start in starts]
    firsts = [first // block_size * block_size for first in oldest]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    counts = [-(-(end - first) // block_size) for end, first in zip(ends, firsts, strict=True)]
    pool = KVPool([replace(layer, group=0)], [sum(counts) + 1], block_size, head_major=False)
    keys = mx.random.split(mx.random.key(seed), 3)
    slots = (sum(counts) + 1) * block_size
    pool.keys[0], pool.key_affine[0] = random_vectors(layer, slots, layer.key_dim, layer.key_packing, keys[0])
    pool.values[0], pool.value_affine[0] = random_vectors(
        layer, slots, layer.value_dim, layer.value_packing, keys[1]
    )
    ids = rng.permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    tables = np.zeros((len(starts), max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], ids = ids[:count], ids[count:]
    group = GroupBatch(
        window,
        mx.zeros(len(starts) * max(lengths), mx.int32),
        firsts=firsts,
        tables=mx.array(tables),
        bases=mx.array(firsts, mx.int32),
    )
    batch = ForwardBatch(
        offsets=mx.array(list(starts), mx.int32),
        ends=mx.array(ends, mx.int32),
        starts=list(starts),
        lengths=list(lengths),
        groups=[group],
    )
    queries = mx.random.normal((len(starts), heads, max(lengths), layer.key_dim), layer.dtype, key=keys[2])
    return queries, LayerView(pool, 0, batch)


def random_case(
    layer: LayerShape,
    heads: int,
    lengths: Sequence[int],
    block_size: int,
    window: int | None,
    *,
    seed: int = 0,
) -> tuple[mx.array, LayerView]:
    """The same for a decode forward: queries ``[B, heads, 1, key_dim]`` at the last of ``lengths`` positions."""
    starts = [length - 1 for length in lengths]
    return random_prompts(layer, heads, starts, [1] * len(lengths), block_size, window, seed=seed)


def float32_view(view: LayerView) -> LayerView:
    """The same keys and values as float32, not packed: the reference would round what it unpacks to 16 bits."""
    pool, layer = view.pool, view.pool.layers[0]
    exact = KVPool([replace(layer, bits=None, dtype=mx.float32)], [1], pool.block_size, head_major=False)
    exact.keys[0] = _float32(pool.keys[0], pool.key_affine[0], layer.key_packing)
    exact.values[0] = _float32(pool.values[0], pool.value_affine[0], layer.value_packing)
    return LayerView(exact, 0, view.batch)


def _float32(array: mx.array, affine: tuple[mx.array, ...], packing: VectorPacking | None) -> mx.array:
    return array.astype(mx.float32) if packing is None else packing.unpack(Packed(array, *affine), mx.float32)


def random_vectors(
    layer: LayerShape, slots: int, dim: int, packing: VectorPacking | None, key: mx.array
) -> tuple[mx.array, tuple[mx.array, ...]]:
    """One token-major pool array, and scales and biases of a packed one."""
    x = mx.random.normal((slots, layer.kv_heads, dim), layer.dtype, key=key)
    if packing is None:
        return x, ()
    packed = packing.pack(x)
    return packed.codes, (packed.scales, packed.biases)
