"""Module substitution, CPU with float32 activations: half a decoder block is one operation.

    attention       h = x + out(attend(rotate(q), K, V)), with q, k, v = product(norm(x)); k and v are stored
    feed-forward    h + down(silu(gate(norm(h))) * up(norm(h)))

For one row MLX's and Python's work for some fifteen operations a block costs as much as the arithmetic. The native
halves (``native/cpu_block.cpp``) call what those operations call, in their order. Packed pools and all that is not
of the pattern go to the unmodified block, which keeps the weights; the halves refer to them.

The pattern is found by structure and types: pre-norm residual, norms, rotations, narrow products and the gate
already native. Every block is compared with the unmodified one over equal random pools, one of each form is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.attention.kernel_check import LayerForm
from headrace.runner.attention.native_check import Case
from headrace.runner.cpu.operations import CpuOperations
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.store import Store
from headrace.runner.kv.view import LayerView, PagedMask
from headrace.runner.mlx_lm_adapter import bound_attention
from headrace.runner.substitutions.decoder_block import ATTENTION, HEAD_NORMS, is_block
from headrace.runner.substitutions.fused_linear import FusedPart
from headrace.runner.substitutions.modules import agree, show_as
from headrace.runner.substitutions.narrow_linear import NarrowGatedMLP, NarrowLinear
from headrace.runner.substitutions.native_norm import NativeNorm
from headrace.runner.substitutions.rotary import TableRotary
from headrace.runner.timing import no_slower

# Inputs, block size, window (0: none) -> h, the mark of the write.
AttentionCall = Callable[[list[mx.array], int, int], tuple[mx.array, mx.array]]
FeedForwardCall = Callable[[mx.array], mx.array]

# Of the largest value; both ways are the same roundings, unless a norm's own way is MLX's.
_TOLERANCE = 1e-5
_BLOCK_SIZE = 16
_ENDS = (1, 70, 33, 200, 16, 17)
_NEW = (1, 40, 33, 7, 16, 2)
# Rows and tokens of each.
_TIMED = ((1, 1), (6, 1), (1, 64))


class NativeBlock(nn.Module):  # type: ignore[misc]
    """A decoder block over the weights of ``inner``; see the module docstring.

    Args:
        attend, feed_forward: the native halves; without the second the unmodified half follows the first.
        kv_heads, dim: of the pools that the first one writes to.
    """

    def __init__(
        self,
        inner: nn.Module,
        attend: AttentionCall,
        feed_forward: FeedForwardCall | None,
        kv_heads: int,
        dim: int,
    ) -> None:
        super().__init__()
        show_as(self, inner)
        self.inner = inner
        self._attend = attend
        self._feed_forward = feed_forward
        self._pool = kv_heads, dim

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not self.takes(x, mask, cache):
            return self.inner(x, mask, cache=cache)  # type: ignore[no-any-return]
        pool, layer, group, batch = cache.pool, cache.layer, cache.group, cache.batch
        window = mask.window if isinstance(mask, PagedMask) else group.window
        cosine, sine = self.inner.self_attn.rope.tables_of(batch.offsets, *x.shape[:2])
        places = [group.tables, group.bases, batch.offsets, batch.ends, group.slots, pool.marks[layer]]
        inputs = [x, cosine, sine, *places, pool.keys[layer], pool.values[layer]]
        h, pool.marks[layer] = self._attend(inputs, pool.block_size, window or 0)
        if self._feed_forward is not None:
            return self._feed_forward(h)
        return h + self.inner.mlp(self.inner.post_attention_layernorm(h))  # type: ignore[no-any-return]

    def takes(self, x: mx.array, mask: Any, cache: Any) -> bool:
        """Whether this forward is one for the native halves."""
        if type(cache) is not LayerView or isinstance(mask, mx.array):
            return False
        shape = cache.pool.layers[cache.layer]
        return (
            x.ndim == 3
            and x.dtype == mx.float32
            and cache.pool.head_major
            and cache.pool.in_place
            and cache.group.tables is not None
            and shape.key_packing is None
            and shape.dtype == mx.float32
            and (shape.kv_heads, shape.key_dim, shape.value_dim) == (*self._pool, self._pool[1])
        )


def substitute_native_blocks(model: nn.Module, operations: CpuOperations, store: Store) -> str:
    """Replace what matches, is right and no slower; a line about it.

    ``store``: how pools are written; attention must have been bound to the native one.
    """
    found = [(path, module) for path, module in model.named_modules() if is_block(module)]
    kept: list[tuple[str, NativeBlock]] = []
    quick: dict[tuple[Any, ...], bool] = {}
    for path, module in found:
        block = _made(module, operations)
        if block is None or not _right(block, store):
            continue
        parameters = cast("list[tuple[str, mx.array]]", nn.utils.tree_flatten(module.parameters()))
        form = tuple(sorted((name, array.shape) for name, array in parameters))
        if form not in quick:
            quick[form] = _pays(block, store)
        if quick[form]:
            kept.append((path, block))
    model.update_modules(nn.utils.tree_unflatten(kept))
    return f"decode blocks: {len(kept)} of {len(found)} are native"


# -- what a block is made of -------------------------------------------------------------------------------


def _made(block: nn.Module, operations: CpuOperations) -> NativeBlock | None:
    """The block with native halves, or None when its attention is not of the pattern."""
    attention, norm = block.self_attn, block.input_layernorm
    children = set(attention.children())
    heads, kv_heads = getattr(attention, "n_heads", None), getattr(attention, "n_kv_heads", None)
    scale = getattr(attention, "scale", None)
    if children - HEAD_NORMS != ATTENTION or bound_attention(attention) is None or type(norm) is not NativeNorm:
        return None
    stacked = attention.q_proj.get("stacked") if isinstance(attention.q_proj, FusedPart) else None
    out, rope = attention.o_proj, attention.rope
    if type(stacked) is not NarrowLinear or type(out) is not NarrowLinear or type(rope) is not TableRotary:
        return None
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or not isinstance(scale, float):
        return None
    norms = [attention.get(name) for name in sorted(HEAD_NORMS)]
    if any(one is not None and type(one) is not NativeNorm for one in norms):
        return None
    key_norm, query_norm = cast("list[NativeNorm | None]", norms)
    epsilons = {one.eps for one in (key_norm, query_norm) if one is not None}
    dim = out.matrix.form.inputs // heads
    if dim != rope.dims or len(epsilons) > 1:
        return None
    try:
        attend = stacked.products.native.AttentionHalf(
            functions=operations.functions(),
            norm=norm.factors,
            eps=norm.eps,
            qkv_form=stacked.matrix.form.words,
            qkv=stacked.strips,
            qkv_bias=stacked.get("bias"),
            query_norm=None if query_norm is None else query_norm.factors,
            key_norm=None if key_norm is None else key_norm.factors,
            head_eps=epsilons.pop() if epsilons else 0.0,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            scale=scale,
            out_form=out.matrix.form.words,
            out=out.strips,
            out_bias=out.get("bias"),
        )
        feed_forward = _feed_forward(block, operations)
    except ValueError:  # widths that do not fit together
        return None
    return NativeBlock(block, attend, feed_forward, kv_heads, dim)


def _feed_forward(block: nn.Module, operations: CpuOperations) -> FeedForwardCall | None:
    mlp, norm = block.mlp, block.post_attention_layernorm
    if type(mlp) is not NarrowGatedMLP or type(norm) is not NativeNorm or type(mlp.down_proj) is not NarrowLinear:
        return None
    down = mlp.down_proj
    half: FeedForwardCall = down.products.native.FeedForwardHalf(
        functions=operations.functions(),
        norm=norm.factors,
        eps=norm.eps,
        gate_up_form=mlp.matrix.form.words,
        gate_up=mlp.strips,
        down_form=down.matrix.form.words,
        down=down.strips,
        down_bias=down.get("bias"),
    )
    return half


# -- right, and no slower ----------------------------------------------------------------------------------


def _view(block: NativeBlock, store: Store, ends: Sequence[int], new: Sequence[int]) -> LayerView:
    """Rows of ``ends`` positions, the last ``new`` of each to be computed, over a pool of fixed random values."""
    kv_heads, dim = block._pool
    layer = LayerShape(0, kv_heads, dim, dim, mx.float32)
    return Case.random(LayerForm(layer, kv_heads, None, 0.0), ends, new, _BLOCK_SIZE, store).tables


def _input(block: NativeBlock, rows: int, length: int = 1) -> mx.array:
    width = block.inner.input_layernorm.factors.size
    return 0.1 * mx.random.normal((rows, length, width), key=mx.random.key(1))


def _right(block: NativeBlock, store: Store) -> bool:
    """Whether forwards give what the unmodified block gives, in results and in the pool."""
    return all(_equal(block, store, new) for new in ([1] * len(_ENDS), _NEW))


def _equal(block: NativeBlock, store: Store, new: Sequence[int]) -> bool:
    x, mask = _input(block, len(_ENDS), max(new)), PagedMask(None)
    views = [_view(block, store, _ENDS, new) for _ in range(2)]
    if not block.takes(x, mask, views[0]):
        return False
    expected, got = block.inner(x, mask, cache=views[0]), block(x, mask, cache=views[1])
    mx.eval(expected, got, *(view.pool.changes for view in views))
    one, other = (view.pool for view in views)
    pairs = (expected, got), (one.keys[0], other.keys[0]), (one.values[0], other.values[0])
    return all(agree(left, right, _TOLERANCE) for left, right in pairs)


def _pays(block: NativeBlock, store: Store) -> bool:
    mask = PagedMask(None)
    for rows, length in _TIMED:
        ends = [max(end, length) for end in _ENDS[:rows]]
        x, view = _input(block, rows, length), _view(block, store, ends, [length] * rows)
        if not no_slower(partial(block, x, mask, cache=view), partial(block.inner, x, mask, cache=view)):
            return False
    return True
