"""The small native operations of the CPU against numpy, and the modules that use them."""

from __future__ import annotations

import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma3_text
from tiny_models import tiny_model

from headrace.runner.cpu.operations import CpuOperations, load_operations
from headrace.runner.substitutions.gated_mlp import substitute_gated_mlps
from headrace.runner.substitutions.native_norm import NativeNorm, substitute_norms
from headrace.runner.substitutions.rotary import substitute_rotary

OPERATIONS = load_operations() if shutil.which("g++") else None
pytestmark = pytest.mark.skipif(OPERATIONS is None, reason="the native operations cannot be built here")


@pytest.fixture
def operations() -> CpuOperations:
    assert OPERATIONS is not None
    return OPERATIONS


def doubles(x: mx.array) -> np.ndarray:
    return np.array(x).astype(np.float64)


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 2, 64), (2, 70, 577), (700, 1, 576)])
def test_norms(operations: CpuOperations, shape: tuple[int, ...]) -> None:
    x, weight = 3 * mx.random.normal(shape), mx.random.normal(shape[-1:])
    got = np.array(operations.norm(x, weight, 1e-5))
    wide = doubles(x)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * doubles(weight)
    assert np.abs(got - expected).max() < 1e-5
    assert np.array_equal(np.array(operations.norm(x[-1:], weight, 1e-5)), got[-1:])
    turned = operations.norm(x.swapaxes(0, 1), weight, 1e-5).swapaxes(0, 1)
    assert np.array_equal(np.array(turned), got)


@pytest.mark.parametrize("size", [1, 17, 1536, 100_003])
@pytest.mark.parametrize("gelu", [False, True])
def test_gates(operations: CpuOperations, size: int, gelu: bool) -> None:
    gate, up = 4 * mx.random.normal((size,)), mx.random.normal((size,))
    gate[0] = 300.0
    x = doubles(gate)
    z = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3) if gelu else x
    with np.errstate(over="ignore"):
        expected = x * doubles(up) / (1 + np.exp(-z))
    assert np.allclose(np.array(operations.gate(gate, up, gelu)), expected, rtol=1e-5, atol=1e-6)
    assert np.isnan(np.array(operations.gate(gate * mx.nan, up, gelu))).all()


@pytest.mark.parametrize("length", [1, 9])
def test_rotations(operations: CpuOperations, length: int) -> None:
    x = mx.random.normal((3, length, 4, 20)).swapaxes(1, 2)
    cosine, sine = mx.random.normal((2, 3, 1, length, 10))
    a, b = np.split(doubles(x), 2, axis=-1)
    c, s = doubles(cosine), doubles(sine)
    expected = np.concatenate([a * c - b * s, a * s + b * c], axis=-1)
    assert np.abs(np.array(operations.rotate(x, cosine, sine)) - expected).max() < 1e-5
    reversed_order = mx.array(np.array(x)[..., ::-1].copy())[..., ::-1]
    assert np.abs(np.array(operations.rotate(reversed_order, cosine, sine)) - expected).max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
def test_a_model_says_the_same_with_them(operations: CpuOperations, name: str) -> None:
    tokens = mx.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    model = tiny_model(name)
    expected = model(tokens)
    substitute_gated_mlps(model, operations)
    substitute_rotary(model, operations)
    substitute_norms(model, operations)
    assert mx.allclose(model(tokens), expected, atol=1e-3 * float(mx.max(mx.abs(expected)).item()))


def test_norms_that_match_are_replaced(operations: CpuOperations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.runner.substitutions.native_norm.no_slower", lambda new, old: True)

    class OddRMSNorm(nn.RMSNorm):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) + 0.1

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain, self.odd, self.one_more = nn.RMSNorm(64), OddRMSNorm(64), gemma3_text.RMSNorm(64)

    holder = Holder()
    assert substitute_norms(holder, operations) == 2
    assert isinstance(holder.plain, NativeNorm) and isinstance(holder.one_more, NativeNorm)
    assert isinstance(holder.odd, OddRMSNorm)
    half = mx.random.normal((2, 64)).astype(mx.float16)
    assert mx.array_equal(holder.plain(half), holder.plain.inner(half))
    assert holder.plain.weight is holder.plain.inner.weight
