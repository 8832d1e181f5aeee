"""Loading folders: the same logits from every layout, and nothing wrong gets in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from headrace.checkpoint.model_folder import describe
from headrace.errors import ModelFileError, StartupError
from headrace.runner.loading import loader
from headrace.runner.loading.loader import Form, candidate_forms, load_model
from headrace.runner.mlx_lm_adapter import build_model

sys.path.append(str(Path(__file__).parent.parent / "checkpoint"))

from checkpoint_files import CONFIG, tiny_weights, write_checkpoint

PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


def _logits(model: nn.Module) -> np.ndarray:
    return np.array(model(PROMPT).astype(mx.float32))


def _load(folder: Path, device: Any = "cpu", **options: Any) -> loader.LoadedModel:
    return load_model(describe(folder), device=device, **options)


def _reference(config: dict[str, Any], weights: dict[str, np.ndarray]) -> np.ndarray:
    """Logits of mlx-lm's own module filled by hand."""
    model = build_model("llama", config)
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    return _logits(model)


def test_whole_and_sharded_files_load_the_same(tmp_path: Path) -> None:
    expected = _reference(CONFIG, tiny_weights())
    for shards in (1, 3):
        loaded = _load(write_checkpoint(tmp_path / str(shards), shards=shards))
        assert np.array_equal(_logits(loaded.model), expected)
        assert loaded.dtype == "float32"
        assert not loaded.packed
        assert loaded.weights_bytes == sum(value.nbytes for value in tiny_weights().values())


def test_other_weight_files_are_not_mixed_in(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=3)
    ones = {name: np.ones_like(value) for name, value in tiny_weights().items()}
    mx.save_safetensors(str(folder / "consolidated.safetensors"), {k: mx.array(v) for k, v in ones.items()})
    mx.save_safetensors(str(folder / "model.safetensors"), {k: mx.array(v) for k, v in ones.items()})
    loaded = _load(folder)
    assert np.array_equal(_logits(loaded.model), _reference(CONFIG, tiny_weights()))
    assert sum("is ignored" in note for note in loaded.notes) == 2


def test_tied_and_untied_output_weights(tmp_path: Path) -> None:
    tied = {**CONFIG, "tie_word_embeddings": True}
    expected = _reference(tied, tiny_weights(tied))
    for name, changes in (("said", {}), ("unsaid", {"tie_word_embeddings": None})):
        loaded = _load(write_checkpoint(tmp_path / name, tied, **changes))
        assert np.array_equal(_logits(loaded.model), expected)
    unsaid = write_checkpoint(tmp_path / "own", tie_word_embeddings=None)
    assert np.array_equal(_logits(_load(unsaid).model), _reference(CONFIG, tiny_weights()))
    with pytest.raises(ModelFileError, match=r"tensor lm_head\.weight is missing"):
        _load(write_checkpoint(tmp_path / "none", tied, tie_word_embeddings=False))


@pytest.mark.parametrize("tied", [True, False, None])
def test_a_bare_decoder_without_an_output_matrix(tmp_path: Path, tied: bool | None) -> None:
    """As checkpoints of embedding models are; the hidden states are what counts."""
    config = {**CONFIG, "tie_word_embeddings": True}
    weights = tiny_weights(config)
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    loaded = _load(write_checkpoint(tmp_path / "m", config, bare, tie_word_embeddings=tied))
    assert np.array_equal(_logits(loaded.model), _reference(config, weights))


