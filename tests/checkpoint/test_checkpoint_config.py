"""Old and new spellings of a configuration read the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.checkpoint.config import normalize, read_config, text_fields
from headrace.checkpoint.quantization import read_quantization
from headrace.errors import ModelFileError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    names = (
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "sliding_window_pattern",
    )
    return {name: config[name] for name in names if config.get(name) is not None}


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_theta": 7e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}),
    (
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ),
    (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    (
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    (
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 3},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_both_layouts_give_the_same_fields(pair: tuple[dict[str, Any], dict[str, Any]], nested: bool) -> None:
    found = []
    for fields in pair:
        config = {"model_type": "gemma3_text", **fields}
        if nested:
            config = {"model_type": "gemma3", "text_config": config}
        once = normalize(config)
        assert normalize(once) == once
        found.append(_rope(text_fields(once)))
    assert found[0] == found[1]


def test_the_newer_spelling_wins() -> None:
    config = normalize({"model_type": "llama", "rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}})
    assert config["rope_theta"] == 2.0


def test_a_pattern_is_only_read_off_periodic_layers() -> None:
    odd = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert "sliding_window_pattern" not in normalize({"model_type": "gemma3_text", "layer_types": odd})
    even = ["sliding_attention", "full_attention"] * 2
    assert normalize({"model_type": "llama", "layer_types": even}).get("sliding_window_pattern") is None


def test_end_tokens_and_tagged_floats(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "x": {"__float__": "-Infinity"}}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    config = read_config(tmp_path)
    assert config["x"] == float("-inf")
    assert config["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization": {"bits": 4, "group_size": 64, "a.b": False}}, ("mlx", 4, 64, "affine", True)),
        ({"quantization_config": {"bits": 4, "group_size": 64}}, ("mlx", 4, 64, "affine", True)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, ("mxfp4", 4, 32, "mxfp4", True)),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, ("awq", 4, 128, "affine", False)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("fp8", 8, 0, "affine", False)),
    ],
)
def test_quantization(config: dict[str, Any], expected: tuple[Any, ...] | None) -> None:
    found = read_quantization(config)
    read = None if found is None else (
        found.method, found.bits, found.group_size, found.mode, found.packed_in_file,
    )  # fmt: skip
    assert read == expected


@pytest.mark.parametrize(
    "config",
    [
        {"quantization": {"bits": "4", "group_size": 64}},
        {"quantization": {"bits": 4, "group_size": 0}},
        {"quantization": {"bits": 4, "group_size": 64, "mode": "odd"}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        {"quantization_config": {"quant_method": "awq", "bits": 3}},
    ],
)
def test_quantization_that_cannot_be_loaded_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match="quantization"):
        read_quantization(config)
