"""Substituted modules compute what the unmodified ones do."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import tiny_model

from headrace.runner.cpu_math import fast_exp, gelu_gate, silu_gate
from headrace.runner.logits_head import substitute_head
from headrace.runner.substitutions.fused_linear import FusedPart, fuse_projections
from headrace.runner.substitutions.gated_mlp import GatedMLP, substitute_gated_mlps


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
