"""At load on a GPU: which decoder blocks are fused, and is each of them right and faster than the one it replaces?

Every candidate block and its unmodified one run one decode forward over equal random pools; outputs and what was
written to the pools must agree. Of packed pools, what the codes stand for must agree up to the packing's own
steps, and must not lean to one side. One block of each form is timed. What fails or loses stays as it was.

One block of each form also runs two forwards of prompts, with nothing before them and one behind a prefix. Where
these differ, prompts go to the unmodified blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from headrace.errors import one_line
from headrace.runner.attention.random_pools import random_vectors
from headrace.runner.kernels.language import compile_ahead
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.kv.packing import Packed, VectorPacking, scale_dtype
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.store import PoolStore
from headrace.runner.kv.view import ForwardBatch, GroupBatch, LayerView, PagedMask
from headrace.runner.products.choice import SmallRowsKernel
from headrace.runner.products.small_rows import KINDS
from headrace.runner.substitutions.decoder_block import (
    DenseFeedForward,
    FeedForward,
    FusedBlock,
    Rotate,
    attention_parts,
    dense_feed_forward,
    is_block,
    norm_of,
)
from headrace.runner.substitutions.moe_decode import ExpertsChoice, ExpertsFeedForward, experts_feed_forward
from headrace.runner.timing import Cost, compiled_cost

# Of the largest change that the block makes to its input, by bytes of the dtype; and of the largest output.
_TOLERANCE = {4: 1e-3, 2: 6e-2}
_ROUNDING = {4: 1e-6, 2: 2.0**-8}
# Unit roundoff of scales and biases.
_ROUNDOFF = {mx.bfloat16: 2.0**-9, mx.float16: 2.0**-11}
# Average difference of packed elements, in both packings' steps: a quarter if one of them always rounded down.
_MOST_DRIFT = 0.18
# Layers whose products are timed: more than a cache holds. And blocks that are timed together.
log = logging.getLogger("headrace.runner")

_MEASURED_LAYERS = 16
_BLOCKS_TOGETHER = 4
_LENGTHS = (1, 33, 64, 7, 300)
_BLOCK_SIZE = 32
# Positions of a row's table, and tokens of a prompt with its pads: together more than few-rows products take.
_POSITIONS = 320
_PROMPT_LENGTH = 96


@dataclass(frozen=True, slots=True)
class Tokens:
    """Which positions the rows of a forward have: from ``starts`` on ``lengths`` of them, padded to ``padded``."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    padded: int

    @staticmethod
    def step(rows: int) -> Tokens:
        """The last one of each of ``rows`` rows."""
        return Tokens(tuple(_LENGTHS[row % len(_LENGTHS)] - 1 for row in range(rows)), (1,) * rows, 1)


PROMPTS = (Tokens((0, 0), (85, 50), _PROMPT_LENGTH), Tokens((0, 37), (85, 50), _PROMPT_LENGTH))


@dataclass(frozen=True, slots=True)
class BlockTools:
    """What fused blocks are made with.

    Attributes:
        store: how pools are written; None: functionally.
        experts: which experts are computed by a kernel.
        timed: whether a block that is slower than the unmodified one is left out.
        bits: of packed pools' codes; None: pools hold vectors as they come.
        recorder: where decode steps are recorded and replayed, so that an operation costs the host nothing.
        prompt_kinds: of activations in prompts that are fused.
    """

    products: SmallRowsKernel
    rotate: Rotate
    store: PoolStore | None
    experts: ExpertsChoice
    timed: bool = True
    bits: int | None = None
    recorder: Recorder | None = None
    prompt_kinds: Sequence[mx.Dtype] = KINDS


