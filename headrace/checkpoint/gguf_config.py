"""GGUF metadata -> the config dictionary that the same model has in a Hugging Face folder.

Only architectures whose weights ``headrace.runner.loading.gguf_loader`` knows how to name are here; any other one
is refused by name. Metadata keys are the architecture's, prefixed with its name (``llama.block_count`` …).
"""

from __future__ import annotations

import math
import struct
from typing import Any, Final

from headrace.checkpoint.gguf_file import GGUFFile, GGUFTensor
from headrace.errors import ModelFileError

# general.architecture -> (model_type, Hugging Face architecture)
ARCHITECTURES: Final = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}

# config field -> (metadata key, needed)
_FIELDS: Final = {
    "hidden_size": ("embedding_length", True),
    "num_hidden_layers": ("block_count", True),
    "intermediate_size": ("feed_forward_length", True),
    "num_attention_heads": ("attention.head_count", True),
    "num_key_value_heads": ("attention.head_count_kv", False),
    "head_dim": ("attention.key_length", False),
    "max_position_embeddings": ("context_length", True),
}
# The same for architectures with experts; that of Mixtral is llama's.
_EXPERT_FIELDS: Final = {
    "llama": {
        "num_local_experts": ("expert_count", True),
        "num_experts_per_tok": ("expert_used_count", True),
    },
    "qwen3moe": {
        "num_experts": ("expert_count", True),
        "num_experts_per_tok": ("expert_used_count", True),
        "moe_intermediate_size": ("expert_feed_forward_length", True),
    },
}
_MIXTRAL: Final = ("mixtral", "MixtralForCausalLM")
# Gemma 3's window layout is not in its metadata: every sixth layer attends to everything.
_GEMMA3_PATTERN: Final = 6
_GEMMA3_LOCAL_THETA: Final = 10_000.0
_GEMMA3_27B_LAYERS: Final = 62
_LLAMA3_ORIGINAL: Final = 8192
_LLAMA3_FACTORS: Final = (8.0, 32.0)


