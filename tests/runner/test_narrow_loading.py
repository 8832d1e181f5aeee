"""Weights that stay narrow on a CPU: which ones, how many bytes, and the same logits as from float32."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from headrace.checkpoint.model_folder import describe
from headrace.config import EngineConfig
from headrace.core.memory_plan import DeviceMemory
from headrace.runner.cpu import products as cpu_products
from headrace.runner.cpu.narrow_weights import NarrowProducts
from headrace.runner.cpu.products import NarrowChoice
from headrace.runner.estimate import estimate
from headrace.runner.loading.loader import Form, LoadedModel, Plan, candidate_forms, choose_plan, load_model
from headrace.runner.loading.weight_piece import Piece
from headrace.runner.mlx_lm_adapter import build_model
from headrace.runner.substitutions.narrow_linear import NarrowEmbedding, NarrowLinear

sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))

from checkpoint_files import CONFIG, tiny_weights
from gguf_files import QTYPE, write_llama

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="weights of a CPU")

PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
KINDS = ("packed", "plain")
REAL = Path(os.environ.get("HEADRACE_TEST_MODELS", "/nonexistent"))


def both(path: Path, products: NarrowProducts, **options: Any) -> tuple[LoadedModel, LoadedModel]:
    """Narrow and float32."""
    narrow = load_model(describe(path), device="cpu", narrow=KINDS, products=products, **options)
    return narrow, load_model(describe(path), device="cpu")


def same_logits(narrow: LoadedModel, wide: LoadedModel, share: float = 1e-3) -> bool:
    got, expected = narrow.model(PROMPT), wide.model(PROMPT)
    assert got.dtype == mx.float32
    spread = mx.max(expected) - mx.min(expected)
    return bool((mx.max(mx.abs(got - expected)) < share * spread).item())


def folder_of(path: Path, dtype: mx.Dtype, bits: int = 0, group: int = 32) -> Path:
    """A checkpoint of the tiny model, packed when ``bits`` is given."""
    model = build_model("llama", CONFIG)
    model.load_weights([(name, mx.array(value)) for name, value in tiny_weights().items()])
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, group, bits)
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    quantization = {"quantization": {"bits": bits, "group_size": group}} if bits else {}
    (path / "config.json").write_text(json.dumps({**CONFIG, **quantization}))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_sixteen_bits_stay(tmp_path: Path, products: NarrowProducts, dtype: mx.Dtype) -> None:
    narrow, wide = both(folder_of(tmp_path / "m", dtype), products)
    assert isinstance(narrow.model.lm_head, NarrowLinear)
    assert isinstance(narrow.model.model.embed_tokens, NarrowEmbedding)
    assert same_logits(narrow, wide, 1e-5)
    assert narrow.dtype == "float32"
    assert narrow.weights_bytes < 0.6 * wide.weights_bytes


def test_float32_checkpoints_are_held_as_they_are(tmp_path: Path, products: NarrowProducts) -> None:
    narrow, wide = both(folder_of(tmp_path / "m", mx.float32), products)
    assert type(narrow.model.lm_head) is nn.Linear
    assert mx.array_equal(narrow.model(PROMPT), wide.model(PROMPT)).item()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_packed_folders_stay_packed(tmp_path: Path, products: NarrowProducts, bits: int, dtype: mx.Dtype) -> None:
    narrow, wide = both(folder_of(tmp_path / "m", dtype, bits), products)
    assert narrow.packed
    assert isinstance(narrow.model.model.layers[0].self_attn.q_proj, NarrowLinear)
    # scales are used as they are in the files; plain loading rounds nothing either
    assert same_logits(narrow, wide)
    assert narrow.weights_bytes < (0.5 if dtype == mx.float32 or bits == 8 else 0.3) * wide.weights_bytes


def test_other_bits_are_widened(tmp_path: Path, products: NarrowProducts) -> None:
    narrow, wide = both(folder_of(tmp_path / "m", mx.bfloat16, 3), products)
    assert type(narrow.model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert same_logits(narrow, wide)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_types(tmp_path: Path, products: NarrowProducts, name: str) -> None:
    path = write_llama(tmp_path / "m.gguf", CONFIG, tiny_weights(), QTYPE[name])
    narrow, wide = both(path, products)
    assert type(narrow.model.model.layers[0].self_attn.q_proj) is NarrowLinear
    assert same_logits(narrow, wide)


def test_what_somebody_asks_for_goes_before(tmp_path: Path, products: NarrowProducts) -> None:
    folder = folder_of(tmp_path / "m", mx.bfloat16, 4)
    for options in ({"keep_quantized": False}, {"dtype": "float32"}, {"dtype": "bfloat16"}):
        narrow, _ = both(folder, products, **options)
        assert not isinstance(narrow.model.lm_head, NarrowLinear)
    narrow, _ = both(folder, products, keep_quantized=True)
    assert isinstance(narrow.model.lm_head, NarrowLinear)


def test_forms() -> None:
    def kinds(*arguments: Any) -> list[tuple[bool, tuple[str, ...]]]:
        return [(form.packed, form.narrow) for form in candidate_forms("cpu", *arguments)]

    assert kinds(None, None, True, KINDS) == [(True, KINDS), (False, ()), (True, ())]
    assert kinds(None, None, False, KINDS)[0] == (False, ("plain",))
    assert kinds(None, None, True, ("plain",))[0] == (False, ("plain",))
    assert kinds(None, None, False, ("packed",))[0] == (False, ())
    assert kinds(None, False, True, KINDS) == [(False, ())]
    assert all(not form.narrow for form in candidate_forms("metal", None, None, True, KINDS))


@pytest.mark.parametrize(("narrow", "budget", "chosen"), [(1005, 1100, 0), (1005, 1002, 2), (1100, 1200, 2)])
def test_little_memory_does_not_cost_the_products(narrow: int, budget: int, chosen: int) -> None:
    """Packed weights have about the same bytes for MLX's products and for ours: norms are float32 there."""

    def plan(form: Form, nbytes: int) -> Plan:
        return Plan(form, {}, [Piece({}, nbytes, dict)])

    narrow_form, wide, packed = candidate_forms("cpu", None, None, True, KINDS)
    plans = [plan(narrow_form, narrow), plan(wide, 8000), plan(packed, 1000)]
    assert choose_plan(plans, budget) is plans[chosen]


