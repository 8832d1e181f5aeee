"""Reference attention over head-major pools (CPU): each row's context is read as runs of slots.

A row in one run of float32 is read in place. Whatever must be copied (several runs, 16-bit or packed vectors) is
read in pieces of at most ``READ_BYTES`` of float32, one after the other. Rows of one query need one softmax
when one piece holds their context. A prefill goes through tiles of queries by keys (``SCORE_BYTES`` of scores:
small enough for a core's cache) with an online softmax; at 2048 tokens that takes a fifth of the time of one large
softmax, whose exponentials are a libm call each.

Packed keys of one query are not unpacked: with x = scale * code + bias,

    q . x = scale * (q . code) + bias * sum(q)      per group of elements

the codes are converted to float32 and multiplied as they are, which takes half of the time of ``quantized_matmul``
and a third of ``dequantize``; for the values ``quantized_matmul`` is the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from headrace.runner.attention.online_softmax import HIDDEN, Earlier, OnlineSoftmax, after, capped
from headrace.runner.cpu.elementwise import fast_exp_of_any_shape
from headrace.runner.kv.input_batch import BundleLimits
from headrace.runner.kv.packing import Packed, VectorPacking
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.view import LayerView, RowBundle

READ_BYTES = 4 * 1024 * 1024
SCORE_BYTES = 640 * 1024
KEY_TILE = 512
# Smaller pieces need not be read one after the other: MLX evaluates about twenty side by side, no more.
UNORDERED_BYTES = READ_BYTES // 16
# One query's softmax of at least so many scores is cheaper through a compiled exponential than through MLX's own.
FAST_SCORES = 8192
# Decode rows up to this many positions are gathered together, as they come and packed.
BUNDLED = 224
BUNDLED_PACKED = 512
# Of the largest piece: as read (copied runs, then float32), and a tile's scores, weights and mask; twice for
# buffers that are free but not yet returned.
SCRATCH_BYTES = 2 * (2 * READ_BYTES + 6 * SCORE_BYTES)

Runs = Sequence[tuple[int, int]]


def attend_slices(
    queries: mx.array,
    view: LayerView,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    softcap: float = 0.0,
) -> mx.array:
    """``paged_attention`` of ``reference.py`` for a head-major pool."""
    batch, heads, length, dim = queries.shape
    layer = view.pool.layers[view.layer]
    shared = heads // layer.kv_heads
    grouped = (queries.astype(mx.float32) * scale).reshape(batch, layer.kv_heads, shared, length, dim)
    if sinks is not None:
        sinks = sinks.astype(mx.float32).reshape(layer.kv_heads, shared, 1)
    outputs: list[mx.array] = []
    bundles = view.group.bundles if sinks is None else ()
    order = [row for bundle in bundles for row in bundle.rows]
    alone = sorted(set(range(batch)) - set(order))
    for row in alone:
        reader = _Reader(view, row, outputs[-1:])
        if length == 1:
            outputs.append(_one_query(grouped[row, :, :, 0], reader, sinks, softcap)[:, :, None])
        else:
            real = view.batch.lengths[row]
            out = _prefill(grouped[row, :, :, :real], reader, view.batch.starts[row], window, sinks, softcap)
            outputs.append(mx.pad(out, [(0, 0), (0, 0), (0, length - real), (0, 0)]) if real < length else out)
    parts = [mx.stack(outputs)] if outputs else []
    for bundle in bundles:
        parts.append(_together(grouped[bundle.index, :, :, 0], view, bundle, softcap)[:, :, :, None])
    out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
    out = out.reshape(batch, heads, length, layer.value_dim)
    if order:
        out = out[mx.array(np.argsort([*alone, *order]))]
    return out.astype(queries.dtype)


class _Reader:
    """One row's context in pieces ``(first, last)`` counted from the row's first readable position."""

    def __init__(self, view: LayerView, row: int, earlier: Earlier) -> None:
        """``earlier``: what must be computed before this row is copied."""
        self._pool: KVPool = view.pool
        self._layer = view.layer
        self._runs = view.group.runs[row]
        self._earlier = earlier
        self.shape = self._pool.layers[view.layer]
        self.first_position = view.group.firsts[row]
        self.tokens = sum(last - first for first, last in self._runs)
        plain = self.shape.bits is None and self.shape.dtype == mx.float32
        self.in_place = plain and len(self._runs) == 1

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Bounded pieces in order; all of it when nothing is copied."""
        size = self.tokens
        if not self.in_place:
            size = max(1, READ_BYTES // self._bytes(KEY_TILE)) * KEY_TILE
        for first in range(0, self.tokens, size):
            yield first, min(first + size, self.tokens)

    def wait_for(self, earlier: Earlier) -> None:
        self._earlier = earlier

    def keys(self, first: int, last: int) -> mx.array:
        """``[kv_heads, last - first, key_dim]`` float32."""
        return self._unpacked(self.key_parts(first, last), self.shape.key_packing)

    def values(self, first: int, last: int) -> mx.array:
        return self._unpacked(self.value_parts(first, last), self.shape.value_packing)

    def key_parts(self, first: int, last: int) -> list[mx.array]:
        """The pool's arrays over a piece, as they are: vectors, or codes, scales and biases."""
        return self._cut([self._pool.keys[self._layer], *self._pool.key_affine[self._layer]], first, last)

    def value_parts(self, first: int, last: int) -> list[mx.array]:
        return self._cut([self._pool.values[self._layer], *self._pool.value_affine[self._layer]], first, last)

    def _cut(self, arrays: list[mx.array], first: int, last: int) -> list[mx.array]:
        arrays = self._pool.written(self._layer, arrays)
        runs = cut_runs(self._runs, first, last)
        if not self.in_place and self._bytes(last - first) > UNORDERED_BYTES:
            arrays = [after(array, self._earlier) for array in arrays]
        return [join_runs(array, runs) for array in arrays]

    def _bytes(self, tokens: int) -> int:
        """Of keys and values as they are attended."""
        return 4 * self.shape.kv_heads * (self.shape.key_dim + self.shape.value_dim) * tokens

    @staticmethod
    def _unpacked(parts: list[mx.array], packing: VectorPacking | None) -> mx.array:
        return parts[0].astype(mx.float32) if packing is None else packing.unpack(Packed(*parts), mx.float32)


def cut_runs(runs: Runs, first: int, last: int) -> list[tuple[int, int]]:
    """The runs that cover offsets ``first`` … ``last`` of all of them in a row."""
    pieces = []
    offset = 0
    for low, high in runs:
        start, end = max(first, offset), min(last, offset + high - low)
        if start < end:
            pieces.append((low + start - offset, low + end - offset))
        offset += high - low
    return pieces


def join_runs(array: mx.array, runs: Runs) -> mx.array:
    """``[kv_heads, tokens, width]`` of a head-major array; a view when it is one run."""
    parts = [array[:, first:last] for first, last in runs]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


# -- one query ---------------------------------------------------------------------------------------------


def _one_query(query: mx.array, reader: _Reader, sinks: mx.array | None, softcap: float) -> mx.array:
    """``query [kv_heads, shared, dim]`` over all of the row (a window is cut already)."""
    pieces = list(reader.pieces())
    if len(pieces) == 1 and sinks is None:
        scores = capped(_scores(query, reader, *pieces[0]), softcap)
        if scores.size < FAST_SCORES:
            return _weighted(mx.softmax(scores, axis=-1), reader, *pieces[0])
        weights = fast_exp_of_any_shape(scores - mx.max(scores, axis=-1, keepdims=True))
        return _weighted(weights, reader, *pieces[0]) / mx.sum(weights, axis=-1, keepdims=True)
    state = OnlineSoftmax(sinks)
    for first, last in pieces:
        state.add(capped(_scores(query, reader, first, last), softcap), reader.values(first, last))
        reader.wait_for(state.pending)
    return state.result()


def _scores(query: mx.array, reader: _Reader, first: int, last: int) -> mx.array:
    packing = reader.shape.key_packing
    if packing is None:
        return query @ reader.keys(first, last).swapaxes(1, 2)
    return packed_scores(query, Packed(*reader.key_parts(first, last)), packing)


def packed_scores(query: mx.array, keys: Packed, packing: VectorPacking) -> mx.array:
    """``[…, shared, T]`` of ``query […, shared, dim]`` against packed keys ``[…, T, words or groups]``."""
    *outer, shared, dim = query.shape
    groups, size = packing.groups, packing.group_size
    if packing.padded_dim != dim:
        query = mx.pad(query, [(0, 0)] * (query.ndim - 1) + [(0, packing.padded_dim - dim)])
    parts = query.reshape(*outer, shared, groups, size)
    sums = mx.sum(parts, axis=-1)
    if groups > 1:  # a query per group, zero outside of it: one product for all groups
        parts = parts[..., None, :, :] * mx.eye(groups)[:, :, None]
    parts = parts.reshape(*outer, shared * groups, packing.padded_dim)
    products = parts @ _codes(keys.codes, packing.bits).swapaxes(-1, -2)
    scales = keys.scales.astype(mx.float32).swapaxes(-1, -2)
    biases = keys.biases.astype(mx.float32).swapaxes(-1, -2)
    if groups == 1:
        return products * scales + sums * biases
    products = products.reshape(*outer, shared, groups, -1) * scales[..., None, :, :]
    return mx.sum(products, axis=-2) + sums @ biases


def _codes(packed: mx.array, bits: int) -> mx.array:
    """uint32 ``[..., words]`` -> float32 codes ``[..., dim]``."""
    octets = packed.view(mx.uint8)
    if bits == 4:
        octets = _spread(octets).view(mx.uint8)
    return octets.astype(mx.float32)


def _spread_nibbles(octets: mx.array) -> mx.array:
    """Two nibbles of an octet into the two octets of a uint16, the low one first."""
    wide = octets.astype(mx.uint16)
    return (wide | (wide << 4)) & 0x0F0F


_spread = mx.compile(_spread_nibbles, shapeless=True)


def _weighted(weights: mx.array, reader: _Reader, first: int, last: int) -> mx.array:
    """``weights [kv_heads, shared, T]`` times the values."""
    packing = reader.shape.value_packing
    if packing is None:
        return weights @ reader.values(first, last)
    return packed_sum(weights, Packed(*reader.value_parts(first, last)), packing)


def packed_sum(weights: mx.array, values: Packed, packing: VectorPacking) -> mx.array:
    """``[…, shared, dim]``: ``weights […, shared, T]`` times packed values ``[…, T, words or groups]``."""
    out = mx.quantized_matmul(
        weights,
        values.codes,
        values.scales.astype(mx.float32),
        values.biases.astype(mx.float32),
        transpose=False,
        group_size=packing.group_size,
        bits=packing.bits,
    )
    return out[..., : packing.dim]


# -- several short rows ------------------------------------------------------------------------------------


def bundle_limits(pool: KVPool) -> BundleLimits:
    """Which decode rows are cheaper gathered together: measured at 32 rows, three KV heads of 64."""
    is_packed = any(layer.bits is not None for layer in pool.layers)
    widest = max(4 * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in pool.layers)
    return BundleLimits(BUNDLED_PACKED if is_packed else BUNDLED, READ_BYTES // widest)


def _together(queries: mx.array, view: LayerView, bundle: RowBundle, softcap: float) -> mx.array:
    """``[b, kv_heads, shared, value_dim]`` for ``queries [b, kv_heads, shared, dim]`` of a bundle's rows."""
    pool, index = view.pool, view.layer
    layer, size = pool.layers[index], pool.block_size
    blocks = pool.keys[index].shape[1] // size
    places = bundle.tables[None] + (mx.arange(layer.kv_heads, dtype=mx.int32) * blocks)[:, None, None]

    def gathered(array: mx.array) -> mx.array:
        """``[kv_heads, b, W * size, width]``: whole blocks, each contiguous per head."""
        width = array.shape[-1]
        found = array.reshape(layer.kv_heads * blocks, size * width)[places]
        return found.reshape(layer.kv_heads, len(bundle.rows), -1, width)

    keys = [gathered(array) for array in pool.written(index, [pool.keys[index], *pool.key_affine[index]])]
    values = [gathered(array) for array in pool.written(index, [pool.values[index], *pool.value_affine[index]])]
    query = queries.swapaxes(0, 1)
    if layer.key_packing is None:
        scores = query @ keys[0].astype(mx.float32).swapaxes(-1, -2)
    else:
        scores = packed_scores(query, Packed(*keys), layer.key_packing)
    scores = mx.where(bundle.visible[:, None], capped(scores, softcap), HIDDEN)
    weights = fast_exp_of_any_shape(scores - mx.max(scores, axis=-1, keepdims=True))
    total = mx.sum(weights, axis=-1, keepdims=True)
    # What earlier owners left behind the row's end may be infinite or NaN, which no weight of zero removes.
    seen = bundle.visible[..., None]
    if layer.value_packing is None:
        out = weights @ mx.where(seen, values[0], 0).astype(mx.float32)
    else:
        clean = Packed(values[0], mx.where(seen, values[1], 0), mx.where(seen, values[2], 0))
        out = packed_sum(weights, clean, layer.value_packing)
    return (out / total).swapaxes(0, 1)


# -- prefill -----------------------------------------------------------------------------------------------


def _prefill(
    queries: mx.array,
    reader: _Reader,
    start: int,
    window: int | None,
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """``queries [kv_heads, shared, L, dim]`` from position ``start`` on; ``[kv_heads, shared, L, value_dim]``."""
    kv_heads, shared, length, dim = queries.shape
    tile = max(4, SCORE_BYTES // (4 * kv_heads * shared * KEY_TILE) // 4 * 4)
    padding = -length % 4  # pads see what the last query sees; they keep the shapes of exponentials few
    if padding:
        queries = mx.pad(queries, [(0, 0), (0, 0), (0, padding), (0, 0)])
    spans = [(first, min(first + tile, length + padding)) for first in range(0, length + padding, tile)]
    rows = [queries[:, :, first:last].reshape(kv_heads, -1, dim) for first, last in spans]
    states = [OnlineSoftmax(_for_each_query(sinks, last - first)) for first, last in spans]
    offset = start - reader.first_position  # of the first query, among the readable positions
    earlier: Earlier = []
    for low, high in reader.pieces():
        keys, values = reader.keys(low, high), reader.values(low, high)
        for (first, last), query, state in zip(spans, rows, states, strict=True):
            oldest = 0 if window is None else max(0, offset + first - window + 1)
            for key in range(max(low, oldest // KEY_TILE * KEY_TILE), min(high, offset + last), KEY_TILE):
                end = min(key + KEY_TILE, high, -(-(offset + last) // 64) * 64)
                scores = after(query, earlier) @ keys[:, key - low : end - low].swapaxes(1, 2)
                scores = _hide(capped(scores, softcap), shared, offset + first, key, window)
                state.add(scores, values[:, key - low : end - low])
                earlier = state.pending
        reader.wait_for(earlier)
    outputs = [
        state.result().reshape(kv_heads, shared, last - first, -1)
        for (first, last), state in zip(spans, states, strict=True)
    ]
    return mx.concatenate(outputs, axis=2)[:, :, :length]


def _for_each_query(sinks: mx.array | None, count: int) -> mx.array | None:
    """``[kv_heads, shared, 1]`` -> ``[kv_heads, shared * count, 1]``."""
    return None if sinks is None else mx.repeat(sinks, count, axis=1)


def _hide(scores: mx.array, shared: int, first_query: int, first_key: int, window: int | None) -> mx.array:
    """``[kv_heads, shared * R, T]`` with ``HIDDEN`` where a key is later than the query or outside its window."""
    kv_heads, rows, width = scores.shape
    count = rows // shared
    future = first_key + width - 1 > first_query
    past = window is not None and first_key <= first_query + count - 1 - window
    if not (future or past):
        return scores
    query = mx.arange(first_query, first_query + count)[:, None]
    key = mx.arange(first_key, first_key + width)[None]
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    split = scores.reshape(kv_heads, shared, count, width)
    return mx.where(visible, split, HIDDEN).reshape(kv_heads, rows, width)


# -- materialization ---------------------------------------------------------------------------------------


def materialize_slices(view: LayerView) -> tuple[mx.array, mx.array]:
    """All rows' contexts ``[B, kv_heads, S, dim]``, zero-padded to the longest, in the dtype that was written."""
    readers = [_Reader(view, row, []) for row in range(len(view.batch.starts))]
    longest = max(reader.tokens for reader in readers)

    def stack(rows: list[mx.array]) -> mx.array:
        padded = [mx.pad(x, [(0, 0), (0, longest - x.shape[1]), (0, 0)]) for x in rows]
        return mx.stack(padded).astype(readers[0].shape.dtype)

    return (
        stack([reader.keys(0, reader.tokens) for reader in readers]),
        stack([reader.values(0, reader.tokens) for reader in readers]),
    )