def substitute_decoder_blocks(model: nn.Module, tools: BlockTools) -> tuple[int, str]:
    """Replace what matches, is right and is faster; how many blocks were replaced, and a line about it."""
    found = [(path, module) for path, module in model.named_modules() if is_block(module)]
    fused = [(path, made) for path, module in found if (made := _fused(module, tools)) is not None]
    if not fused:
        return 0, f"decode blocks: fused 0 of {len(found)}; the blocks are of another pattern"
    compile_ahead(partial(_call_kernels, [block for _, block in fused], tools))
    _measure([block for _, block in fused], tools)
    kept, reasons = [], []
    fast: dict[tuple[Any, ...], bool] = {}
    for path, block in fused:
        try:
            fault = compare(block, tools.store, bits=tools.bits)
            form = _form(block)
            if fault is None and form not in fast:
                fast[form] = not tools.timed or _is_faster(block, tools)
            if fault is None and not fast[form]:
                fault = "slower than the unmodified block"
        except Exception as error:
            # Whatever a compiler or driver says about a kernel, the unmodified block can serve.
            fault = one_line(error)
        if fault is None:
            kept.append((path, block))
        elif fault not in reasons:
            reasons.append(fault)
    model.update_modules(nn.utils.tree_unflatten(kept))
    text = f"decode blocks: fused {len(kept)} of {len(found)}"
    prompts = [] if not kept else [_take_prompts([block for _, block in kept], tools)]
    return len(kept), "; ".join([text, *reasons[:3], *prompts])


def _take_prompts(blocks: Sequence[FusedBlock], tools: BlockTools) -> str:
    """Let those blocks take prompts whose form is right; a line about it."""
    reasons = []
    for alike in _alike(blocks):
        fault = _prompt_fault(alike[0], tools)
        for block in alike:
            block.prompts = fault is None
        if fault is not None and fault not in reasons:
            reasons.append(fault)
    return "; ".join([f"prompts: fused {sum(block.prompts for block in blocks)}", *reasons])


def _prompt_fault(block: FusedBlock, tools: BlockTools) -> str | None:
    """Why the block, which takes prompts for the time being, should not; None: it should."""
    dtype = block.attention.qkv.dtype
    if dtype not in tools.prompt_kinds:
        return f"they are in {_name(dtype)}"
    block.prompts = True
    try:
        faults = (compare(block, tools.store, tokens=tokens, bits=tools.bits) for tokens in PROMPTS)
        return next((fault for fault in faults if fault is not None), None)
    except Exception as error:
        # As above.
        return one_line(error)


def _fused(module: nn.Module, tools: BlockTools) -> FusedBlock | None:
    attention = attention_parts(module)
    feed_forward: FeedForward | None = dense_feed_forward(module)
    if feed_forward is None:
        feed_forward = experts_feed_forward(norm_of(module.post_attention_layernorm), module.mlp, tools.experts)
    if attention is None or feed_forward is None:
        return None
    products = tools.products
    return FusedBlock(module, attention, feed_forward, products, tools.rotate, products.in_prompts)


def _alike(blocks: Sequence[FusedBlock]) -> list[list[FusedBlock]]:
    """Blocks of equal form together."""
    forms: dict[tuple[Any, ...], list[FusedBlock]] = {}
    for block in blocks:
        forms.setdefault(_form(block), []).append(block)
    return list(forms.values())


def _call_kernels(blocks: Sequence[FusedBlock], tools: BlockTools) -> None:
    """Call what will be checked and timed, without evaluating anything (see ``compile_ahead``)."""
    products = tools.products
    for block, *_ in _alike(blocks):
        parts, feed = block.attention, block.feed_forward
        products.call_kernels(parts.qkv, parts.norm)
        products.call_kernels(parts.out, residual=True)
        if isinstance(feed, DenseFeedForward):
            products.call_kernels(feed.gate_up, feed.norm, gated=True)
            products.call_kernels(feed.down, residual=True)
        elif isinstance(feed, ExpertsFeedForward):
            products.call_kernels(feed.experts.router, feed.experts.norm)
            tools.experts.call_kernels(feed, products)
        for tokens in (Tokens.step(len(_LENGTHS)), *PROMPTS):
            block.prompts = tokens.padded > 1 and parts.qkv.dtype in tools.prompt_kinds
            for module in (block, block.inner):
                module(_input(block, tokens), PagedMask(None), cache=_view(block, tools.store, tokens, tools.bits))
        block.prompts = False


