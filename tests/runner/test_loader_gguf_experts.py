"""GGUF files with experts (qwen3moe, Mixtral), written by the ``gguf`` package: logits are the weights' own."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from headrace.checkpoint.model_folder import describe
from headrace.errors import ModelFileError
from headrace.runner.cpu.narrow_weights import NarrowProducts
from headrace.runner.loading.loader import load_model
from headrace.runner.mlx_lm_adapter import build_model
from headrace.runner.substitutions.narrow_experts import NarrowSwitchGLU

sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))

from gguf_files import QTYPE, interleaved, write_gguf

QWEN3: dict[str, Any] = dict(
    model_type="qwen3_moe", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, vocab_size=96, max_position_embeddings=512,
    rope_theta=10000.0, tie_word_embeddings=False, num_experts=8, num_experts_per_tok=3, decoder_sparse_step=1,
    mlp_only_layers=[], moe_intermediate_size=32, norm_topk_prob=True,
)  # fmt: skip
MIXTRAL: dict[str, Any] = dict(
    model_type="mixtral", hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, rms_norm_eps=1e-6, vocab_size=96, max_position_embeddings=512, rope_theta=10000.0,
    tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2,
)  # fmt: skip
# Of general.architecture.
CONFIGS = {"qwen3moe": QWEN3, "llama": MIXTRAL}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
    "mlp.switch_mlp.gate_proj": "ffn_gate_exps", "mlp.switch_mlp.up_proj": "ffn_up_exps",
    "mlp.switch_mlp.down_proj": "ffn_down_exps",
}  # fmt: skip
PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])


@cache
def weights_of(architecture: str) -> dict[str, np.ndarray]:
    mx.random.seed(0)
    config = CONFIGS[architecture]
    model = build_model(config["model_type"], config)
    return {
        name: np.array(value + 0.1 * mx.random.normal(value.shape) if value.ndim > 1 else value)
        for name, value in tree_flatten(model.parameters())
    }


def gguf_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest.replace('block_sparse_moe', 'mlp')]}.weight"
    return f"{NAMES[module]}.weight"


def stored(architecture: str) -> dict[str, np.ndarray]:
    """The weights as llama.cpp's converter stores them."""
    made = {}
    for name, value in weights_of(architecture).items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if architecture == "llama" and heads is not None:
            value = interleaved(value, MIXTRAL[heads])
        made[gguf_name(name)] = value
    return made


def file_of(path: Path, architecture: str, kind: Any, plain: str = "") -> Path:
    """Matrices in ``kind``; those with ``plain`` in their names in float32."""
    named = stored(architecture)
    wide = {name for name in named if plain and plain in name}
    return write_gguf(path, architecture, CONFIGS[architecture], named, kind, wide)


def reference(architecture: str, kind: Any) -> np.ndarray:
    """Logits of the weights as they come back from ``kind``, in float32."""
    through = {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind) if value.ndim > 1 else value
        for name, value in weights_of(architecture).items()
    }
    model = build_model(CONFIGS[architecture]["model_type"], CONFIGS[architecture])
    model.load_weights([(name, mx.array(value)) for name, value in through.items()])
    return np.array(model(PROMPT))


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_experts_of_a_file_equal_their_weights(tmp_path: Path, architecture: str, name: str) -> None:
    path = file_of(tmp_path / "m.gguf", architecture, QTYPE[name])
    expected = reference(architecture, QTYPE[name])
    plain = load_model(describe(path), device="cpu", keep_quantized=False)
    np.testing.assert_allclose(np.array(plain.model(PROMPT)), expected, atol=1e-4)
    packed = load_model(describe(path), device="cpu", keep_quantized=True)
    assert packed.packed is name.startswith("Q")
    np.testing.assert_allclose(np.array(packed.model(PROMPT).astype(mx.float32)), expected, atol=2e-3)


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="narrow weights of the CPU")
@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_0", "Q5_1"])
def test_experts_of_a_file_stay_narrow(
    tmp_path: Path, architecture: str, name: str, products: NarrowProducts
) -> None:
    path = file_of(tmp_path / "m.gguf", architecture, QTYPE[name])
    narrow = ("packed", "plain", "experts")
    loaded = load_model(describe(path), device="cpu", narrow=narrow, products=products)
    mixtures = [module for _, module in loaded.model.named_modules() if type(module) is NarrowSwitchGLU]
    assert len(mixtures) == 2
    assert "experts in float32" not in loaded.notes[-1]
    expected = reference(architecture, QTYPE[name])
    spread = expected.max() - expected.min()
    assert np.abs(np.array(loaded.model(PROMPT)) - expected).max() < 2e-3 * spread
    wide = load_model(describe(path), device="cpu", narrow=narrow[:2], products=products)
    assert "experts in float32" in wide.notes[-1]
    assert wide.weights_bytes > 1.4 * loaded.weights_bytes


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="narrow weights of the CPU")
def test_some_experts_in_a_type_that_does_not_stay_narrow(tmp_path: Path, products: NarrowProducts) -> None:
    path = file_of(tmp_path / "m.gguf", "qwen3moe", QTYPE.Q8_0, "blk.1.ffn_down_exps")
    loaded = load_model(describe(path), device="cpu", narrow=("packed", "plain", "experts"), products=products)
    kinds = [type(layer.mlp.switch_mlp) for layer in loaded.model.layers if "switch_mlp" in layer.mlp]
    assert kinds.count(NarrowSwitchGLU) == 1
    assert "experts in float32" in loaded.notes[-1]
    expected = load_model(describe(path), device="cpu", keep_quantized=False)
    got, right = np.array(loaded.model(PROMPT)), np.array(expected.model(PROMPT))
    assert np.abs(got - right).max() < 2e-3 * (right.max() - right.min())


def test_a_file_without_the_count_of_experts(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = {name: value for name, value in QWEN3.items() if name != "num_experts"}
    write_gguf(path, "qwen3moe", config, stored("qwen3moe"))
    with pytest.raises(ModelFileError, match=r"qwen3moe\.expert_count is missing"):
        describe(path)