@pytest.mark.parametrize("bits", [0, 4])
def test_the_plan_counts_what_is_held(
    tmp_path: Path, products: NarrowProducts, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    folder = folder_of(tmp_path / "m", mx.bfloat16, bits)
    device = DeviceMemory("cpu", 1 << 34, 1 << 34, 1 << 34)
    config = EngineConfig(model=str(folder))
    monkeypatch.setattr(cpu_products, "choose", lambda: NarrowChoice(products, True, True, ""))
    found = estimate(describe(folder), config, device)
    narrow, _ = both(folder, products)
    assert found.fixed.weights <= narrow.weights_bytes <= 1.2 * found.fixed.weights  # last strips are filled up
    assert found.form == ("4 bits, computed in float32" if bits else "16 bits, computed in float32")
    monkeypatch.setattr(cpu_products, "choose", lambda: cpu_products.nothing("no"))
    assert estimate(describe(folder), config, device).fixed.weights > 1.8 * found.fixed.weights


@pytest.mark.slow
@pytest.mark.skipif(
    not (REAL / "SmolLM2-135M-Instruct.Q4_1.gguf").exists(), reason="HEADRACE_TEST_MODELS has no SmolLM2"
)
def test_the_demo_models_logits(products: NarrowProducts) -> None:
    narrow, wide = both(REAL / "SmolLM2-135M-Instruct.Q4_1.gguf", products)
    tokens = mx.array([[1, 504, 3575, 282, 4649, 314, 260, 2240] * 8])
    got, expected = np.array(narrow.model(tokens)), np.array(wide.model(tokens))
    assert np.abs(got - expected).max() < 1e-3 * np.ptp(expected, axis=-1).min()
    assert np.array_equal(got.argmax(-1), expected.argmax(-1))
    assert narrow.weights_bytes < 0.2 * wide.weights_bytes


def test_ggufs_own_reference(tmp_path: Path, products: NarrowProducts) -> None:
    weights = tiny_weights()
    path = write_llama(tmp_path / "m.gguf", CONFIG, weights, QTYPE["Q4_1"])
    kind = QTYPE["Q4_1"]
    through = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind) if value.ndim > 1 else value
        for name, value in weights.items()
    }
    model = build_model("llama", CONFIG)
    model.load_weights([(name, mx.array(value)) for name, value in through.items()])
    narrow, _ = both(path, products)
    assert np.allclose(np.array(narrow.model(PROMPT)), np.array(model(PROMPT)), atol=5e-4)
