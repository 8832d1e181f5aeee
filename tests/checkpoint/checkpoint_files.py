"""Tiny checkpoints for tests: a two-layer llama, whole or in shards, with a tokenizer that is only there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}


def tiny_weights(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights of ``config``'s llama under Hugging Face's names."""
    random = np.random.default_rng(seed)
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (width, width),
            f"{prefix}.self_attn.k_proj.weight": (kv, width),
            f"{prefix}.self_attn.v_proj.weight": (kv, width),
            f"{prefix}.self_attn.o_proj.weight": (width, width),
            f"{prefix}.mlp.gate_proj.weight": (inner, width),
            f"{prefix}.mlp.up_proj.weight": (inner, width),
            f"{prefix}.mlp.down_proj.weight": (width, inner),
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.post_attention_layernorm.weight": (width,),
        }
    return {name: (random.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] = CONFIG,
    weights: dict[str, np.ndarray] | None = None,
    shards: int = 1,
    **changes: Any,
) -> Path:
    """Write a model folder; ``changes`` are laid over the configuration (None removes a field)."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(config) if weights is None else weights
    written = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written))
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names = sorted(weights, key=lambda name: -weights[name].size)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: weights[name] for name in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def raw_safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with any header and any header length."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data
