"""Module substitution on a GPU: a Llama-pattern decoder block whose forwards take few, wide operations.

    x ─ norm, q k v product ─ rotate and store ─ paged attention ─ output product + x ─┐
        ┌──────────────────────────────────────────────────────────────────────────────┘
        h ─ norm, gate and up product, SiLU gate ─ down product + h ─ out

Each "─ … ─" is one operation of a decode step (``products/small_rows.py``, ``attention/rotate_store.py``, the
dispatcher); a block of experts has its own feed-forward part (``moe_decode.py``). Prompts go the same way where
``prompts`` is set, with norms and gate as operations of their own beside library products: nine in a layer. Masks
or caches of another kind, and everything else, go to the unmodified block, which keeps the weights; the fused path
refers to them.

The pattern is found by structure and types: pre-norm residual, RMS norms, q k v and gate up already fused by
``fused_linear.py``. Every replaced block is then compared with the unmodified one (``block_check.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.runner.attention.rotate_store import RotarySpec
from headrace.runner.device_arrays import on_device
from headrace.runner.kv.view import KVHandle, LayerView
from headrace.runner.mlx_lm_adapter import Llama3RoPE, bound_attention
from headrace.runner.products.small_rows import Dense, Norm, Product, Products
from headrace.runner.substitutions.fused_linear import FusedPart
from headrace.runner.substitutions.modules import show_as
from headrace.runner.substitutions.packed_linear import PackedLinear

_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "rope"}
HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj"}


class Rotate(Protocol):
    """See ``RotateAndStore``."""

    def supports(self, spec: RotarySpec, view: LayerView) -> bool: ...

    def __call__(self, qkv: mx.array, view: LayerView, spec: RotarySpec) -> mx.array: ...


class FeedForward(Protocol):
    """The second half of a block, its norm and residual included: ``h [N, D]`` or ``[N, 1, D]``, the same back."""

    def __call__(self, h: mx.array, products: Products) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """What the attention half of a block is made of."""

    norm: Norm
    qkv: Dense
    rotary: RotarySpec
    scale: float
    out: Dense


@dataclass(frozen=True, slots=True)
class DenseFeedForward:
    """Gated feed-forward layer with SiLU."""

    norm: Norm
    gate_up: Dense
    down: Dense

    def __call__(self, h: mx.array, products: Products) -> mx.array:
        inner = products(h, Product(self.gate_up, norm=self.norm, gated=True))
        return products(inner, Product(self.down, residual=h))


class FusedBlock(nn.Module):  # type: ignore[misc]
    """A decoder block over the weights of ``inner``; see the module docstring.

    Args:
        prompt_products: for forwards of several tokens per row; None: as for others.

    Attributes:
        prompts: whether forwards of several tokens per row are fused too.
    """

    def __init__(
        self,
        inner: nn.Module,
        attention: AttentionParts,
        feed_forward: FeedForward,
        products: Products,
        rotate: Rotate,
        prompt_products: Products | None = None,
    ) -> None:
        super().__init__()
        show_as(self, inner)
        self.inner = inner
        self.attention = attention
        self.feed_forward = feed_forward
        self.prompts = False
        self._products = products
        self._prompt_products = prompt_products or products
        self._rotate = rotate

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not self.takes(x, mask, cache):
            return self.inner(x, mask, cache=cache)  # type: ignore[no-any-return]
        parts = self.attention
        rows, length, width = x.shape
        flat = x if length == 1 else x.reshape(rows * length, width)
        products = self._products if length == 1 else self._prompt_products
        qkv = products(flat, Product(parts.qkv, norm=parts.norm))
        queries = self._rotate(qkv, cache, parts.rotary)
        handle = KVHandle(cache)
        attend = bound_attention(self.inner.self_attn)
        assert attend is not None, "the pattern has one"
        out = attend(queries, handle, handle, cache=cache, scale=parts.scale, mask=mask)
        if length > 1:
            out = _by_token(out, rows, length)
        h = products(out, Product(parts.out, residual=flat))
        return self.feed_forward(h, products).reshape(x.shape)

    def takes(self, x: mx.array, mask: Any, cache: Any) -> bool:
        """Whether this forward is one for the fused path."""
        return (
            type(cache) is LayerView
            and not isinstance(mask, mx.array)
            and x.ndim == 3
            and (x.shape[1] == 1 or (self.prompts and bool(cache.batch.lengths)))
            and x.dtype == self.attention.qkv.dtype
            and self._rotate.supports(self.attention.rotary, cache)
        )


def _by_token(out: mx.array, rows: int, length: int) -> mx.array:
    """``[B, H, L, D]``, or more rows and positions, as ``[B * L, H * D]``; a view where it lies by token."""
    if out.shape[0] != rows or out.shape[2] != length:
        out = out[:rows, :, :length]
    return out.swapaxes(1, 2).reshape(rows * length, -1)


# -- what a block is made of -------------------------------------------------------------------------------


def attention_parts(block: nn.Module) -> AttentionParts | None:
    """The attention half of ``block``, or None when it is not of the pattern."""
    attention = block.self_attn
    children = set(attention.children())
    norm = norm_of(block.input_layernorm)
    if children - HEAD_NORMS != ATTENTION or norm is None or bound_attention(attention) is None:
        return None
    qkv, out, rotary = fused_dense(attention.q_proj), dense_of(attention.o_proj), rotary_spec(attention)
    scale = getattr(attention, "scale", None)
    if qkv is None or out is None or rotary is None or not isinstance(scale, float):
        return None
    widths = rotary.heads * rotary.head_dim, rotary.kv_heads * rotary.head_dim
    if qkv.shape[0] != widths[0] + 2 * widths[1] or out.shape[1] != widths[0]:
        return None
    return AttentionParts(norm, qkv, rotary, scale, out)


def dense_feed_forward(block: nn.Module) -> DenseFeedForward | None:
    """The feed-forward half of ``block``, or None when it is not of the pattern."""
    norm = norm_of(block.post_attention_layernorm)
    if set(block.mlp.children()) != _MLP or norm is None:
        return None
    gate_up, down = fused_dense(block.mlp.gate_proj), dense_of(block.mlp.down_proj)
    if gate_up is None or down is None or gate_up.shape[0] != 2 * down.shape[1]:
        return None
    return DenseFeedForward(norm, gate_up, down)


def is_block(module: nn.Module) -> bool:
    """Whether ``module`` has the parts of a pre-norm decoder block."""
    return set(module.children()) == _BLOCK


def dense_of(linear: Any) -> Dense | None:
    """Weights and bias of a linear layer, plain or packed as kernels take them."""
    if type(linear) is PackedLinear:
        return linear.dense
    return Dense(linear.weight, linear.get("bias")) if type(linear) is nn.Linear else None


def fused_dense(part: Any) -> Dense | None:
    """The stacked weights behind the first part of fused projections."""
    return dense_of(part.get("stacked")) if isinstance(part, FusedPart) else None


def norm_of(module: Any) -> Norm | None:
    return Norm(module.weight, float(module.eps)) if type(module) is nn.RMSNorm else None


def rotary_spec(attention: Any) -> RotarySpec | None:
    """What ``attention`` does to its heads; None where its rotary embedding is not plain or Llama 3's."""
    heads, kv_heads = getattr(attention, "n_heads", None), getattr(attention, "n_kv_heads", None)
    out = dense_of(attention.o_proj)
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or out is None or out.shape[1] % heads:
        return None
    frequencies = _inverse_frequencies(attention.rope)
    norms = [norm_of(attention[name]) for name in ("q_norm", "k_norm") if name in attention]
    present = [norm for norm in norms if norm is not None]
    dim = out.shape[1] // heads
    if frequencies is None or len(norms) == 1 or len(present) != len(norms):
        return None
    if any(norm.weight.shape != (dim,) or norm.eps != present[0].eps for norm in present):
        return None
    rope = attention.rope
    scale = float(rope.scale) if type(rope) is nn.RoPE else 1.0
    q_norm, k_norm = (present[0].weight, present[1].weight) if present else (None, None)
    return RotarySpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        inv_freq=frequencies,
        rotated_dims=int(rope.dims),
        traditional=bool(rope.traditional),
        position_scale=scale,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=present[0].eps if present else 0.0,
    )


def _inverse_frequencies(rope: Any) -> mx.array | None:
    """``[dims / 2]`` float32, rounded as MLX's kernels round them: they have rotated the keys of the prompt."""
    if type(rope) is nn.RoPE:
        pairs = rope.dims // 2
        share = np.arange(pairs, dtype=np.float32) / np.float32(pairs)
        return on_device(mx.array(np.exp2(-(share * np.float32(np.log2(rope.base))))))
    if type(rope) is Llama3RoPE:
        return on_device(mx.array(1.0 / np.array(rope._freqs.astype(mx.float32))))
    return None
