"""Model shapes worth timing, as mlx-lm's configurations; plain data, so that other frameworks can use them."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": dict(
        model_type="llama", hidden_size=2048, num_hidden_layers=16, intermediate_size=8192, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, vocab_size=128256, tie_word_embeddings=True,
        rope_theta=500000.0, max_position_embeddings=131072,
    ),
    "llama-8b": dict(
        model_type="llama", hidden_size=4096, num_hidden_layers=32, intermediate_size=14336,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, vocab_size=128256,
        tie_word_embeddings=False,
        rope_theta=500000.0, max_position_embeddings=131072,
    ),
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, intermediate_size=6144,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-6, vocab_size=151936,
        tie_word_embeddings=False, rope_theta=1000000.0, max_position_embeddings=40960,
        num_experts=128, num_experts_per_tok=8,
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
    ),
    "llama-3b": dict(
        model_type="llama", hidden_size=3072, num_hidden_layers=28, intermediate_size=8192, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, vocab_size=128256, tie_word_embeddings=True,
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
    # To try the scripts themselves, on any machine.
    "tiny": dict(
        model_type="llama", hidden_size=128, num_hidden_layers=2, intermediate_size=256, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, rms_norm_eps=1e-5, vocab_size=512, tie_word_embeddings=True,
        rope_theta=10000.0, max_position_embeddings=32768,
    ),
    "tiny-moe": dict(
        model_type="qwen3_moe", hidden_size=128, num_hidden_layers=2, intermediate_size=256,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, vocab_size=512,
        tie_word_embeddings=False, rope_theta=10000.0, max_position_embeddings=32768,
        num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=64, norm_topk_prob=True,
    ),
    # Experts that a CPU has room and time for.
    "small-moe": dict(
        model_type="qwen3_moe", hidden_size=512, num_hidden_layers=6, intermediate_size=1024,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, vocab_size=4096,
        tie_word_embeddings=False, rope_theta=10000.0, max_position_embeddings=32768,
        num_experts=64, num_experts_per_tok=8,
        decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=256, norm_topk_prob=True,
    ),
}  # fmt: skip

# Three layers of it, that a machine holds whose experts are float32.
SHAPES["qwen3-30b-a3b-3-layers"] = {**SHAPES["qwen3-30b-a3b"], "num_hidden_layers": 3, "vocab_size": 8192}


def is_dense(name: str) -> bool:
    """Whether every weight takes part in every step."""
    return "num_experts" not in SHAPES[name]
