"""Reference attention over token-major pools (GPU): blocks are gathered through the block table, then attended.

    prefill   ``gathered_prefill.py``; here what it leaves: rows that look back behind a window, row by row
    decode    rows of similar length together, as many as ``GATHER_BYTES`` hold, padded to the longest of them

A row whose context is larger than ``GATHER_BYTES`` goes through tiles of at most that size with an online softmax.
So a long row next to short ones costs what it would alone. In a compiled forward lengths are on the device only:
all rows are as wide as the table there, and the bound on bytes holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.runner.attention.online_softmax import HIDDEN, Earlier, OnlineSoftmax, after, capped
from headrace.runner.kv.packing import Packed, VectorPacking
from headrace.runner.kv.view import LayerView

GATHER_BYTES = 128 * 1024 * 1024
# Bound on one tile of float32 scores, and keys of one.
SCORE_BYTES = 64 * 1024 * 1024
KEY_TILE = 4096
# A gathered piece and what attention makes of it; a tile's scores, weights and mask.
SCRATCH_BYTES = 2 * GATHER_BYTES + 3 * SCORE_BYTES
# Rows are decoded side by side while the longest is at most this much longer than the shortest.
_SIMILAR = 1.5


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a forward and the columns of their block tables that they need.

    Attributes:
        tables: ``[b, W]`` block ids.
        bases: ``[b]`` position of the tables' first slot.
        offsets: ``[b]`` position of the rows' first query.
        ends: ``[b]`` positions in the rows' context.
    """

    tables: mx.array
    bases: mx.array
    offsets: mx.array
    ends: mx.array

    def written(self, x: mx.array, first: int) -> mx.array:
        """Gathered ``[b, kv_heads, T, dim]``, the slots from ``first`` on, with zeros behind the rows' ends.

        What earlier owners left there may be infinite or NaN, which no weight of zero removes.
        """
        key = self.bases[:, None] + mx.arange(first, first + x.shape[2])[None]
        return mx.where((key < self.ends[:, None])[:, None, :, None], x, 0)

    def visible(self, first_query: int, queries: int, first: int, width: int, window: int | None) -> mx.array:
        """``[b, 1, queries, width]`` bool: which of the slots from ``first`` on each query may read."""
        query = (self.offsets[:, None] + mx.arange(first_query, first_query + queries)[None])[:, None, :, None]
        key = (self.bases[:, None] + mx.arange(first, first + width)[None])[:, None, None, :]
        mask = key <= query
        return mask if window is None else mask & (key > query - window)


def attend_gathered(
    queries: mx.array,
    view: LayerView,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    softcap: float = 0.0,
) -> mx.array:
    """``paged_attention`` of ``reference.py`` for a token-major pool."""
    groups = _groups(queries.shape[0], queries.shape[2], view)
    outputs: list[mx.array] = []
    order: list[int] = []
    for index, width in groups:
        rows = rows_of(view, index, width, outputs[-1:])
        some = queries if len(groups) == 1 else queries[mx.array(index)]
        outputs.append(_attend(some, view, rows, scale, window, sinks, softcap))
        order += index
    return in_order(outputs, order)


def in_order(outputs: list[mx.array], order: list[int]) -> mx.array:
    """Outputs of groups of rows as one array; ``order``: the rows' indices as they come."""
    out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)
    if order == sorted(order):
        return out
    return out[mx.array(sorted(range(len(order)), key=order.__getitem__))]


