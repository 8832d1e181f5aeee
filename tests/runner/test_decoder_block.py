"""Fused decoder blocks give what the unmodified model gives; forwards that are not theirs reach the old block."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope

sys.path.insert(0, str(Path(__file__).parent))

from paged_driver import Driver, make_runner, reference_tokens
from tiny_models import CONFIGS, VOCAB, tiny_model

from headrace.params import SamplingParams
from headrace.runner.attention.dispatch import install
from headrace.runner.attention.rotate_store import RotarySpec
from headrace.runner.kv.view import LayerView
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.products.choice import MEASURED_ROWS, SmallRowsKernel
from headrace.runner.products.small_rows import KINDS, Product, Products, plain_product
from headrace.runner.substitutions.block_check import BlockTools, compare, substitute_decoder_blocks
from headrace.runner.substitutions.decoder_block import FusedBlock, rotary_spec
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.moe_decode import Experts, ExpertsChoice

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class FunctionalRotate:
    """What ``RotateAndStore`` does, by MLX's operations and functional writes; counts its calls, and of those the
    ones of prompts."""

    def __init__(self, *, error: float = 0.0) -> None:
        self.calls = self.prompts = 0
        self._error = error

    def supports(self, spec: RotarySpec, view: LayerView) -> bool:
        return True

    def __call__(self, qkv: mx.array, view: LayerView, spec: RotarySpec) -> mx.array:
        rows = view.batch.offsets.shape[0]
        self.calls += 1
        self.prompts += qkv.shape[0] > rows
        heads = qkv.reshape(rows, qkv.shape[0] // rows, -1, spec.head_dim).swapaxes(1, 2)
        queries, keys, values = mx.split(heads, [spec.heads, spec.heads + spec.kv_heads], axis=1)
        if spec.q_norm is not None:
            queries = mx.fast.rms_norm(queries, spec.q_norm, spec.eps)
            keys = mx.fast.rms_norm(keys, spec.k_norm, spec.eps)
        view.update_and_fetch(rotate(keys, view, spec), values + self._error)
        return rotate(queries, view, spec)


def rotate(x: mx.array, view: LayerView, spec: RotarySpec) -> mx.array:
    positions = (view.batch.offsets[:, None] + mx.arange(x.shape[2])).astype(mx.float32)
    angles = (positions * spec.position_scale)[:, None, :, None] * spec.inv_freq
    cosine, sine = mx.cos(angles), mx.sin(angles)
    turned, rest = x[..., : spec.rotated_dims].astype(mx.float32), x[..., spec.rotated_dims :]
    half = spec.rotated_dims // 2
    one, two = (
        (turned[..., ::2], turned[..., 1::2]) if spec.traditional else (turned[..., :half], turned[..., half:])
    )
    pair = one * cosine - two * sine, one * sine + two * cosine
    whole = mx.stack(pair, axis=-1).flatten(-2) if spec.traditional else mx.concatenate(pair, axis=-1)
    return mx.concatenate([whole.astype(x.dtype), rest], axis=-1)


@pytest.fixture(autouse=True)
def _dispatcher() -> None:
    install(None)


def tools(rotate: FunctionalRotate | None = None, bits: int | None = None) -> BlockTools:
    rotate = rotate or FunctionalRotate()
    products, experts = SmallRowsKernel(plain_product), ExpertsChoice()
    return BlockTools(products, rotate, None, experts, timed=False, bits=bits, prompt_kinds=(mx.float32, *KINDS))


def fused_blocks(model: nn.Module) -> list[FusedBlock]:
    return [module for _, module in model.named_modules() if isinstance(module, FusedBlock)]


def model_with(name: str, **changes: Any) -> nn.Module:
    config = {"model_type": name, **CONFIGS[name], **changes}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights(
        [
            (key, value + 0.1 * mx.random.normal(value.shape))
            for key, value in nn.utils.tree_flatten(model.parameters())
        ]
    )
    mx.eval(model.parameters())
    return model


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama_tied", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32, "rope_traditional": True}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    (
        "llama",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9},
    ),
]


@pytest.mark.parametrize(("name", "changes"), MODELS, ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_are_those_of_the_unmodified_model(name: str, changes: dict[str, Any], compiled: bool) -> None:
    if compiled and changes:
        pytest.skip("one of each architecture is enough")
    model = model_with(name, **changes)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6], [7]]
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]
    fuse_projections(model)
    used = FunctionalRotate()
    count, note = substitute_decoder_blocks(model, tools(used))
    assert count == len(fused_blocks(model)) == CONFIGS[name]["num_hidden_layers"], note
    used.calls = used.prompts = 0
    runner, layout = make_runner(
        model, vocab_size=VOCAB, head_major=False, options=RunnerOptions(compile=compiled)
    )
    driver = Driver(runner, layout, 400)
    for prompt in prompts:
        driver.add(prompt, GREEDY)
    assert driver.run(8) == expected
    assert used.calls > used.prompts > 0


class WrongPrompts(FunctionalRotate):
    """Right for decode steps; of prompts the last position's query is another one's."""

    def __call__(self, qkv: mx.array, view: LayerView, spec: RotarySpec) -> mx.array:
        queries = super().__call__(qkv, view, spec)
        return queries if queries.shape[2] == 1 else mx.roll(queries, 1, axis=2)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_wrong_prompts_go_to_the_unmodified_block(name: str) -> None:
    model = model_with(name)
    fuse_projections(model)
    used = WrongPrompts()
    count, note = substitute_decoder_blocks(model, tools(used))
    assert count == 3 and "prompts: fused 0; outputs differ" in note
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = reference_tokens(model, prompt, 6)
    used.prompts = 0
    runner, layout = make_runner(model, vocab_size=VOCAB, head_major=False)
    driver = Driver(runner, layout, 400)
    driver.add(prompt, GREEDY)
    assert driver.run(8) == [expected] and used.prompts == 0


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize(("dtype", "fused"), [(mx.float32, 0), (mx.bfloat16, 2)], ids=str)
def test_prompts_of_16_bits_are_fused(dtype: mx.Dtype, fused: int, bits: int | None) -> None:
    model = model_with("qwen3")
    model.set_dtype(dtype)
    fuse_projections(model)
    count, note = substitute_decoder_blocks(model, replace(tools(bits=bits), prompt_kinds=KINDS))
    assert count == 2 and f"prompts: fused {fused}" in note and (fused > 0 or "float32" in note)
    assert [block.prompts for block in fused_blocks(model)] == [fused > 0] * 2


def test_other_forwards_of_several_tokens_go_to_the_unmodified_block() -> None:
    model = model_with("llama")
    fuse_projections(model)
    used = FunctionalRotate()
    substitute_decoder_blocks(model, tools(used))
    used.calls = 0
    tokens = mx.array([[3, 1, 4, 1, 5]])
    alone = model(tokens)
    cached = model(tokens, cache=make_prompt_cache(model))
    assert used.calls == 0 and np.allclose(alone, cached, atol=1e-4)


class PlainExperts:
    """What ``CudaExperts`` does, by MLX's operations; counts its calls."""

    def __init__(self, *, error: float = 0.0) -> None:
        self.calls = 0
        self._error = error

    def __call__(self, h: mx.array, experts: Experts, products: Products) -> mx.array:
        self.calls += 1
        shares = mx.softmax(products(h, Product(experts.router, experts.norm)).astype(mx.float32), axis=-1)
        chosen = mx.argsort(-shares, axis=-1)[:, : experts.choices]
        weights = mx.take_along_axis(shares, chosen, axis=-1)
        if experts.normalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        x = mx.fast.rms_norm(h, experts.norm.weight, experts.norm.eps)[:, 0]
        gate, up = (mx.einsum("bd,bcfd->bcf", x, matrices[chosen]) for matrices in (experts.gate, experts.up))
        parts = mx.einsum("bcf,bcdf->bcd", nn.silu(gate) * up, experts.down[chosen])
        total = (parts.astype(mx.float32) * weights[..., None]).sum(axis=1) * (1 + self._error)
        return (h.astype(mx.float32) + total[:, None]).astype(h.dtype)


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_experts_are_checked(error: float) -> None:
    """Rows whose choice hangs on rounding are left out of the comparison, not the others."""
    model = model_with("qwen3_moe")
    fuse_projections(model)
    experts = PlainExperts(error=error)
    choice = ExpertsChoice(lambda: experts, dtypes=[mx.float32], timed=False)
    tools = BlockTools(SmallRowsKernel(plain_product), FunctionalRotate(), None, choice, timed=False)
    assert substitute_decoder_blocks(model, tools)[0] == 3
    assert experts.calls > 0
    right = f"kernel for {len(MEASURED_ROWS)} of {len(MEASURED_ROWS)}" in choice.note()
    assert right == (error == 0.0) and ("differs by" in choice.note()) == (error > 0)
    experts.calls = 0
    assert [compare(block, None, rows=12) for block in fused_blocks(model)] == [None] * 3
    assert experts.calls == (2 if right else 0)


