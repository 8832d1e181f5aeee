"""Loading GGUF: the folder's own logits from plain types, the blocks' exact values from quantized ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from headrace.checkpoint.gguf_file import read_metadata
from headrace.checkpoint.model_folder import describe
from headrace.errors import ModelFileError
from headrace.runner.loading.gguf_blocks import EXACT, GROUP, packed_rows
from headrace.runner.loading.loader import load_model
from headrace.runner.mlx_lm_adapter import build_model, one_sequence_cache

sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))

from checkpoint_files import CONFIG, tiny_weights
from gguf_files import QTYPE, write_gguf, write_llama

PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
# rows of a K type are multiples of 256 values
WIDE = {**CONFIG, "hidden_size": 256, "intermediate_size": 256}


def _logits(model: Any) -> np.ndarray:
    return np.array(model(PROMPT).astype(mx.float32))


def _reference(config: dict[str, Any], weights: dict[str, np.ndarray]) -> np.ndarray:
    model = build_model("llama", config)
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    return _logits(model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_file_equals_the_folder(tmp_path: Path, tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    path = write_llama(tmp_path / "m.gguf", config, tiny_weights(config))
    loaded = load_model(describe(path), device="cpu")
    assert np.array_equal(_logits(loaded.model), _reference(config, tiny_weights(config)))
    assert not loaded.packed


def _through(weights: dict[str, np.ndarray], kind: Any) -> dict[str, np.ndarray]:
    """The matrices as they come back from ``kind``, by the reference implementation."""
    return {
        name: gguf.quants.dequantize(gguf.quants.quantize(value, kind), kind) if value.ndim > 1 else value
        for name, value in weights.items()
    }


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_files_equal_their_dequantized_weights(tmp_path: Path, name: str) -> None:
    kind = QTYPE[name]
    path = write_llama(tmp_path / "m.gguf", CONFIG, tiny_weights(), kind)
    expected = _reference(CONFIG, _through(tiny_weights(), kind))
    plain = load_model(describe(path), device="cpu", keep_quantized=False)
    np.testing.assert_allclose(_logits(plain.model), expected, atol=1e-5)
    packed = load_model(describe(path), device="cpu", keep_quantized=True)
    assert packed.packed is (name in EXACT)
    np.testing.assert_allclose(_logits(packed.model), expected, atol=2e-4)


FAMILIES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    # architecture: what its configuration adds, and GGUF's names of what llama does not have
    "qwen2": ({"model_type": "qwen2"}, {}),
    "qwen3": (
        {"model_type": "qwen3", "head_dim": 16},
        {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 4,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "tie_word_embeddings": True,
        },
        {
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
    ),
}


def _family_names(extra: dict[str, str], names: list[str]) -> dict[str, str]:
    """mlx-lm's parameter path -> GGUF's name."""
    roles = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **extra,
    }
    outer = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    found = {}
    for name in names:
        module, _, part = name.rpartition(".")
        if module in outer:
            found[name] = f"{outer[module]}.{part}"
        else:
            _, _, layer, role = module.split(".", 3)
            found[name] = f"blk.{layer}.{roles[role]}.{part}"
    return found


@pytest.mark.parametrize("architecture", FAMILIES)
def test_other_families_equal_their_own_module(tmp_path: Path, architecture: str) -> None:
    changes, extra = FAMILIES[architecture]
    config = {**CONFIG, "architectures": [], **changes}
    model = build_model(config["model_type"], config)
    if config["tie_word_embeddings"]:
        model.sanitize({})
    random = np.random.default_rng(3)
    weights = {
        name: (random.standard_normal(array.shape) * 0.2).astype(np.float32)
        for name, array in tree_flatten(model.parameters())
    }
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    stored_more = 1 if architecture == "gemma3" else 0
    stored = {
        name: value + stored_more if name.endswith("norm.weight") else value for name, value in weights.items()
    }
    names = _family_names(extra, list(weights))
    path = write_gguf(
        tmp_path / "m.gguf", architecture, config, {names[name]: value for name, value in stored.items()}
    )
    loaded = load_model(describe(path), device="cpu")
    np.testing.assert_allclose(_logits(loaded.model), _logits(model), atol=1e-5)


def _random_rows(kind: str, rows: int = 3, blocks: int = 2) -> np.ndarray:
    """Random block bytes with sane float16 scales where the layout has them."""
    random = np.random.default_rng(7)
    _, block_bytes, _ = EXACT[kind]
    raw = random.integers(0, 256, (rows * blocks, block_bytes), dtype=np.uint8)
    halves = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    for place in range(halves):
        scale = (random.standard_normal(rows * blocks) * 0.1).astype(np.float16)
        raw[:, 2 * place : 2 * place + 2] = scale[:, None].view(np.uint8)
    return raw.reshape(rows, blocks * block_bytes)


@pytest.mark.parametrize("kind", EXACT)
def test_packed_blocks_hold_the_reference_values(kind: str) -> None:
    raw = _random_rows(kind)
    words, scales, biases = (mx.array(part) for part in packed_rows(kind, raw))
    found = mx.dequantize(words, scales, biases, group_size=GROUP, bits=EXACT[kind][0])
    expected = gguf.quants.dequantize(raw, QTYPE[kind])
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-5, atol=1e-5)


def test_types_without_an_exact_packing_are_packed_with_8_bits(tmp_path: Path) -> None:
    weights = tiny_weights(WIDE)
    path = tmp_path / "m.gguf"
    # the gguf package writes no K types: random Q6_K blocks with small scales instead
    random = np.random.default_rng(1)

    def blocks(value: np.ndarray, kind: Any) -> np.ndarray:
        raw = random.integers(0, 256, (value.size // 256, 210), dtype=np.uint8)
        raw[:, 208:] = np.full(len(raw), 1e-4, np.float16)[:, None].view(np.uint8)
        return raw.reshape(value.shape[0], -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.quants, "quantize", blocks)
        write_llama(path, WIDE, weights, QTYPE.Q6_K)
    plain = load_model(describe(path), device="cpu", keep_quantized=False)
    packed = load_model(describe(path), device="cpu", keep_quantized=True)
    assert packed.weights_bytes < plain.weights_bytes / 2
    scale = np.abs(_logits(plain.model)).max()
    np.testing.assert_allclose(_logits(packed.model), _logits(plain.model), atol=0.05 * scale)


def test_16_bit_devices_compute_in_16_bits(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", CONFIG, tiny_weights(), QTYPE.Q8_0)
    for device, packed in (("cuda", True), ("metal", True)):
        loaded = load_model(describe(path), device=device)  # type: ignore[arg-type]
        assert (loaded.packed, loaded.dtype) == (packed, "bfloat16")
        floats = {str(a.dtype) for _, a in tree_flatten(loaded.model.parameters()) if a.dtype != mx.uint32}
        assert floats == {"mlx.core.bfloat16"}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    weights = tiny_weights()
    del weights["model.layers.1.mlp.up_proj.weight"]
    path = write_llama(tmp_path / "m.gguf", CONFIG, weights)
    with pytest.raises(ModelFileError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        load_model(describe(path), device="cpu")


# -- real files, where they are ------------------------------------------------------------------------

REAL = Path(os.environ.get("HEADRACE_TEST_MODELS", "/nonexistent"))


def _greedy(path: Path, prompt: list[str], count: int) -> str:
    tokens: Any = read_metadata(path)["tokenizer.ggml.tokens"]
    ids = [tokens.index(piece) for piece in prompt]
    model = load_model(describe(path), device="cpu").model
    cache, step, said = one_sequence_cache(model), mx.array([ids]), []
    for _ in range(count):
        chosen = int(mx.argmax(model(step, cache=cache)[0, -1]))
        said.append(tokens[chosen])
        step = mx.array([[chosen]])
    return "".join(said)


@pytest.mark.slow
@pytest.mark.skipif(
    not (REAL / "SmolLM2-135M-Instruct.Q4_1.gguf").exists(), reason="HEADRACE_TEST_MODELS has no SmolLM2"
)
def test_smollm2_knows_the_capital_of_france() -> None:
    question = [
        "<|im_start|>",
        "user",
        "Ċ",
        "What",
        "Ġis",
        "Ġthe",
        "Ġcapital",
        "Ġof",
        "ĠFrance",
        "?",
        "<|im_end|>",
        "Ċ",
    ]
    prompt = [*question, "<|im_start|>", "ass", "istant", "Ċ"]
    text = _greedy(REAL / "SmolLM2-135M-Instruct.Q4_1.gguf", prompt, 7)
    assert text == "TheĠcapitalĠofĠFranceĠisĠParis."


@pytest.mark.slow
@pytest.mark.skipif(
    not (REAL / "gemma-3-270m-q4_k_m.gguf").exists(), reason="HEADRACE_TEST_MODELS has no Gemma 3 270M"
)
def test_gemma3_goes_on_counting() -> None:
    prompt = ["<bos>", "one", ",", "▁two", ",", "▁three", ",", "▁four", ","]
    assert _greedy(REAL / "gemma-3-270m-q4_k_m.gguf", prompt, 5) == "▁five,▁six,▁seven"