def config_of(file: GGUFFile) -> dict[str, Any]:
    """Configuration of a GGUF file; raises ``ModelFileError`` naming the key that is missing or unusable."""
    name = file.path.name
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelFileError(
            f"{name}: general.architecture {architecture!r} is not supported in GGUF, only {known}"
        )
    _refuse_unknown(file, architecture)
    experts = architecture == "qwen3moe" or bool(metadata.get(f"{architecture}.expert_count"))
    model_type, class_name = _MIXTRAL if architecture == "llama" and experts else ARCHITECTURES[architecture]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [class_name]}
    fields = {**_FIELDS, **_EXPERT_FIELDS[architecture]} if experts else _FIELDS
    for field, (key, needed) in fields.items():
        value = _count(file, f"{architecture}.{key}", needed)
        if value is not None:
            config[field] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    config["rms_norm_eps"] = _number(file, f"{architecture}.attention.layer_norm_rms_epsilon", None)
    config["rope_theta"] = _number(file, f"{architecture}.rope.freq_base", 10_000.0)
    config["rope_scaling"] = _rope_scaling(file, architecture)
    config["vocab_size"] = _vocab_size(file)
    config["tie_word_embeddings"] = not any(tensor.name == "output.weight" for tensor in file.tensors)
    if architecture == "gemma3":
        config.update(_gemma3(file, config))
    if architecture == "qwen2":
        config["attention_bias"] = True
    if architecture == "qwen3moe":  # every layer has experts, and shares of the chosen ones add up to one
        config.update({"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True})
    for field, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        token = metadata.get(f"tokenizer.ggml.{key}")
        if isinstance(token, int):
            config[field] = token
    return config


def _refuse_unknown(file: GGUFFile, architecture: str) -> None:
    """What an architecture also covers and mlx-lm's model of it does not compute."""
    if file.metadata.get(f"{architecture}.expert_count"):
        if architecture not in _EXPERT_FIELDS:
            known = " and ".join(_EXPERT_FIELDS)
            raise ModelFileError(
                f"{file.path.name}: {architecture}.expert_count: experts in GGUF are supported in {known} only"
            )
        scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
        if architecture == "llama" and scaling != "none":
            raise ModelFileError(
                f"{file.path.name}: llama.rope.scaling.type {scaling!r} is not supported with experts"
            )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if file.metadata.get(f"{architecture}.{key}"):
            raise ModelFileError(f"{file.path.name}: {architecture}.{key} is not supported in GGUF")
    rotary = file.metadata.get(f"{architecture}.rope.dimension_count")
    head_dim = file.metadata.get(f"{architecture}.attention.key_length")
    if isinstance(rotary, int) and isinstance(head_dim, int) and rotary != head_dim:
        raise ModelFileError(f"{file.path.name}: {architecture}.rope.dimension_count {rotary} is not {head_dim}")


def _count(file: GGUFFile, key: str, needed: bool) -> int | None:
    value = file.metadata.get(key)
    if value is None and not needed:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFileError(f"{file.path.name}: metadata {key} is {_shown(value)}, not a positive integer")
    return value


def _number(file: GGUFFile, key: str, default: float | None) -> float:
    value = file.metadata.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ModelFileError(f"{file.path.name}: metadata {key} is {_shown(value)}, not a positive number")
    # float32 values such as 9.99999974e-06 stand for the decimal one that was written into config.json
    return float(f"{value:.7g}")


def _shown(value: object) -> str:
    return "missing" if value is None else "a list" if isinstance(value, list) else repr(value)[:80]


def _rope_scaling(file: GGUFFile, architecture: str) -> dict[str, Any] | None:
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    frequencies = [tensor for tensor in file.tensors if tensor.name == "rope_freqs.weight"]
    if frequencies:
        return _llama3_scaling(file, frequencies[0])
    if kind in ("none", ""):
        return None
    factor = _number(file, f"{architecture}.rope.scaling.factor", None)
    if kind == "linear":
        return {"type": "linear", "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = _count(file, f"{architecture}.rope.scaling.original_context_length", True)
        return {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise ModelFileError(f"{file.path.name}: {architecture}.rope.scaling.type {kind!r} is not supported")


def _llama3_scaling(file: GGUFFile, tensor: GGUFTensor) -> dict[str, Any]:
    """Llama 3.x scaling is stored as one divisor per frequency; find the published factor that gives them."""
    base = _number(file, "llama.rope.freq_base", 10_000.0)
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise ModelFileError(f"{file.path.name}: tensor rope_freqs.weight is not a vector of F32")
    with file.path.open("rb") as data:
        data.seek(tensor.offset)
        stored = struct.unpack(f"<{tensor.shape[0]}f", data.read(tensor.nbytes))
    for factor in _LLAMA3_FACTORS:
        expected = [_llama3_divisor(base ** (i / len(stored)), factor) for i in range(len(stored))]
        if all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(stored, expected, strict=True)):
            return {
                "type": "llama3",
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": _LLAMA3_ORIGINAL,
            }
    raise ModelFileError(f"{file.path.name}: tensor rope_freqs.weight is of no known kind of rope scaling")


def _llama3_divisor(inverse_frequency: float, factor: float) -> float:
    """Meta's rule: long waves are divided by ``factor``, short ones not at all, with a ramp between (1 and 4)."""
    turns = _LLAMA3_ORIGINAL / (2 * math.pi * inverse_frequency)
    if turns > 4.0:
        return 1.0
    if turns < 1.0:
        return factor
    smooth = (turns - 1.0) / 3.0
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _vocab_size(file: GGUFFile) -> int:
    for tensor in file.tensors:
        if tensor.name == "token_embd.weight" and len(tensor.shape) == 2:
            return tensor.shape[0]
    raise ModelFileError(f"{file.path.name}: incomplete: tensor token_embd.weight is missing")


def _gemma3(file: GGUFFile, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3: the 27B model scales queries by its width per head, the others by the head size."""
    scalar = config["head_dim"]
    if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "sliding_window": _count(file, "gemma3.attention.sliding_window", True),
        "sliding_window_pattern": _GEMMA3_PATTERN,
        "rope_local_base_freq": _GEMMA3_LOCAL_THETA,
        "query_pre_attn_scalar": scalar,
    }
