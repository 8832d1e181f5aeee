"""Halves of decoder blocks as one operation each (CPU): the same numbers as the operations that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from tiny_models import tiny_model

from headrace.runner.attention.dispatch import install
from headrace.runner.attention.native_attention import NativeAttention
from headrace.runner.cpu.narrow_weights import NarrowProducts
from headrace.runner.cpu.operations import CpuOperations, load_operations
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.store import CpuPoolStore
from headrace.runner.kv.view import LayerView, PagedMask
from headrace.runner.substitutions import native_block, native_norm, rotary
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.narrow_linear import NarrowLinear, substitute_narrow
from headrace.runner.substitutions.native_block import NativeBlock, substitute_native_blocks

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="operations of the CPU")

ENDS = (5, 40, 1, 17, 64, 300)
DECODE, PROMPTS = (1, 1, 1, 1, 1, 1), (5, 17, 1, 2, 40, 33)


@pytest.fixture(scope="module")
def operations() -> CpuOperations:
    loaded = load_operations()
    if loaded is None:
        pytest.skip("the native operations cannot be built here")
    return loaded


@pytest.fixture(autouse=True)
def whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other processes may make anything look slow. Attention is bound as it was when a test is over."""
    for module in (native_block, native_norm, rotary):
        monkeypatch.setattr(module, "no_slower", lambda new, old: True)
    yield
    install()


def prepared(name: str, bits: int, operations: CpuOperations, products: NarrowProducts) -> nn.Module:
    """A tiny model as the loader and the build leave it, but for its blocks."""
    model = tiny_model(name)
    for _, module in model.named_modules():  # biases and norms that count
        if type(module) is nn.RMSNorm:
            module.weight = 1.0 + 0.2 * mx.random.normal(module.weight.shape)
        elif type(module) is nn.Linear and "bias" in module:
            module.bias = mx.random.normal(module.bias.shape)
    narrowed(model, bits, operations, products)
    return model


def narrowed(model: nn.Module, bits: int, operations: CpuOperations, products: NarrowProducts) -> None:
    if bits == 16:
        model.set_dtype(mx.bfloat16)
    else:
        nn.quantize(model, 32, bits)
    substitute_narrow(model, products)
    model.apply(lambda array: array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)
    rotary.substitute_rotary(model, operations)
    native_norm.substitute_norms(model, operations)
    fuse_projections(model, (NarrowLinear,))
    install(NativeAttention(operations))


def blocks_of(model: nn.Module) -> list[NativeBlock]:
    return [module for _, module in model.named_modules() if isinstance(module, NativeBlock)]


def step(
    block: NativeBlock, module: nn.Module, store: CpuPoolStore, new: Sequence[int], window: int | None = None
) -> list[mx.array]:
    """Results of a forward of the last ``new`` positions of some rows, and the pools it leaves."""
    x, view = native_block._input(block, len(ENDS), max(new)), native_block._view(block, store, ENDS, new)
    assert block.takes(x, PagedMask(window), view)
    out = module(x, PagedMask(window), cache=view)
    mx.eval(out, *view.pool.changes)
    return [out, view.pool.keys[0], view.pool.values[0]]


@pytest.mark.parametrize("window", [None, 12])
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_results_and_pools_are_those_of_single_operations(
    operations: CpuOperations, products: NarrowProducts, name: str, bits: int, window: int | None
) -> None:
    model, store = prepared(name, bits, operations, products), CpuPoolStore(operations)
    assert substitute_native_blocks(model, operations, store).startswith("decode blocks: ")
    blocks = blocks_of(model)
    assert len(blocks) == len(model.layers)
    for block in blocks:
        for new in (DECODE, PROMPTS):
            alone = step(block, block.inner, store, new, window)
            for expected, got in zip(alone, step(block, block, store, new, window), strict=True):
                assert mx.array_equal(expected, got)


def test_a_row_does_not_see_the_others(operations: CpuOperations, products: NarrowProducts) -> None:
    model, store = prepared("qwen3", 4, operations, products), CpuPoolStore(operations)
    substitute_native_blocks(model, operations, store)
    block, ends = blocks_of(model)[0], [33] * 18 + [70]
    x = mx.broadcast_to(native_block._input(block, 1), (19, 1, 64))
    view = native_block._view(block, store, ends, [1] * 19)
    together = block(x, PagedMask(None), cache=view)
    assert not mx.array_equal(together[0], together[1])  # other contexts
    for row in (0, 7, 18):
        assert mx.array_equal(block(x[:1], PagedMask(None), cache=row_of(view, row)), together[row : row + 1])