def test_rope_settings_of_transformers_5_are_used(tmp_path: Path) -> None:
    expected = _reference({**CONFIG, "rope_theta": 77.0}, tiny_weights())
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_theta": None}
    old = {"rope_theta": 77.0}
    for name, changes in (("new", new), ("old", old)):
        assert np.array_equal(_logits(_load(write_checkpoint(tmp_path / name, **changes)).model), expected)
    assert not np.array_equal(expected, _reference(CONFIG, tiny_weights()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 41}, r"model\.safetensors: tensor lm_head\.weight .*vocab_size 41"),
        ({"num_hidden_layers": 3}, r"config\.json: num_hidden_layers asks for tensor model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"config\.json: num_hidden_layers gives 1 layers"),
        ({"intermediate_size": 97}, r"intermediate_size 97"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight has shape \(32, 64\)"),
        ({"hidden_size": None}, r"config\.json: missing 'hidden_size'"),
    ],
)
def test_configuration_and_weights_that_disagree(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        _load(write_checkpoint(tmp_path / "m", **changes))
    assert "\n" not in str(caught.value)


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["model.layers.1.mlp.surprise.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(ModelFileError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        _load(write_checkpoint(tmp_path / "a", weights=weights))
    weights = tiny_weights() | {"extra.weight": np.zeros(3, np.float32)}
    with pytest.raises(ModelFileError, match=r"model\.safetensors: tensor extra\.weight has no place"):
        _load(write_checkpoint(tmp_path / "b", weights=weights))


def test_saved_rotary_frequencies_are_left_out(tmp_path: Path) -> None:
    weights = tiny_weights() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    _load(write_checkpoint(tmp_path / "m", weights=weights))


# -- dtypes and packing --------------------------------------------------------------------------------


def _packed_folder(folder: Path, bits: int = 4, mode: str = "affine", overrides: bool = False) -> Path:
    """A checkpoint packed by MLX, as mlx-lm's convert writes it; with overrides one layer has 8 bits, one none."""
    model = build_model("llama", CONFIG)
    model.load_weights([(name, mx.array(value).astype(mx.bfloat16)) for name, value in tiny_weights().items()])
    group_size = 32
    odd = {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 32}, "model.layers.1.mlp.up_proj": False}

    def choose(path: str, module: nn.Module) -> Any:
        return odd.get(path, hasattr(module, "to_quantized")) if overrides else hasattr(module, "to_quantized")

    nn.quantize(model, group_size, bits, mode=mode, class_predicate=choose)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    quantization = {"bits": bits, "group_size": group_size, "mode": mode, **(odd if overrides else {})}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization": quantization}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_packed_weights_kept_and_dequantized_agree(tmp_path: Path, mode: str) -> None:
    folder = _packed_folder(tmp_path / "m", mode=mode, overrides=mode == "affine")
    kept = _load(folder, keep_quantized=True, dtype="float32")
    plain = _load(folder, keep_quantized=False, dtype="float32")
    assert kept.packed and not plain.packed
    assert kept.weights_bytes < plain.weights_bytes / 3
    assert plain.dtype == "float32"
    np.testing.assert_allclose(_logits(kept.model), _logits(plain.model), atol=2e-4)


def test_a_packed_checkpoint_is_near_the_plain_one(tmp_path: Path) -> None:
    plain = _logits(_load(write_checkpoint(tmp_path / "p")).model)
    packed = _logits(_load(_packed_folder(tmp_path / "q", bits=8)).model)
    assert np.abs(packed - plain).max() < 0.1 * np.abs(plain).max()


def test_a_wrong_width_of_packed_weights_is_named(tmp_path: Path) -> None:
    folder = _packed_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    with pytest.raises(ModelFileError, match=r"mlp\.down_proj\.weight: 12 words"):
        _load(folder, keep_quantized=True)


def test_forms_by_device_and_wish() -> None:
    def names(*args: Any) -> list[tuple[bool, str]]:
        return [(form.packed, str(form.dtype)) for form in candidate_forms(*args)]

    f16, f32 = mx.float16, mx.float32
    assert names("metal", None, None, True) == [(True, "None")]
    assert names("cuda", None, None, True) == [(False, "None"), (True, "None")]
    assert names("cpu", None, None, True) == [(False, str(f32)), (True, "None")]
    assert names("cpu", None, None, False) == [(False, str(f32)), (False, "None")]
    assert names("cpu", f16, None, False) == [(False, str(f16))]
    assert names("metal", f16, False, True) == [(False, str(f16))]
    assert names("cuda", None, True, True) == [(True, "None")]


def test_memory_decides_between_forms(tmp_path: Path) -> None:
    folder = _packed_folder(tmp_path / "m")
    stored = describe(folder).weights_bytes
    assert not _load(folder, memory_budget_bytes=100 * stored).packed
    assert _load(folder, memory_budget_bytes=2 * stored).packed
    with pytest.raises(StartupError, match="the weights take"):
        _load(folder, memory_budget_bytes=stored // 2)
    with pytest.raises(StartupError, match="the weights take"):
        _load(folder, memory_budget_bytes=2 * stored, keep_quantized=False, dtype="float32")


def test_dtypes(tmp_path: Path) -> None:
    weights = {name: value.astype(np.float16) for name, value in tiny_weights().items()}
    folder = write_checkpoint(tmp_path / "m", weights=weights)
    for device, dtype, expected in (
        ("cpu", "auto", "float32"),
        ("metal", "auto", "float16"),
        ("cuda", "auto", "float16"),
        ("cpu", "bfloat16", "bfloat16"),
    ):
        loaded = _load(folder, device=device, dtype=dtype)
        assert loaded.dtype == expected
        assert {str(array.dtype) for _, array in tree_flatten(loaded.model.parameters())} == {
            f"mlx.core.{expected}"
        }
    with pytest.raises(StartupError, match="'float8' is not one of"):
        _load(folder, dtype="float8")


def test_progress_rises_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 10_000)
    seen: list[float] = []
    _load(write_checkpoint(tmp_path / "m"), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    assert len(seen) > 5


def test_dequantizing_needs_little_beyond_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK_BYTES", 1 << 16)
    folder = _packed_folder(tmp_path / "m")
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = _load(folder, dtype="float32")
    assert mx.get_peak_memory() - before < loaded.weights_bytes + (1 << 18)


# -- Hugging Face packings -----------------------------------------------------------------------------


def _awq(weight: np.ndarray, group_size: int) -> dict[str, np.ndarray]:
    """AutoAWQ's gemm layout of [out, in]: nibbles of eight columns of [in, out] in its own order."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    low, high = groups.min(-1), groups.max(-1)
    scales = ((high - low) / 15).astype(np.float16).astype(np.float32)
    zeros = np.clip(np.round(-low / scales), 0, 15)
    quants = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], 0, 15).reshape(weight.shape)

    def pack(values: np.ndarray) -> np.ndarray:
        columns = values.reshape(values.shape[0], -1, 8).astype(np.uint32)
        packed = np.zeros(columns.shape[:2], np.uint32)
        for place, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            packed |= columns[:, :, column] << np.uint32(4 * place)
        return packed.view(np.int32)

    return {
        "qweight": pack(quants.T),
        "qzeros": pack(zeros.T),
        "scales": scales.T.astype(np.float16),
        "plain": ((quants.reshape(groups.shape) - zeros[..., None]) * scales[..., None]).reshape(weight.shape),
    }


def test_awq_checkpoints_are_repacked(tmp_path: Path) -> None:
    weights, plain = {}, {}
    for name, value in tiny_weights().items():
        if "_proj" not in name:
            weights[name] = plain[name] = value
            continue
        parts = _awq(value, 32)
        plain[name] = parts.pop("plain").astype(np.float32)
        module = name.removesuffix(".weight")
        weights |= {f"{module}.{part}": np.ascontiguousarray(array) for part, array in parts.items()}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    folder = write_checkpoint(tmp_path / "m", weights=weights, quantization_config=settings)
    expected = _reference(CONFIG, plain)
    for keep in (False, True):
        loaded = _load(folder, keep_quantized=keep, dtype="float32")
        assert loaded.packed is keep
        np.testing.assert_allclose(_logits(loaded.model), expected, atol=2e-3)


def test_form_is_plain_data() -> None:
    assert Form(True, None) == Form(True, None)