def _measure(blocks: Sequence[FusedBlock], tools: BlockTools) -> None:
    """Check and time the products of each form of block."""
    products = tools.products
    for alike in _alike(blocks):
        some = alike[:_MEASURED_LAYERS]
        attention = [block.attention for block in some]
        forms_of_products = [
            products.measure([(parts.qkv, parts.norm) for parts in attention]),
            products.measure([(parts.out, None) for parts in attention], residual=True),
        ]
        dense = [block.feed_forward for block in some if isinstance(block.feed_forward, DenseFeedForward)]
        if dense:
            forms_of_products += [
                products.measure([(parts.gate_up, parts.norm) for parts in dense], gated=True),
                products.measure([(parts.down, None) for parts in dense], residual=True),
            ]
            products.balance(forms_of_products)
        halves = [block.feed_forward for block in some if isinstance(block.feed_forward, ExpertsFeedForward)]
        if halves:
            products.measure([(half.experts.router, half.experts.norm) for half in halves])
            tools.experts.measure(halves[:_BLOCKS_TOGETHER], products)
        if tools.recorder is not None:
            products.settle(forms_of_products, partial(_seconds, some, tools, tools.recorder))


def _form(block: FusedBlock) -> tuple[Any, ...]:
    """Equal for blocks that differ in nothing but values."""
    attention, spec = block.attention, block.attention.rotary
    feed = block.feed_forward
    inner: Any = type(feed)
    if isinstance(feed, DenseFeedForward):
        inner = feed.down.shape
    elif isinstance(feed, ExpertsFeedForward):
        inner = feed.experts.shape
    return attention.qkv.shape, spec.heads, spec.kv_heads, spec.q_norm is not None, inner


# -- comparison --------------------------------------------------------------------------------------------


def compare(
    block: FusedBlock,
    store: PoolStore | None,
    *,
    rows: int = len(_LENGTHS),
    tokens: Tokens | None = None,
    bits: int | None = None,
) -> str | None:
    """What differs between a block and its unmodified one in a forward of ``tokens``, or a decode forward of
    ``rows`` rows; None when they agree."""
    tokens = tokens or Tokens.step(rows)
    x, mask = _input(block, tokens), PagedMask(None)
    dtype = x.dtype
    views = [_view(block, store, tokens, bits) for _ in range(2)]
    if not block.takes(x, mask, views[0]):
        return "the pools are not ones that blocks write to"
    expected, got = block.inner(x, mask, cache=views[0]), block(x, mask, cache=views[1])
    mx.eval(expected, got, *(array for view in views for array in view.pool.changes))
    for name, left, right in zip(("keys", "values"), _stored(views[0]), _stored(views[1]), strict=True):
        fault = stored_fault(name, left, right, views[0])
        if fault is not None:
            return fault
    if isinstance(block.feed_forward, ExpertsFeedForward):
        view = _view(block, store, tokens, bits)
        got = mx.where(_settled(block, block.feed_forward, x, mask, view), got, expected)
    packing = 0.0
    if tokens.padded > 1:  # what is made of pads nobody reads
        is_token = mx.arange(tokens.padded)[None] < mx.array(tokens.lengths)[:, None]
        got, expected = (mx.where(is_token[..., None], array, x) for array in (got, expected))
        if bits is not None:  # all that is attended has been packed anew, up to steps as seen above
            exact = block.inner(x, mask, cache=_view(block, store, tokens, None))
            packing = _largest(mx.where(is_token[..., None], exact, x) - expected)
    worst, change, most = _largest(got - expected), _largest(expected - x), _largest(expected)
    if not worst <= _TOLERANCE[dtype.size] * change + _ROUNDING[dtype.size] * most + packing:
        return f"outputs differ by {worst:.2g} of {change:.2g}"
    return None