def row_of(view: LayerView, row: int) -> LayerView:
    """The view of one of its rows alone."""
    batch, group, only = view.batch, view.group, slice(row, row + 1)
    assert group.tables is not None and group.bases is not None
    alone = replace(
        group,
        slots=group.slots[only],
        tables=group.tables[only],
        bases=group.bases[only],
        firsts=group.firsts[only],
    )
    rows = replace(
        batch,
        offsets=batch.offsets[only],
        ends=batch.ends[only],
        starts=batch.starts[only],
        lengths=batch.lengths[only],
        groups=[alone],
    )
    return LayerView(view.pool, view.layer, rows)


class OneMoreRMSNorm(nn.Module):
    """Gemma's: multiplies by its weight plus one."""

    def __init__(self, inner: nn.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = inner.weight - 1.0, inner.eps

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, 1.0 + self.weight, self.eps)


def test_norms_that_multiply_by_one_more(operations: CpuOperations, products: NarrowProducts) -> None:
    model, store = tiny_model("qwen3"), CpuPoolStore(operations)
    for layer in model.layers:
        for owner, name in ((layer, "input_layernorm"), (layer.self_attn, "q_norm"), (layer.self_attn, "k_norm")):
            owner[name].weight = 1.0 + 0.2 * mx.random.normal(owner[name].weight.shape)
            owner[name] = OneMoreRMSNorm(owner[name])
    narrowed(model, 4, operations, products)
    substitute_native_blocks(model, operations, store)
    assert len(blocks_of(model)) == len(model.layers)
    for block in blocks_of(model):
        pairs = zip(step(block, block.inner, store, DECODE), step(block, block, store, DECODE), strict=True)
        assert all(mx.array_equal(expected, got) for expected, got in pairs)


def test_strangers_go_to_the_unmodified_block(operations: CpuOperations, products: NarrowProducts) -> None:
    model, store = prepared("llama", 4, operations, products), CpuPoolStore(operations)
    tokens = mx.array([[3, 1, 4, 1, 5]])
    expected = model(tokens)
    substitute_native_blocks(model, operations, store)
    block = blocks_of(model)[0]
    assert mx.array_equal(model(tokens), expected)
    view = native_block._view(block, store, [5, 9], [1, 1])
    two = mx.zeros((2, 1, 64))
    assert block.takes(two, PagedMask(None), view)
    packed = KVPool([LayerShape(0, 2, 16, 16, mx.float32, 8)], [9], 16, head_major=True, store=store)
    assert not block.takes(two, PagedMask(None), LayerView(packed, 0, view.batch))
    assert not block.takes(two.astype(mx.bfloat16), PagedMask(None), view)
    assert not block.takes(two, mx.zeros((1, 1)), view)
    assert not block.takes(two, None, None)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "olmoe", "deepseek_v3"])
def test_other_patterns_stay(operations: CpuOperations, products: NarrowProducts, name: str) -> None:
    model = prepared(name, 8, operations, products)
    substitute_native_blocks(model, operations, CpuPoolStore(operations))
    assert not blocks_of(model)


def test_a_wrong_block_is_left_out(
    operations: CpuOperations, products: NarrowProducts, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store = prepared("llama", 4, operations, products), CpuPoolStore(operations)
    model.layers[1].self_attn.scale *= 1.5  # what the native half takes over, so it stays right …
    made = native_block._made

    def broken(block: nn.Module, functions: CpuOperations) -> NativeBlock | None:
        found = made(block, functions)
        if block is model.layers[2]:
            block.self_attn.scale *= 1.5  # … and is wrong when it changes later
        return found

    monkeypatch.setattr(native_block, "_made", broken)
    assert substitute_native_blocks(model, operations, store) == "decode blocks: 2 of 3 are native"
    assert [isinstance(layer, NativeBlock) for layer in model.layers] == [True, True, False]


def test_sizes_that_do_not_fit_are_refused(operations: CpuOperations, products: NarrowProducts) -> None:
    model, store = prepared("llama", 4, operations, products), CpuPoolStore(operations)
    substitute_native_blocks(model, operations, store)
    block = blocks_of(model)[0]
    assert block._feed_forward is not None
    with pytest.raises(ValueError, match="of its own width"):
        block._feed_forward(mx.zeros((2, 2, 48)))
    view = native_block._view(block, store, [5], [1])
    group, batch = view.group, view.batch
    table = mx.zeros((1, 1, 1, 8))
    places = [group.tables, group.bases, batch.offsets, batch.ends, group.slots, view.pool.marks[0]]
    pools = [view.pool.keys[0], view.pool.values[0]]
    x = mx.zeros((1, 1, 64))
    with pytest.raises(ValueError, match="a row for each token"):
        block._attend([x, table[..., :4], table, *places, *pools], 16, 0)
    with pytest.raises(ValueError, match="float32 pools"):
        block._attend([x, table, table, *places, pools[0].astype(mx.float16), pools[1]], 16, 0)