def test_weights_exist_once() -> None:
    model = tiny_model("llama")
    size = sum(value.nbytes for _, value in nn.utils.tree_flatten(model.parameters()))
    fuse_projections(model)
    substitute_decoder_blocks(model, tools())
    assert len(fused_blocks(model)) == 3
    assert sum(value.nbytes for _, value in nn.utils.tree_flatten(model.parameters())) == size


def test_a_wrong_block_is_not_used() -> None:
    model = tiny_model("llama")
    fuse_projections(model)
    count, note = substitute_decoder_blocks(model, tools(FunctionalRotate(error=0.1)))
    assert count == 0 and not fused_blocks(model)
    assert "fused 0 of 3" in note and "stored values differ" in note


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_over_packed_pools_are_checked(bits: int, dtype: mx.Dtype) -> None:
    model = model_with("qwen3")
    model.set_dtype(dtype)
    fuse_projections(model)
    count, note = substitute_decoder_blocks(model, tools(bits=bits))
    assert count == CONFIGS["qwen3"]["num_hidden_layers"], note
    assert {compare(block, None, rows=40, bits=bits) for block in fused_blocks(model)} == {None}


class WrongPacking(FunctionalRotate):
    """Packs as it should, then changes what ``fault`` says."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self._fault = fault

    def __call__(self, qkv: mx.array, view: LayerView, spec: RotarySpec) -> mx.array:
        queries, pool, slots = super().__call__(qkv, view, spec), view.pool, view.group.slots
        if pool.layers[0].bits is None:
            return queries
        scales, biases = pool.value_affine[view.layer]
        if self._fault == "another slot":
            slot = next(slot for slot in range(len(scales)) if slot not in slots.tolist())
            biases[slot] = biases[slot] + 1
        elif self._fault == "rounded down":  # half a step of the code
            biases[slots] = biases[slots] - 0.5 * scales[slots]
        elif self._fault == "order of codes":
            codes = pool.values[view.layer]
            codes[slots] = codes[slots][..., ::-1]
        return queries


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("another slot", "where nothing was to be written"),
        ("rounded down", "of two steps one way"),
        ("order of codes", "times what packing may cost"),
    ],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_wrong_packing_is_not_used(fault: str, told: str, bits: int) -> None:
    model = model_with("llama")
    fuse_projections(model)
    count, note = substitute_decoder_blocks(model, tools(WrongPacking(fault), bits))
    assert count == 0 and "stored values differ" in note and told in note


def test_a_wrong_product_is_not_used() -> None:
    def wrong(x: mx.array, product: Product) -> mx.array:
        y = plain_product(x, product)
        y[..., -1] = 0
        return y

    model = tiny_model("llama")
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    products = SmallRowsKernel(wrong)
    substitute_decoder_blocks(model, BlockTools(products, FunctionalRotate(), None, ExpertsChoice(), timed=False))
    assert "kernel for 0 of" in products.note() and "differs by" in products.note()


@pytest.mark.parametrize("name", ["gemma3_text", "gemma2"])
def test_other_patterns_are_left_alone(name: str) -> None:
    model = tiny_model(name)
    fuse_projections(model)
    assert substitute_decoder_blocks(model, tools())[0] == 0


def test_an_unknown_rotary_embedding_is_left_alone() -> None:
    model = model_with("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    fuse_projections(model)
    assert substitute_decoder_blocks(model, tools())[0] == 0


def test_a_scaled_residual_is_noticed() -> None:
    """A block with the pattern's parts that computes something else is found by the comparison."""
    model = tiny_model("llama")
    kind = type(model.model.layers[1])

    class Halved(kind):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return x + (super().__call__(x, mask, cache) - x) * 0.5

    model.model.layers[1].__class__ = Halved
    fuse_projections(model)
    count, note = substitute_decoder_blocks(model, tools())
    assert count == 2 and "outputs differ" in note
    assert isinstance(model.model.layers[1], Halved)


@pytest.mark.parametrize("scaling", [None, LLAMA3, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("traditional", [False, True])
def test_rotary_spec_is_what_the_module_does(scaling: dict[str, Any] | None, traditional: bool) -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    attention.rope = initialize_rope(16, 5e5, traditional, scaling, 2048)
    spec = rotary_spec(attention)
    assert spec is not None and (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 16)
    x = mx.random.normal((3, 4, 1, 16))
    offsets = mx.array([0, 7, 4000])

    class View:
        class batch:
            pass

    View.batch.offsets = offsets  # type: ignore[attr-defined]
    assert np.allclose(rotate(x, View, spec), attention.rope(x, offset=offsets), atol=2e-3)  # type: ignore[arg-type]


def test_compare_sees_many_rows() -> None:
    model = tiny_model("qwen3")
    fuse_projections(model)
    substitute_decoder_blocks(model, tools())
    for block in fused_blocks(model):
        assert compare(block, None, rows=40) is None