Stored = tuple[mx.array, ...]


def _stored(view: LayerView) -> tuple[Stored, Stored]:
    """Arrays of keys and of values."""
    pool = view.pool
    return (pool.keys[0], *pool.key_affine[0]), (pool.values[0], *pool.value_affine[0])


def stored_fault(name: str, left: Stored, right: Stored, view: LayerView) -> str | None:
    """What differs between two pools' arrays of keys or values after a write to the slots of ``view``."""
    layer = view.pool.layers[0]
    size, packing = layer.dtype.size, layer.key_packing
    if packing is None:
        worst, most = _largest(left[0] - right[0]), _largest(left[0])
        if not worst <= 2 * _ROUNDING[size] * most + _TOLERANCE[size]:
            return f"stored {name} differ by {worst:.2g}"
        return None
    slots = view.group.slots
    written = (mx.arange(left[0].shape[0])[:, None] == slots[None]).any(axis=1)[:, None, None]
    if not all(bool(((a == b) | written).all()) for a, b in zip(left, right, strict=True)):
        return f"stored {name} differ where nothing was to be written"
    pair = [Packed(*(array[slots] for array in arrays)) for arrays in (left, right)]
    one, other = (packing.unpack(packed, mx.float32) for packed in pair)
    # Both may be a step off, one more where the scale is rounded (``start/packed_check.py``), in either direction.
    scales = [_per_element(packed.scales, packing) for packed in pair]
    steps = mx.abs(scales[0]) + mx.abs(scales[1])
    rounding = 2 * (2**packing.bits - 1) * _ROUNDOFF[scale_dtype(layer.dtype)]
    allowed = steps * (1 + rounding) + 2 * _ROUNDING[size] * _largest(one) + _TOLERANCE[size]
    off = (one - other) / steps
    worst, drift = _largest((one - other) / allowed), max(_mean(off), _mean(off * mx.sign(scales[0])))
    if not (worst <= 1.0 and drift <= _MOST_DRIFT):
        return f"stored {name} differ by {worst:.2g} times what packing may cost, {drift:.2g} of two steps one way"
    return None


def _per_element(groups: mx.array, packing: VectorPacking) -> mx.array:
    """``[..., groups]`` -> ``[..., dim]`` float32."""
    return mx.repeat(groups.astype(mx.float32), packing.group_size, axis=-1)[..., : packing.dim]


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _mean(x: mx.array) -> float:
    """Size of the average."""
    return abs(float(np.array(mx.mean(x))))


def _settled(
    block: FusedBlock, half: ExpertsFeedForward, x: mx.array, mask: PagedMask, view: LayerView
) -> mx.array:
    """``[B, L, 1]`` bool: tokens whose choice of experts does not hang on rounding."""
    inner = block.inner
    h = x + inner.self_attn(inner.input_layernorm(x), mask, view)
    return half.settled(h.reshape(-1, 1, h.shape[-1])).reshape(*x.shape[:2], 1)


def _is_faster(block: FusedBlock, tools: BlockTools) -> bool:
    """Whether some counts of rows together take less time than in the unmodified block; true where that would
    unpack its weights first."""
    if block.attention.out.weight is None:
        return True
    own = usual = 0.0
    for rows in (1, 8, 32):
        own += _cost(block, block, tools, rows).in_a_step
        usual += _cost(block.inner, block, tools, rows).in_a_step
    return own < usual


