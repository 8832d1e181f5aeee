"""Model shapes worth timing, with random weights: speed does not depend on what the weights are."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": dict(
        model_type="llama", hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, vocab_size=128256, tie_word_embeddings=True,
        rope_theta=500000.0, max_position_embeddings=131072,
    ),
    "llama-3b": dict(
        model_type="llama", hidden_size=3072, num_hidden_layers=28, intermediate_size=8192, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, vocab_size=128256, tie_word_embeddings=True,
        rope_theta=500000.0, max_position_embeddings=131072,
    ),
    "llama-8b": dict(
        model_type="llama", hidden_size=4096, num_hidden_layers=32, intermediate_size=14336,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, vocab_size=128256,
        tie_word_embeddings=False,
        rope_theta=500000.0, max_position_embeddings=131072,
    ),
    "qwen3-0.6b": dict(
        model_type="qwen3", hidden_size=1024, num_hidden_layers=28, intermediate_size=3072, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, vocab_size=151936, tie_word_embeddings=True,
        rope_theta=1000000.0, max_position_embeddings=40960,
    ),
    "qwen2.5-1.5b": dict(
        model_type="qwen2", hidden_size=1536, num_hidden_layers=28, intermediate_size=8960, num_attention_heads=12,
        num_key_value_heads=2, rms_norm_eps=1e-6, vocab_size=151936, tie_word_embeddings=True,
        rope_theta=1000000.0, max_position_embeddings=32768,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, intermediate_size=6144,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-6, vocab_size=151936,
        tie_word_embeddings=False, rope_theta=1000000.0, max_position_embeddings=40960,
        num_experts=128, num_experts_per_tok=8,
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
    ),
}  # fmt: skip


def random_model(name: str, *, bits: int = 16) -> nn.Module:
    """The named shape in bfloat16, or packed to ``bits`` (4, 8) with group size 64."""
    config = SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    weights = [(path, value) for path, value in tree_flatten(model.parameters())]
    mx.random.seed(0)
    made = []
    for path, value in weights:
        if value.ndim > 1:
            array = (mx.random.normal(value.shape, dtype=mx.bfloat16) * 0.02).astype(mx.bfloat16)
        else:
            array = mx.ones(value.shape, mx.bfloat16)
        mx.eval(array)
        made.append((path, array))
    model.update(tree_unflatten(made))
    if bits < 16:
        nn.quantize(model, group_size=64, bits=bits)
    mx.eval(model.parameters())
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))
