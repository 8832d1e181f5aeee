"""Tiny random-weight models of several mlx-lm architectures."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

VOCAB = 131

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(
        hidden_size=64, num_hidden_layers=3, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, vocab_size=VOCAB, tie_word_embeddings=False,
    ),
    "llama_tied": dict(
        model_type="llama", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
        num_key_value_heads=4, rms_norm_eps=1e-5, vocab_size=VOCAB, tie_word_embeddings=True,
    ),
    "qwen3": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, vocab_size=VOCAB, max_position_embeddings=512, rope_theta=10000.0, head_dim=16,
        tie_word_embeddings=True,
    ),
    "qwen2": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-6, vocab_size=VOCAB, tie_word_embeddings=True,
    ),
    "qwen3_moe": dict(
        hidden_size=64, num_hidden_layers=3, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-6, vocab_size=VOCAB, max_position_embeddings=512, rope_theta=10000.0, head_dim=16,
        tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3, decoder_sparse_step=1,
        mlp_only_layers=[1], moe_intermediate_size=32, norm_topk_prob=True,
    ),
    "qwen2_moe": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-6, vocab_size=VOCAB, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "mixtral": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, vocab_size=VOCAB, num_local_experts=4, num_experts_per_tok=2,
    ),
    "olmoe": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, vocab_size=VOCAB, num_experts=8, num_experts_per_tok=3, tie_word_embeddings=False,
    ),
    "gpt_oss": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, num_local_experts=4, num_experts_per_tok=2, sliding_window=16,
    ),
    "deepseek_v3": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4,
        rms_norm_eps=1e-6, vocab_size=VOCAB, moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=3, first_k_dense_replace=1, moe_layer_freq=1, n_group=2, topk_group=1, kv_lora_rank=32,
        q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=512,
        rope_theta=10000.0,
    ),
    "gemma3_text": dict(
        hidden_size=64, num_hidden_layers=4, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, vocab_size=VOCAB, sliding_window=12, sliding_window_pattern=2,
        query_pre_attn_scalar=16, max_position_embeddings=512,
    ),
    "gemma2": dict(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, vocab_size=VOCAB,
    ),
}  # fmt: skip


def tiny_model(name: str, *, seed: int = 0) -> nn.Module:
    """A float32 model of the named configuration, weights spread wide so that greedy margins are clear."""
    config = {"model_type": name, **CONFIGS[name]}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    if hasattr(model, "sanitize"):
        model.sanitize({})
    parameters = {
        key: value + 0.1 * mx.random.normal(value.shape) if value.ndim > 1 else value
        for key, value in nn.utils.tree_flatten(model.parameters())
    }
    model.load_weights(list(parameters.items()))
    mx.eval(model.parameters())
    return model
