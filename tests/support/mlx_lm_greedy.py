"""A program: greedy tokens of the demo model from mlx-lm, one sequence at a time.

Standard input: ``{"model": path of the GGUF file, "prompts": [[token id]], "max_tokens": n}``.
Standard output: per prompt ``[token ids, [[best logprob, second best] per token]]``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from headrace.runner.cpu import blas

blas.prepare()  # before MLX is imported

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.models.llama import Model, ModelArgs  # noqa: E402


def answer(request: dict[str, Any]) -> list[tuple[list[int], list[list[float]]]]:
    model = load(request["model"])
    results = []
    for prompt in request["prompts"]:
        cache = make_prompt_cache(model)
        fed, tokens, tops = prompt, [], []
        for _ in range(request["max_tokens"]):
            logits = model(mx.array([fed]), cache=cache)[0, -1].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits)
            best = mx.sort(mx.topk(logprobs, 2))[::-1].tolist()
            tokens.append(int(mx.argmax(logprobs).item()))
            tops.append(best)
            if tokens[-1] in END_TOKENS:
                break
            fed = tokens[-1:]
        results.append((tokens, tops))
    return results


END_TOKENS = frozenset({2})
"""``<|im_end|>`` of the demo model."""

NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load(path: str) -> Any:
    """mlx-lm's Llama with the file's weights in float32, read by MLX itself."""
    arrays, facts = mx.load(path, return_metadata=True)
    config = {
        name: facts[f"llama.{key}"].item()
        for name, key in (
            ("hidden_size", "embedding_length"),
            ("intermediate_size", "feed_forward_length"),
            ("num_hidden_layers", "block_count"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("rope_theta", "rope.freq_base"),
            ("vocab_size", "vocab_size"),
        )
    }
    model = Model(ModelArgs(model_type="llama", tie_word_embeddings=True, **config))
    weights = {"model.embed_tokens.weight": plain(arrays, "token_embd")}
    weights["model.norm.weight"] = plain(arrays, "output_norm")
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in NAMES.items():
            array = plain(arrays, f"blk.{layer}.{theirs}")
            if theirs in ("attn_q", "attn_k"):  # the file pairs neighbours for the rotation, mlx-lm pairs halves
                heads = config["num_attention_heads" if theirs == "attn_q" else "num_key_value_heads"]
                rows, columns = array.shape
                array = array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
            weights[f"model.layers.{layer}.{ours}.weight"] = array
    model.load_weights(list(weights.items()))
    model.eval()
    mx.eval(model.parameters())
    return model


def plain(arrays: dict[str, Any], name: str) -> Any:
    weight = arrays[f"{name}.weight"]
    if weight.dtype != mx.uint32:
        return weight.astype(mx.float32)
    scales, biases = (arrays[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    return mx.dequantize(weight, scales, biases, group_size=32, bits=weight.shape[1] // scales.shape[1])


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