def _cost(module: nn.Module, block: FusedBlock, tools: BlockTools, rows: int) -> Cost:
    """Of ``module``, which is ``block`` or its unmodified one, for ``rows`` rows."""
    x, view = _input(block, Tokens.step(rows)), _view(block, tools.store, Tokens.step(rows), tools.bits)
    if tools.recorder is not None:
        return Cost(0.0, _replayed_s([module], x, view, tools.recorder))
    inputs = [x + 0.01 * index for index in range(_BLOCKS_TOGETHER)]
    mx.eval(inputs)
    return compiled_cost([partial(module, mask=PagedMask(None), cache=view)] * len(inputs), inputs)


def _seconds(blocks: Sequence[FusedBlock], tools: BlockTools, recorder: Recorder, rows: int) -> float:
    """Of one of ``blocks``, which are alike, in a step of ``rows`` rows; infinite where it cannot run."""
    tokens = Tokens.step(rows)
    try:
        return _replayed_s(
            blocks, _input(blocks[0], tokens), _view(blocks[0], tools.store, tokens, tools.bits), recorder
        )
    except Exception as error:
        # As for products: whatever a driver says, another choice can serve.
        log.info("a choice of products at %d rows cannot be timed: %s", rows, one_line(error))
        return float("inf")


def _replayed_s(blocks: Sequence[nn.Module], x: mx.array, view: LayerView, recorder: Recorder) -> float:
    """Seconds of one of ``blocks``, in turn one after another as in a recorded step."""

    def chained() -> list[mx.array]:
        y = x
        for index in range(count):
            y = blocks[index % len(blocks)](y, mask=PagedMask(None), cache=view)
        return [y]

    count = max(len(blocks), _BLOCKS_TOGETHER)
    mx.eval(x)
    return recorder.device_seconds(chained) / count


def _input(block: FusedBlock, tokens: Tokens) -> mx.array:
    """``[B, L, D]``, small, so that what the block adds is not lost in rounding."""
    dense = block.attention.qkv
    shape = len(tokens.starts), tokens.padded, dense.shape[1]
    return (mx.random.normal(shape, key=mx.random.key(1)) * 0.1).astype(dense.dtype)


def _view(block: FusedBlock, store: PoolStore | None, tokens: Tokens, bits: int | None) -> LayerView:
    """A view of a random pool, equal for equal arguments; pads are written behind a row's positions, where
    nobody reads: in the null block, two could meet."""
    spec = block.attention.rotary
    layer = LayerShape(0, spec.kv_heads, spec.head_dim, spec.head_dim, block.attention.qkv.dtype, bits)
    starts = np.array(tokens.starts, np.int32)
    rows, ends = len(starts), starts + np.array(tokens.lengths, np.int32)
    width = _POSITIONS // _BLOCK_SIZE
    tables = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    positions: npt.NDArray[np.int32] = np.add.outer(starts, np.arange(tokens.padded, dtype=np.int32))
    slots = np.take_along_axis(tables, positions // _BLOCK_SIZE, axis=1) * _BLOCK_SIZE + positions % _BLOCK_SIZE
    pool = KVPool([layer], [rows * width + 1], _BLOCK_SIZE, head_major=False, store=store)
    count, keys = pool.keys[0].shape[0], [mx.random.key(seed) for seed in (5, 6)]
    pool.keys[0], pool.key_affine[0] = random_vectors(layer, count, spec.head_dim, layer.key_packing, keys[0])
    pool.values[0], pool.value_affine[0] = random_vectors(
        layer, count, spec.head_dim, layer.value_packing, keys[1]
    )
    mx.eval(pool.state)
    group = GroupBatch(
        None,
        mx.array(slots.reshape(-1)),
        firsts=[0] * rows,
        tables=mx.array(tables),
        bases=mx.zeros(rows, mx.int32),
    )
    batch = ForwardBatch(
        offsets=mx.array(starts),
        ends=mx.array(ends),
        starts=tokens.starts,
        lengths=tokens.lengths,
        groups=[group],
    )
    return LayerView(pool, 0, batch)


def _largest(x: mx.array) -> float:
    return float(np.array(mx.max(mx.abs(x.astype(mx.float32)))))
