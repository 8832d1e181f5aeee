"""What ``headrace plan`` sets aside for activations of mixtures of experts, beside what a prompt's chunk takes."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from support.activations import activations_of

from headrace.checkpoint.model_folder import describe
from headrace.config import EngineConfig
from headrace.core.memory_plan import DeviceMemory
from headrace.runner.cpu import products as cpu_products
from headrace.runner.estimate import estimate
from headrace.runner.start import activation
from headrace.runner.substitutions import native_block

pytestmark = [
    pytest.mark.skipif(mx.default_device() != mx.cpu, reason="experts of the CPU"),
    pytest.mark.slow,
    pytest.mark.timeout(120),
]

CHUNK = 1024
COMMON = dict(
    num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6,
    vocab_size=512, max_position_embeddings=4096, rope_theta=10000.0, tie_word_embeddings=False,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "many small experts": dict(
        model_type="qwen3_moe", hidden_size=256, intermediate_size=256, moe_intermediate_size=64, num_experts=64,
        num_experts_per_tok=8, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True,
    ),
    "few large experts": dict(
        model_type="mixtral", hidden_size=256, intermediate_size=512, num_local_experts=8, num_experts_per_tok=2,
    ),
    "a shared expert": dict(
        model_type="qwen2_moe", hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_experts=16,
        num_experts_per_tok=4, shared_expert_intermediate_size=512,
    ),
}  # fmt: skip


def folder_of(path: Path, config: dict[str, Any]) -> Path:
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return path


def measured(config: EngineConfig) -> int:
    """As a start does, but of the chunk itself, and the most of some tries: MLX runs ahead by more or less."""
    measure = activations_of(config, CHUNK)
    return max(measure() for _ in range(2))


@pytest.mark.parametrize("name", MODELS)
def test_experts_take_what_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    choice = cpu_products.choose()
    if not choice.experts:
        pytest.skip(f"experts are widened here: {choice.note}")
    folder = folder_of(tmp_path / "m", {**COMMON, **MODELS[name]})
    config = EngineConfig(
        model=str(folder), max_num_seqs=1, max_model_len=CHUNK, prefill_step_size=CHUNK, max_cache_blocks=80
    )
    monkeypatch.setattr(activation, "_CHUNK_S", 1e9)
    monkeypatch.setattr(native_block, "_pays", lambda *words: True)  # timed; without them less is taken
    files, device = describe(folder), DeviceMemory("cpu", 1 << 34, 1 << 34, 1 << 34)
    for experts in (True, False):
        monkeypatch.setattr(cpu_products, "choose", lambda experts=experts: replace(choice, experts=experts))
        planned = estimate(files, config, device).fixed.activations
        found = measured(config)
        # Widened experts are planned for by the largest of what architectures make of the same sizes.
        assert found <= planned <= 1.5 * found, f"experts narrow: {experts}"
