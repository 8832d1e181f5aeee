"""Reference paged attention, for every device; the other implementations are checked against it.

One contract: queries ``[B, H, L, D]`` of this forward's tokens, whose keys and values are already in the pool,
attend to their own row's positions ``max(0, p - window + 1) … p``. Rows are right-padded to L; what pads
produce is garbage that nobody reads. Keys and values may be packed in the pool.

Two readers of the pool, one per order of its axes: ``slices.py`` (head-major, CPU) and ``gather.py`` (token-major,
GPU; prompts in ``gathered_prefill.py``). All keep what they copy and the scores they hold within
``scratch_bytes``, whatever the rows' lengths are. ``materialize``, for models that compute attention themselves,
copies the whole context of all rows: the runner splits their forwards (``forwards/split.py``) so that it stays
within what the memory plan sets aside for it.
"""

from __future__ import annotations

import mlx.core as mx

from headrace.runner.attention import gather, slices
from headrace.runner.attention.gathered_prefill import attend_prefill
from headrace.runner.kv.view import LayerView


def paged_attention(
    queries: mx.array,
    view: LayerView,
    scale: float,
    window: int | None,
    sinks: mx.array | None = None,
    softcap: float = 0.0,
) -> mx.array:
    """Attention of ``queries [B, H, L, D]`` over the pool; returns ``[B, H, L, value_dim]``.

    ``softcap``: scores become ``softcap * tanh(score / softcap)``; 0: they stay.
    """
    if view.pool.head_major:
        return slices.attend_slices(queries, view, scale, window, sinks, softcap)
    out = attend_prefill(queries, view, scale, window, sinks) if softcap == 0 else None
    return gather.attend_gathered(queries, view, scale, window, sinks, softcap) if out is None else out


def scratch_bytes(*, head_major: bool) -> int:
    """What attention allocates at once beside its result, at most: a line of the memory plan.

    Not of a model that computes attention itself (``core/context_scratch.py``).
    """
    return slices.SCRATCH_BYTES if head_major else gather.SCRATCH_BYTES


# -- materialization ---------------------------------------------------------------------------------------


def materialize(view: LayerView) -> tuple[mx.array, mx.array]:
    """All rows' contexts as ``[B, kv_heads, S, dim]`` arrays, for models that compute attention themselves."""
    if not view.pool.head_major:
        return gather.materialize_gathered(view)
    return slices.materialize_slices(view)


def materialized_mask(view: LayerView, length: int, window: int | None) -> mx.array:
    """``[B, 1, L, S]`` bool that belongs to ``materialize``'s arrays."""
    if not view.pool.head_major:
        return gather.position_mask(view, length, window)
    group = view.group
    context = max(sum(last - first for first, last in runs) for runs in group.runs)
    query = (view.batch.offsets[:, None] + mx.arange(length)[None])[:, None, :, None]
    key = (mx.array(list(group.firsts))[:, None] + mx.arange(context)[None])[:, None, None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