def _groups(batch: int, length: int, view: LayerView) -> list[tuple[list[int], int]]:
    """Which rows are gathered together, and how many blocks of each."""
    size, lengths = view.pool.block_size, view.batch.lengths
    width = _tables(view).shape[1]
    if not lengths:
        most = max(1, GATHER_BYTES // (width * size * token_bytes(view)))
        return [(list(range(first, min(first + most, batch))), width) for first in range(0, batch, most)]
    ends = [start + count for start, count in zip(view.batch.starts, lengths, strict=True)]
    spans = [-(-(end - first) // size) for end, first in zip(ends, view.group.firsts, strict=True)]
    groups: list[tuple[list[int], int]] = []
    for row in sorted(range(batch), key=spans.__getitem__):
        index, shortest = groups[-1] if groups else ([], 0)
        fits = (len(index) + 1) * spans[row] * size * token_bytes(view) <= GATHER_BYTES
        if index and length == 1 and fits and spans[row] <= _SIMILAR * max(shortest, 128 // size):
            index.append(row)
        else:
            groups.append(([row], spans[row]))
    return [(sorted(index), max(spans[row] for row in index)) for index, _ in groups]


def _tables(view: LayerView) -> mx.array:
    assert view.group.tables is not None
    return view.group.tables


def token_bytes(view: LayerView) -> int:
    """Of one gathered position, as it is attended."""
    layer = view.pool.layers[view.layer]
    return layer.kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.size


def rows_of(view: LayerView, index: list[int], width: int, earlier: Sequence[mx.array] = ()) -> _Rows:
    """Rows and ``width`` columns of their block tables, the null block behind the last one.

    ``earlier``: what must be computed before these rows are gathered.
    """
    tables, bases, offsets, ends = _tables(view), view.group.bases, view.batch.offsets, view.batch.ends
    assert bases is not None
    if len(index) < tables.shape[0]:
        rows = mx.array(index)
        tables, bases, offsets, ends = tables[rows], bases[rows], offsets[rows], ends[rows]
    missing = width - tables.shape[1]
    tables = mx.pad(tables, [(0, 0), (0, missing)]) if missing > 0 else tables[:, :width]
    return _Rows(after(tables, list(earlier)), bases, offsets, ends)


def _attend(
    queries: mx.array,
    view: LayerView,
    rows: _Rows,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """Attention of ``queries [b, H, L, D]`` over the rows' gathered context."""
    length = queries.shape[2]
    count, width = rows.tables.shape
    context = width * view.pool.block_size
    large = count * context * token_bytes(view) > GATHER_BYTES or count * length * context > SCORE_BYTES
    if large or softcap > 0:  # MLX's own attention caps nothing
        return _attend_tiled(queries, view, rows, scale, window, sinks, softcap)
    keys, values = gather(view, rows.tables)
    mask, values = rows.visible(0, length, 0, context, window), rows.written(values, 0)
    if length > 1:  # a fused kernel hides a score by adding to it, which NaN survives
        keys = rows.written(keys, 0)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _attend_tiled(
    queries: mx.array,
    view: LayerView,
    rows: _Rows,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
    softcap: float,
) -> mx.array:
    """The same in tiles of keys, gathered one after the other, by tiles of queries."""
    count, heads, length, dim = queries.shape
    layer, size = view.pool.layers[view.layer], view.pool.block_size
    shared = heads // layer.kv_heads
    columns = max(1, min(KEY_TILE, GATHER_BYTES // (2 * count * token_bytes(view))) // size)
    tile = max(1, SCORE_BYTES // (4 * count * heads * columns * size))
    spans = [(first, min(first + tile, length)) for first in range(0, length, tile)]
    grouped = (queries.astype(mx.float32) * scale).reshape(count, layer.kv_heads, shared, length, dim)
    if sinks is not None:
        sinks = sinks.reshape(layer.kv_heads, shared, 1, 1)
    states = [OnlineSoftmax(sinks) for _ in spans]
    earlier: Earlier = []
    for column in range(0, rows.tables.shape[1], columns):
        tables = after(rows.tables[:, column : column + columns], earlier)
        keys, values = gather(view, tables)
        keys = keys.astype(mx.float32)[:, :, None]
        values = rows.written(values, column * size).astype(mx.float32)[:, :, None]
        for (first, last), state in zip(spans, states, strict=True):
            scores = capped(after(grouped[..., first:last, :], earlier) @ keys.swapaxes(-1, -2), softcap)
            visible = rows.visible(first, last - first, column * size, scores.shape[-1], window)
            state.add(mx.where(visible[:, :, None], scores, HIDDEN), values)
            earlier = state.pending
    out = mx.concatenate([state.result() for state in states], axis=3)
    return out.reshape(count, heads, length, -1).astype(queries.dtype)


def gather(view: LayerView, tables: mx.array, heads: slice = slice(None)) -> tuple[mx.array, mx.array]:
    """Keys and values ``[b, kv_heads, W * block_size, dim]`` of the blocks in ``tables [b, W]``; of some heads."""
    pool, index = view.pool, view.layer
    layer = pool.layers[index]
    tables = pool.ordered(index, tables)
    keys = [_blocks(x, pool.block_size, tables, heads) for x in (pool.keys[index], *pool.key_affine[index])]
    values = [_blocks(x, pool.block_size, tables, heads) for x in (pool.values[index], *pool.value_affine[index])]
    return _unpacked(keys, layer.key_packing, layer.dtype), _unpacked(values, layer.value_packing, layer.dtype)


def _unpacked(parts: list[mx.array], packing: VectorPacking | None, dtype: mx.Dtype) -> mx.array:
    return parts[0] if packing is None else packing.unpack(Packed(*parts), dtype)


def _blocks(pool: mx.array, size: int, tables: mx.array, heads: slice) -> mx.array:
    """``[num_slots, kv_heads, width]`` -> ``[b, kv_heads, W * size, width]``."""
    blocks = pool.reshape(pool.shape[0] // size, size, *pool.shape[1:])[:, :, heads][tables]
    count, columns, _, chosen, width = blocks.shape
    return blocks.reshape(count, columns * size, chosen, width).swapaxes(1, 2)


def materialize_gathered(view: LayerView) -> tuple[mx.array, mx.array]:
    """All rows' contexts ``[B, kv_heads, S, dim]``, zeros behind their ends."""
    rows = _all_rows(view)
    keys, values = gather(view, rows.tables)
    return rows.written(keys, 0), rows.written(values, 0)


def _all_rows(view: LayerView) -> _Rows:
    assert view.group.bases is not None
    return _Rows(_tables(view), view.group.bases, view.batch.offsets, view.batch.ends)


def position_mask(view: LayerView, length: int, window: int | None) -> mx.array:
    """``[B, 1, L, S]`` bool: which slots of whole tables each query may read."""
    return _all_rows(view).visible(0, length, 0, _tables(view).shape[1] * view.pool.block_size, window)
