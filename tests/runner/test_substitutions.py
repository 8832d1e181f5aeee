"""Substituted modules compute what the unmodified ones do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import tiny_model

from headrace.runner.cpu.elementwise import fast_exp, fast_exp_of_any_shape, gelu_gate, silu_gate
from headrace.runner.forwards.logits_head import substitute_head
from headrace.runner.substitutions.fused_linear import FusedPart, fuse_projections
from headrace.runner.substitutions.gated_mlp import GatedMLP, substitute_gated_mlps
from headrace.runner.substitutions.rotary import TableRotary, substitute_rotary

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def test_fast_exp_is_exp() -> None:
    x = np.concatenate([np.linspace(-87, 87, 20001), np.random.default_rng(0).normal(size=20000)]).astype(
        np.float32
    )
    got = np.array(fast_exp(mx.array(x)), np.float64)
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 1e-5
    small = np.abs(x) < 4
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1)[small].max() < 6e-7


def test_fast_exp_saturates() -> None:
    assert np.isfinite(np.array(fast_exp(mx.array([1e4, -1e4, 88.0, -100.0])))).all()


MANY_SHAPES = """
import gc, psutil
import mlx.core as mx
from headrace.runner.cpu.elementwise import silu_gate

def held():
    gc.collect()
    mx.clear_cache()
    return psutil.Process().memory_info().rss - mx.get_active_memory()

before = 0
for length in range(1, 1600):
    mx.eval(silu_gate(mx.full((1, length, 16), 0.5), mx.full((1, length, 16), 2.0)))
    if length == 800:
        before = held()
print(held() - before)
"""


def test_many_shapes_cost_no_memory() -> None:
    """Traces of a compiled function are kept by MLX; those of lengths that come once must go again."""
    done = subprocess.run([sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10 * 2**20, "800 traces take more than 25 MB"


def test_many_shapes_change_no_result() -> None:
    for length in range(1, 300):
        gate, up = mx.full((1, length, 16), 0.5), mx.full((1, length, 16), 2.0)
        mx.eval(silu_gate(gate, up))
    assert mx.allclose(silu_gate(gate, up), nn.silu(gate) * up, atol=1e-6)


def test_gates_match_their_definitions() -> None:
    gate, up = mx.random.normal((64, 64)) * 6, mx.random.normal((64, 64))
    assert mx.allclose(silu_gate(gate, up), nn.silu(gate) * up, atol=1e-5)
    assert mx.allclose(gelu_gate(gate, up), nn.gelu_approx(gate) * up, atol=1e-5)


@pytest.mark.parametrize(("name", "layers"), [("llama", 3), ("qwen3", 2), ("gemma3_text", 4)])
def test_model_with_substituted_mlps_gives_the_same_logits(name: str, layers: int) -> None:
    model = tiny_model(name)
    tokens = mx.array([[1, 5, 9, 2]])
    expected = model(tokens)
    assert substitute_gated_mlps(model) == layers
    assert sum(isinstance(module, GatedMLP) for _, module in model.named_modules()) == layers
    assert mx.allclose(model(tokens), expected, atol=1e-4)


def test_another_activation_is_left_alone() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def __call__(self, x: mx.array) -> mx.array:
            return self.down_proj(mx.square(self.gate_proj(x)) * self.up_proj(x))

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [Squared()]

    assert substitute_gated_mlps(Holder()) == 0


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3_text"])
def test_selective_head_computes_the_chosen_positions(name: str) -> None:
    model = tiny_model(name)
    tokens = mx.array([[1, 5, 9, 2], [3, 3, 1, 0]])
    expected = model(tokens)
    selector, found = substitute_head(model)
    assert found
    selector.last_of([4, 2], 4)
    got = model(tokens)
    assert got.shape == (2, 1, expected.shape[-1])
    assert mx.allclose(got[0, 0], expected[0, 3], atol=1e-5) and mx.allclose(got[1, 0], expected[1, 1], atol=1e-5)
    selector.all_positions()
    assert mx.allclose(model(tokens), expected, atol=1e-5)


@pytest.mark.parametrize(("name", "groups"), [("llama", 6), ("qwen3", 4), ("gemma3_text", 8)])
@pytest.mark.parametrize("packed", [False, True])
def test_fused_projections_give_the_same_logits(name: str, groups: int, packed: bool) -> None:
    model = tiny_model(name)
    if packed:
        nn.quantize(model, group_size=32, bits=8)
    tokens = mx.array([[1, 5, 9, 2], [4, 4, 0, 7]])
    expected = model(tokens)
    size = sum(value.nbytes for _, value in nn.utils.tree_flatten(model.parameters()))
    assert fuse_projections(model) == groups
    assert mx.allclose(model(tokens), expected, atol=1e-4)
    assert sum(value.nbytes for _, value in nn.utils.tree_flatten(model.parameters())) == size
    assert fuse_projections(model) == 0


def test_fused_projections_forget_their_input() -> None:
    model = tiny_model("llama")
    fuse_projections(model)
    model(mx.array([[1, 2]]))
    parts = [module for _, module in model.named_modules() if isinstance(module, FusedPart)]
    assert parts and all(part._shared._input is None for part in parts)


def rotaries(model: nn.Module) -> list[TableRotary]:
    return [module for _, module in model.named_modules() if isinstance(module, TableRotary)]


@pytest.mark.parametrize(("name", "layers", "kinds"), [("llama", 3, 1), ("qwen3", 2, 1), ("gemma3_text", 4, 2)])
def test_rotary_tables_give_the_same_logits(name: str, layers: int, kinds: int) -> None:
    model = tiny_model(name)
    prompts = [mx.array([[1, 5, 9, 2]]), mx.array([[3, 3], [7, 1]])]
    expected = [model(tokens) for tokens in prompts]
    assert substitute_rotary(model) == layers
    assert len({id(one._tables) for one in rotaries(model)}) == kinds
    for tokens, want in zip(prompts, expected, strict=True):
        assert mx.allclose(model(tokens), want, atol=1e-5)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3, YARN])
def test_rotary_variants(scaling: dict[str, object] | None) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = initialize_rope(16, 1e4, False, scaling, 2048)

    holder = Holder()
    original = holder.rope
    assert substitute_rotary(holder) == 1
    x = mx.random.normal((3, 2, 5, 16))
    for offset in (0, 1234, mx.array([0, 7, 900]), mx.array([1, 2, 3])):
        assert mx.allclose(holder.rope(x, offset=offset), original(x, offset=offset), atol=1e-5)
    assert mx.allclose(holder.rope(x[:1], offset=5), original(x[:1], offset=5), atol=1e-5)
    half = x.astype(mx.float16)
    assert mx.array_equal(holder.rope(half, offset=2), original(half, offset=2))


def test_rotary_of_neighbours_is_left_alone() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = nn.RoPE(16, traditional=True)

    assert substitute_rotary(Holder()) == 0


@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (8192,), (2, 4097)])
def test_exponentials_of_any_shape(shape: tuple[int, ...]) -> None:
    x = -mx.abs(mx.random.normal(shape)) * 5
    got = fast_exp_of_any_shape(x)
    assert got.shape == shape and mx.allclose(got, mx.exp(x), atol=1e-6)
