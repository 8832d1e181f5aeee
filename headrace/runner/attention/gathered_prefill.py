"""Attention of prompts over token-major pools (GPU), through MLX's fused causal attention.

    nothing before the chunks   keys and values as the model has just made them, all rows in one call; the pool is
                                written and not read
    something before them       prefix and chunk are gathered once; rows behind equally long prefixes in one call

A context that does not fit ``GATHER_BYTES`` is attended by some of the KV heads at a time. Where no fused kernel
takes the form, queries go in tiles, so that scores stay within ``SCORE_BYTES``. Left to ``gather.py``: rows that
look back behind a window, soft caps, one KV head that does not fit.

What is packed in the pool is always read from there: a chunk that saw its own exact vectors would give another
answer than one that finds them in the cache.

On CUDA the library plans every shape it has not seen, 50 ms on one H200, many times the attention's own time. So
few shapes are used: prompts with nothing before them are padded to powers of two, rows and lengths (which are
planned before the first request, ``start/warm_up.py``); behind prefixes a call's ends lie on a grid. Queries begin
earlier or end later (repeated, nobody reads them), keys end later (hidden by causality).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from headrace.runner.attention import gather
from headrace.runner.attention.online_softmax import Earlier, after
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import LayerView

# Grids of a call's first and last position on CUDA, each for contexts up to a length; the last for all others.
SHAPE_GRID = 1024
_FINER_GRIDS = ((2048, 256), (8192, 512))
# Shortest padded prompt, and the length from which on prompts are padded to multiples of it.
_LEAST_LENGTH = 32
_LONG = 2048


def attend_prefill(
    queries: mx.array, view: LayerView, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array | None:
    """``paged_attention`` of ``reference.py`` for rows of several queries; None: not a case for this way."""
    batch, length = view.batch, queries.shape[2]
    if length == 1 or not batch.lengths:
        return None
    if view.new is not None and reads_new(view):
        layer = view.pool.layers[view.layer]
        keys, values = (array.astype(layer.dtype) for array in view.new)  # as the pool holds them
        out = _in_few_shapes(queries, keys, values, layer, scale, sinks, window)
        return _after_write(view, out)
    ends = [start + count for start, count in zip(batch.starts, batch.lengths, strict=True)]
    if window is not None and max(ends) > window:
        return None
    if (max(ends) + length + SHAPE_GRID) * _head_bytes(view) > _room(queries, view):
        return None
    return _attend_behind_prefixes(queries, view, scale, sinks)


def reads_new(view: LayerView) -> bool:
    """Whether prompts are attended over the keys and values that the forward has just made (``LayerView.new``).

    Nothing is before them, and the pool holds vectors as they come.
    """
    batch = view.batch
    return view.pool.layers[view.layer].bits is None and bool(batch.lengths) and not any(batch.starts)


def planned_shape(rows: int, length: int, layer: LayerShape, window: int | None) -> tuple[int, int]:
    """Rows and positions that prompts with nothing before them are padded to for attention; as they are where
    nothing is planned or no fused kernel takes them."""
    wide = padded_length(length)
    is_whole = window is None or window >= wide
    if shape_grid(0) == 1 or not is_whole or not is_fused(layer.dtype, layer.key_dim, layer.value_dim):
        return rows, length
    return 1 << (rows - 1).bit_length(), wide


def causal_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
    window: int | None = None,
) -> mx.array:
    """Queries ``[b, H, L, D]`` are the last L of the positions of ``keys [b, h, T, D]`` and ``values``.

    Query i sees the ``window`` keys up to its own; None: all.
    """
    count, heads, length, _ = queries.shape
    offset = keys.shape[2] - length
    tile = length
    if not is_fused(queries.dtype, queries.shape[-1], values.shape[-1]):
        tile = max(1, gather.SCORE_BYTES // (4 * count * heads * keys.shape[2]))
    if window is not None and window < keys.shape[2]:
        tile = min(tile, window)  # so that few of a tile's keys are hidden from most of its queries
    pieces = []
    earlier: Earlier = []
    for first in range(0, length, tile):
        last = min(first + tile, length)
        low = 0 if window is None else max(0, offset + first - window + 1)
        high = offset + last
        mask: mx.array | str = "causal"
        if window is not None and high - low > window:
            mask = _band(offset + first - low, last - first, high - low, window)
        some = after(queries[:, :, first:last], earlier)
        pieces.append(
            mx.fast.scaled_dot_product_attention(
                some, keys[:, :, low:high], values[:, :, low:high], scale=scale, mask=mask, sinks=sinks
            )
        )
        earlier = pieces[-1:]
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def planned_shapes(most_tokens: int) -> list[tuple[int, int]]:
    """Rows and lengths of prompts up to ``most_tokens`` together whose attention should be run once before it is
    needed; none where nothing is planned."""
    if shape_grid(0) == 1:
        return []
    lengths = [_LEAST_LENGTH << step for step in range((_LONG // _LEAST_LENGTH).bit_length())]
    # Attention is padded to 1, 2, 4 and 8 rows; products are not, and a library loads what it has not used before.
    return [(rows, length) for rows in (1, 2, 3, 4, 6, 8) for length in lengths if rows * length <= most_tokens]


def _in_few_shapes(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    layer: LayerShape,
    scale: float,
    sinks: mx.array | None,
    window: int | None,
) -> mx.array:
    """``causal_attention`` of prompts from their first position on, padded where shapes are planned."""
    rows, _, length, _ = queries.shape
    planned = planned_shape(rows, length, layer, window)
    if planned == (rows, length):
        return causal_attention(queries, keys, values, scale, sinks, window)
    more = planned[0] - rows, planned[1] - length
    queries, keys, values = (
        _with_rows(_repeated(array, 0, more[1]), more[0]) for array in (queries, keys, values)
    )
    return causal_attention(queries, keys, values, scale, sinks)[:rows, :, :length]


def padded_length(length: int) -> int:
    """The power of two that holds a prompt's positions; a multiple of the largest one for long prompts."""
    if length > _LONG:
        return -(-length // _LONG) * _LONG
    return max(_LEAST_LENGTH, 1 << (length - 1).bit_length())


def _with_rows(array: mx.array, more: int) -> mx.array:
    """The first row repeated behind ``array [b, H, L, D]``."""
    if not more:
        return array
    return mx.concatenate([array, mx.broadcast_to(array[:1], (more, *array.shape[1:]))])


def _band(first: int, queries: int, keys: int, window: int) -> mx.array:
    """``[queries, keys]`` bool: which keys are seen when query 0 is at key ``first``."""
    query, key = mx.arange(first, first + queries)[:, None], mx.arange(keys)[None]
    return (key <= query) & (key > query - window)


def is_fused(dtype: mx.Dtype, *dims: int) -> bool:
    """Whether MLX has a kernel that holds no matrix of scores for queries of ``dtype``, keys and values of widths
    ``dims``; what it does not take it computes in steps."""
    if mx.default_device() != mx.gpu:
        return False
    if mx.metal.is_available():
        return dims[0] == dims[1] and dims[0] in (64, 80, 128)
    return dtype.size == 2 and all(dim % 8 == 0 and dim <= 128 for dim in dims)


def shape_grid(context: int) -> int:
    """What the first and last position of a call that ends at ``context`` are multiples of."""
    if mx.default_device() != mx.gpu or mx.metal.is_available():
        return 1
    return next((grid for longest, grid in _FINER_GRIDS if context <= longest), SHAPE_GRID)


# -- own keys and values -----------------------------------------------------------------------------------


def _after_write(view: LayerView, out: mx.array) -> mx.array:
    """``out``, not there before the pool has been written: nothing else in the forward may ask for that."""
    pool, layer = view.pool, view.layer
    written = [pool.marks[layer]] if pool.in_place else [pool.keys[layer], pool.values[layer]]
    return after(out, written)


# -- behind prefixes ---------------------------------------------------------------------------------------


def _attend_behind_prefixes(queries: mx.array, view: LayerView, scale: float, sinks: mx.array | None) -> mx.array:
    outputs: list[mx.array] = []
    order: list[int] = []
    for index in _equal_starts(view, queries):
        some = queries if len(index) == queries.shape[0] else queries[mx.array(index)]
        outputs.append(_attend_rows(some, view, index, scale, sinks, outputs[-1:]))
        order += index
    return gather.in_order(outputs, order)


def _equal_starts(view: LayerView, queries: mx.array) -> list[list[int]]:
    """Rows with equally many positions before their chunks, as many together as there is room for."""
    groups: dict[int, list[list[int]]] = {}
    for row, start in enumerate(view.batch.starts):
        end = start + queries.shape[2] + SHAPE_GRID
        most = max(1, _room(queries, view) // (end * gather.token_bytes(view)))
        found = groups.setdefault(start, [[]])
        if len(found[-1]) == most:
            found.append([])
        found[-1].append(row)
    return [index for found in groups.values() for index in found]


def _attend_rows(
    queries: mx.array,
    view: LayerView,
    index: Sequence[int],
    scale: float,
    sinks: mx.array | None,
    earlier: Earlier,
) -> mx.array:
    """Attention of ``queries [b, H, L, D]`` of rows with equal starts, by as many KV heads as fit."""
    batch, size = view.batch, view.pool.block_size
    count, heads, length, _ = queries.shape
    start = batch.starts[index[0]]
    grid = shape_grid(start + length)
    real = max(batch.lengths[row] for row in index) if grid == 1 else length
    first, last = start // grid * grid, -(-(start + real) // grid) * grid
    padding = (start - first, last - start - real)
    padded = _repeated(queries[:, :, :real], *padding)
    rows = gather.rows_of(view, list(index), -(-last // size))
    kv_heads = view.pool.layers[view.layer].kv_heads
    shared = heads // kv_heads
    most = max(1, _room(queries, view) // (count * last * _head_bytes(view)))
    is_clean = all(start + batch.lengths[row] == last for row in index)
    pieces: list[mx.array] = []
    for head in range(0, kv_heads, most):
        chosen = slice(head, min(head + most, kv_heads))
        keys, values = gather.gather(view, after(rows.tables, pieces[-1:] or earlier), chosen)
        if not is_clean:  # a fused kernel may hide a score by adding to it, which NaN survives
            keys, values = rows.written(keys, 0), rows.written(values, 0)
        part = slice(chosen.start * shared, chosen.stop * shared)
        pieces.append(
            causal_attention(
                padded[:, part],
                keys[:, :, :last],
                values[:, :, :last],
                scale,
                None if sinks is None else sinks[part],
            )
        )
    out = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
    out = out[:, :, padding[0] : padding[0] + real]
    return out if real == length else mx.pad(out, [(0, 0), (0, 0), (0, length - real), (0, 0)])


def _room(queries: mx.array, view: LayerView) -> int:
    """Bytes of keys and values of one call: without a fused kernel they are copied once more for the products."""
    fused = is_fused(queries.dtype, queries.shape[-1], view.pool.layers[view.layer].value_dim)
    return gather.GATHER_BYTES if fused else gather.GATHER_BYTES // 2


def _repeated(queries: mx.array, before: int, behind: int) -> mx.array:
    """``queries [b, H, L, D]`` with the first one repeated in front and the last one behind."""
    count, heads, _, dim = queries.shape
    parts = [queries]
    if before:
        parts.insert(0, mx.broadcast_to(queries[:, :, :1], (count, heads, before, dim)))
    if behind:
        parts.append(mx.broadcast_to(queries[:, :, -1:], (count, heads, behind, dim)))
    return queries if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _head_bytes(view: LayerView) -> int:
    """Of one gathered position of one KV head."""
    return gather.token_bytes(view) // view.pool.layers[view.layer].kv_heads
