"""config.json: reading it, and one spelling for what checkpoints disagree on.

transformers 5 moved rope settings into ``rope_parameters`` (one dictionary, or one per layer type) while most of
mlx-lm's model files read ``rope_theta``, ``rope_scaling``, ``rope_local_base_freq`` and fall back to defaults:
without this, such a checkpoint loads and answers wrongly. ``rope_parameters`` itself stays, some model files read
it. The same is done inside ``text_config``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headrace.errors import ModelFileError

Config = dict[str, Any]

# Model files that read ``sliding_window_pattern`` as a number (transformers 5 writes ``layer_types`` alone).
_PATTERN_TYPES: Final = ("gemma3", "gemma3_text", "cohere2")

_TAGGED_FLOATS: Final = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json_object(path: Path) -> Config:
    """The JSON object in ``path``; raises ``ModelFileError`` naming the file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFileError(f"{path.name}: missing from the model folder") from None
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path.name}: not JSON") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path.name}: not a JSON object")
    return content


def read_config(folder: Path) -> Config:
    """config.json of a folder, normalised, with the end tokens of generation_config.json where that has them."""
    config = _untag(read_json_object(folder / "config.json"))
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ModelFileError("config.json: model_type is missing")
    generation = folder / "generation_config.json"
    if generation.exists():
        end_tokens = read_json_object(generation).get("eos_token_id")
        if end_tokens:
            config["eos_token_id"] = end_tokens
    return normalize(config)


def _untag(value: Any) -> Any:
    """transformers writes infinities as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        if len(value) == 1 and value.get("__float__") in _TAGGED_FLOATS:
            return _TAGGED_FLOATS[value["__float__"]]
        return {key: _untag(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_untag(item) for item in value]
    return value


def normalize(config: Mapping[str, Any]) -> Config:
    """A copy of ``config`` in which old and new layouts read the same (idempotent)."""
    result = _normalize_level(dict(config), str(config.get("model_type", "")))
    text = result.get("text_config")
    if isinstance(text, dict):
        result["text_config"] = _normalize_level(
            dict(text), str(text.get("model_type") or config.get("model_type"))
        )
        if "quantization_config" not in result and "quantization_config" in text:
            result["quantization_config"] = text["quantization_config"]
    return result


def _normalize_level(config: Config, model_type: str) -> Config:
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and rope:
        nested = {kind: value for kind, value in rope.items() if isinstance(value, dict)}
        main = nested.get("full_attention") if nested else rope
        if isinstance(main, dict):
            _spread_rope(config, main)
        local = nested.get("sliding_attention")
        if isinstance(local, dict) and "rope_theta" in local:
            config["rope_local_base_freq"] = local["rope_theta"]
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict):
        config["rope_scaling"] = _both_type_keys(scaling)
    layer_types = config.get("layer_types")
    if model_type in _PATTERN_TYPES and isinstance(layer_types, list):
        period = _pattern(layer_types)
        if period is not None:
            config["sliding_window_pattern"] = period
    return config


def _spread_rope(config: Config, rope: Config) -> None:
    """Copy one rope dictionary to the flat fields; where both exist, ``rope_parameters`` is the newer and wins."""
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        config.setdefault("rope_scaling", None)
        return
    config["rope_scaling"] = {
        key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")
    }


def _both_type_keys(scaling: Config) -> Config:
    """mlx-lm's model files look for ``type`` or for ``rope_type``; give them both."""
    kind = scaling.get("rope_type", scaling.get("type"))
    return scaling if kind is None else {**scaling, "rope_type": kind, "type": kind}


def _pattern(layer_types: list[Any]) -> int | None:
    """n when every n-th layer attends to everything and all others to a window, else None."""
    if "full_attention" not in layer_types:
        return len(layer_types) + 1 if layer_types else None
    period = layer_types.index("full_attention") + 1
    expected = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(len(layer_types))]
    return period if layer_types == expected else None


def text_fields(config: Mapping[str, Any]) -> Config:
    """The language model's fields, wherever the checkpoint nests them (``text_config`` over the top level)."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else dict(config)


def positive_int(config: Mapping[str, Any], field: str) -> int | None:
    """An optional count; raises ``ModelFileError`` when it is there and is not a positive integer."""
    value = config.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFileError(f"config.json: {field} is {value!r}, not a positive integer")
    return value
