"""Reference paged attention, for every device; the other implementations are checked against it.

One contract: queries ``[B, H, L, D]`` of this forward's tokens, whose keys and values are already in the pool,
attend to their own row's positions ``max(0, p - window + 1) … p``. Rows are right-padded to L; what pads
produce is garbage that nobody reads.

Two readers of the pool share it:

- *slices* (head-major pool, CPU): each row's context is a few runs of slots, each a view of the pool; a row in
  one run is read without any copy.
- *gather* (token-major pool, GPU): the rows' blocks are gathered through the block table and masked.

Queries are tiled so that a score matrix stays within ``SCORE_BYTES``.
"""

from __future__ import annotations

import mlx.core as mx

from headrace.runner.layer_view import GroupBatch, LayerView

# Bound on one tile of float32 scores; the memory plan counts it with the activation peak it measures.
SCORE_BYTES = 64 * 1024 * 1024


def paged_attention(
    queries: mx.array,
    view: LayerView,
    scale: float,
    window: int | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of ``queries [B, H, L, D]`` over the pool; returns ``[B, H, L, value_dim]``."""
    if view.pool.head_major:
        return _by_slices(queries, view, scale, window, sinks)
    return _by_gather(queries, view, scale, window, sinks)


# -- slices ------------------------------------------------------------------------------------------------


def _by_slices(
    queries: mx.array, view: LayerView, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array:
    outputs = []
    length = queries.shape[2]
    for row in range(queries.shape[0]):
        keys, values = row_context(view, row)
        query = queries[row : row + 1]
        if length == 1:
            outputs.append(
                mx.fast.scaled_dot_product_attention(query, keys, values, scale=scale, mask=None, sinks=sinks)
            )
        else:
            out = _prefill_row(query[:, :, : view.batch.lengths[row]], keys, values, scale, window, sinks)
            pad = length - out.shape[2]
            outputs.append(_pad_positions(out, pad))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=0)


def row_context(view: LayerView, row: int) -> tuple[mx.array, mx.array]:
    """One row's keys and values ``[1, kv_heads, S, dim]`` from a head-major pool, copied only over run borders."""
    keys, values = view.pool.keys[view.layer], view.pool.values[view.layer]
    runs = view.group.runs[row]
    if len(runs) == 1:
        first, last = runs[0]
        return keys[None, :, first:last], values[None, :, first:last]
    return (
        mx.concatenate([keys[:, first:last] for first, last in runs], axis=1)[None],
        mx.concatenate([values[:, first:last] for first, last in runs], axis=1)[None],
    )


def _prefill_row(
    query: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int | None,
    sinks: mx.array | None,
) -> mx.array:
    """Causal attention of one row's last ``L`` positions over its context, in tiles of queries.

    keys     |--------------- S ----------------|
    queries                |-------- L ---------|
    tile                          |-- T --|        needs keys up to its last query, from its first - window
    """
    _, heads, length, _ = query.shape
    context = keys.shape[2]
    tile = max(16, SCORE_BYTES // (4 * heads * context))
    outputs = []
    for first in range(0, length, tile):
        last = min(first + tile, length)
        high = context - length + last
        low = 0 if window is None else max(0, context - length + first - window + 1)
        mask: mx.array | str = "causal"
        if window is not None and high - low > window:
            mask = _window_mask(last - first, high - low, window)
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                query[:, :, first:last],
                keys[:, :, low:high],
                values[:, :, low:high],
                scale=scale,
                mask=mask,
                sinks=sinks,
            )
        )
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _pad_positions(array: mx.array, count: int) -> mx.array:
    """``count`` zero positions behind ``[1, heads, S, dim]``."""
    return mx.pad(array, [(0, 0), (0, 0), (0, count), (0, 0)]) if count else array


def _window_mask(queries: int, keys: int, window: int) -> mx.array:
    """``[queries, keys]`` bool: causal, aligned at the end, at most ``window`` positions back."""
    query = mx.arange(keys - queries, keys)[:, None]
    key = mx.arange(keys)[None]
    return (key <= query) & (key > query - window)


# -- gather ------------------------------------------------------------------------------------------------


def _by_gather(
    queries: mx.array, view: LayerView, scale: float, window: int | None, sinks: mx.array | None
) -> mx.array:
    keys, values = _gather(view.pool.keys[view.layer], view), _gather(view.pool.values[view.layer], view)
    batch, length = view.batch, queries.shape[2]
    if length > 1 and len(batch.lengths) == 1 and (window is None or batch.starts[0] + length <= window):
        end = batch.starts[0] + batch.lengths[0] - view.group.firsts[0]
        return mx.fast.scaled_dot_product_attention(
            queries, keys[:, :, :end], values[:, :, :end], scale=scale, mask="causal", sinks=sinks
        )
    mask = position_mask(view, length, keys.shape[2], window)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _gather(pool: mx.array, view: LayerView) -> mx.array:
    """``[num_slots, kv_heads, dim]`` -> ``[B, kv_heads, S, dim]`` through the block tables."""
    tables = view.group.tables
    assert tables is not None
    size = view.pool.block_size
    slots, heads, dim = pool.shape
    blocks = pool.reshape(slots // size, size, heads, dim)[tables]
    return blocks.reshape(tables.shape[0], tables.shape[1] * size, heads, dim).swapaxes(1, 2)


def position_mask(view: LayerView, length: int, context: int, window: int | None) -> mx.array:
    """``[B, 1, L, S]`` bool: which gathered slots each query may read."""
    group: GroupBatch = view.group
    assert group.bases is not None
    query = (view.batch.offsets[:, None] + mx.arange(length)[None])[:, None, :, None]
    key = (group.bases[:, None] + mx.arange(context)[None])[:, None, None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


# -- materialization ---------------------------------------------------------------------------------------


def materialize(view: LayerView) -> tuple[mx.array, mx.array]:
    """All rows' contexts as ``[B, kv_heads, S, dim]`` arrays, for models that compute attention themselves."""
    if not view.pool.head_major:
        return _gather(view.pool.keys[view.layer], view), _gather(view.pool.values[view.layer], view)
    rows = [row_context(view, row) for row in range(len(view.batch.starts))]
    longest = max(keys.shape[2] for keys, _ in rows)

    def stack(arrays: list[mx.array]) -> mx.array:
        return mx.concatenate([_pad_positions(array, longest - array.shape[2]) for array in arrays], axis=0)

    return stack([keys for keys, _ in rows]), stack([values for _, values in rows])


def materialized_mask(view: LayerView, length: int, window: int | None) -> mx.array:
    """``[B, 1, L, S]`` bool that belongs to ``materialize``'s arrays."""
    if not view.pool.head_major:
        assert view.group.tables is not None
        return position_mask(view, length, view.group.tables.shape[1] * view.pool.block_size, window)
    group = view.group
    context = max(sum(last - first for first, last in runs) for runs in group.runs)
    query = (view.batch.offsets[:, None] + mx.arange(length)[None])[:, None, :, None]
    key = (mx.array(list(group.firsts))[:, None] + mx.arange(context)[None])[:, None, None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
