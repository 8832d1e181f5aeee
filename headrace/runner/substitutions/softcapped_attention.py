"""Module substitution: attention with soft-capped scores (Gemma 2) over paged pools.

mlx-lm's Gemma 2 computes its scores itself, with plain products over whole contexts, and so has to be handed
copies of them. The replacement projects and rotates with the parts of the replaced module, and leaves scores to
the shared attention function, which caps them (softcap * tanh(score / softcap)) where it reads the pool. Over any
other cache it is the replaced module. A module is replaced only after both gave the same output on random input.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.attention.materialized import MaterializedView
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.view import ForwardBatch, GroupBatch, KVHandle, LayerView, PagedMask
from headrace.runner.mlx_lm_adapter import current_attention
from headrace.runner.products.small_rows import largest_difference
from headrace.runner.substitutions.narrow_linear import NarrowLinear

_KIND = ("mlx_lm.models.gemma2", "Attention")
_BLOCK_SIZE = 16
# Largest difference, relative to the largest output, by bytes of the dtype.
_TOLERANCE = {4: 1e-3, 2: 4e-2}


class SoftcappedAttention(nn.Module):  # type: ignore[misc]
    """In the place of one ``gemma2.Attention``, which it keeps."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def softcap(self) -> float:
        return float(self.inner.attn_logit_softcapping)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        inner = self.inner
        if not isinstance(cache, LayerView) or isinstance(cache, MaterializedView):
            unpaged: mx.array = inner(x, mask, cache)
            return unpaged
        queries = _by_head(inner.q_proj(x), inner.n_heads)
        keys = _by_head(inner.k_proj(x), inner.n_kv_heads)
        values = _by_head(inner.v_proj(x), inner.n_kv_heads)
        queries, keys = inner.rope(queries, offset=cache.offset), inner.rope(keys, offset=cache.offset)
        handle, _ = cache.update_and_fetch(keys, values)
        assert isinstance(handle, KVHandle)
        out = current_attention()(
            queries, handle, handle, cache=cache, scale=inner.scale, mask=mask, softcap=self.softcap
        )
        rows, length = x.shape[:2]
        projected: mx.array = inner.o_proj(out.transpose(0, 2, 1, 3).reshape(rows, length, -1))
        return projected


def substitute_softcapped_attention(model: nn.Module, *, check: bool = True) -> float:
    """Replace all such attentions of ``model``; their soft cap, or 0 where there is nothing to replace.

    The shared attention function must be bound to a dispatcher. ``check``: False for a model without weights,
    whose outputs cannot be compared.
    """
    caps: set[float] = set()
    for _, parent in list(model.named_modules()):
        for name, child in parent.children().items():
            if not isinstance(child, nn.Module) or (type(child).__module__, type(child).__name__) != _KIND:
                continue
            replacement = SoftcappedAttention(child)
            if child.attn_logit_softcapping > 0 and (not check or _same(replacement)):
                setattr(parent, name, replacement)
                caps.add(replacement.softcap)
    return max(caps, default=0.0)


def _by_head(x: mx.array, heads: int) -> mx.array:
    """``[B, L, heads * dim]`` -> ``[B, heads, L, dim]``."""
    rows, length, _ = x.shape
    return x.reshape(rows, length, heads, -1).transpose(0, 2, 1, 3)


def _same(module: SoftcappedAttention) -> bool:
    """Whether seven tokens, then one more, come out as from the replaced module over its own cache."""
    inner = module.inner
    probe = _Kept()
    x = mx.random.normal((1, 8, _width(inner)), key=mx.random.key(11)).astype(_dtype(inner))
    expected = inner(x, mx.tril(mx.ones((8, 8), mx.bool_)), probe)
    keys, values = probe.seen
    layer = LayerShape(0, keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype)
    pool = KVPool([layer], [2], _BLOCK_SIZE, head_major=False)
    got = [module(x[:, first:last], PagedMask(None), _view(pool, first, last)) for first, last in ((0, 7), (7, 8))]
    return largest_difference(mx.concatenate(got, axis=1), expected) <= _TOLERANCE.get(keys.dtype.size, 4e-2)


class _Kept:
    """A cache of one forward that keeps nothing but what it was given."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.seen = keys, values
        return self.seen


def _view(pool: KVPool, first: int, last: int) -> LayerView:
    """One row in block 1: tokens ``first`` … ``last`` of it are new."""
    group = GroupBatch(
        None,
        mx.arange(_BLOCK_SIZE + first, _BLOCK_SIZE + last),
        firsts=[0],
        tables=mx.array([[1]], mx.int32),
        bases=mx.array([0], mx.int32),
    )
    ends = mx.array([last], mx.int32)
    batch = ForwardBatch(
        offsets=mx.array([first], mx.int32), ends=ends, starts=[first], lengths=[last - first], groups=[group]
    )
    return LayerView(pool, 0, batch)


def _width(inner: nn.Module) -> int:
    return int(inner.o_proj(mx.zeros((1, 1, inner.n_heads * inner.head_dim))).shape[-1])


def _dtype(inner: nn.Module) -> mx.Dtype:
    """Of activations: that of the scales where weights are packed."""
    o_proj = inner.o_proj
    if isinstance(o_proj, NarrowLinear):
        return mx.float32
    dtype: mx.Dtype = o_proj.scales.dtype if isinstance(o_proj, nn.QuantizedLinear) else o_proj.weight.dtype
    return dtype
