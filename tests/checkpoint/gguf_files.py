"""Small GGUF files for tests, written by the ``gguf`` package."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import gguf
import numpy as np

QTYPE = gguf.GGMLQuantizationType


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter stores them: [heads, 2, dim/2] -> [heads, dim/2, 2]."""
    split = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_llama(
    path: Path, config: dict[str, Any], weights: dict[str, np.ndarray], qtype: Any = QTYPE.F32
) -> Path:
    """The llama of ``checkpoint_files`` as GGUF, matrices in ``qtype``."""
    stored = dict(weights)
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            stored[name] = interleaved(weight, config["num_attention_heads"])
        if name.endswith("k_proj.weight"):
            stored[name] = interleaved(weight, config["num_key_value_heads"])
    return write_gguf(path, "llama", config, {_gguf_name(name): weight for name, weight in stored.items()}, qtype)


def write_gguf(
    path: Path,
    architecture: str,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    qtype: Any = QTYPE.F32,
    wide: Collection[str] = (),
) -> Path:
    """A file with ``weights`` under GGUF's names, as they are; matrices in ``qtype``, but for ``wide`` ones."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    experts = config.get("num_experts", config.get("num_local_experts"))
    if experts is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config["vocab_size"])])
    for name, weight in weights.items():
        kind = qtype if weight.ndim > 1 and name not in wide else QTYPE.F32
        data = weight if kind is QTYPE.F32 else gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_name(name: str) -> str:
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    module = name.removesuffix(".weight")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{table[rest]}.weight"
    return f"{table[module]}.weight"
