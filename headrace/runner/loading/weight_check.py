"""Compares what the files hold with what the model expects: names and shapes, from headers, before allocating."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from headrace.checkpoint.config import text_fields
from headrace.checkpoint.model_folder import ModelFiles
from headrace.errors import ModelFileError

Shape = tuple[int, ...]

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def check_weights(files: ModelFiles, model: nn.Module, shapes: Mapping[str, Shape]) -> None:
    """Raises ModelFileError for the first missing, unexpected or wrongly shaped tensor, by name."""
    expected = {name: tuple(array.shape) for name, array in tree_flatten(model.parameters())}
    for name, shape in shapes.items():
        if name in expected and shape != expected[name]:
            raise ModelFileError(_wrong_shape(files, name, shape, expected[name]))
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelFileError(_missing(files, missing, shapes))
    unexpected = [name for name in shapes if name not in expected]
    if unexpected:
        raise ModelFileError(_unexpected(files, unexpected, expected))


def _wrong_shape(files: ModelFiles, name: str, shape: Shape, expected: Shape) -> str:
    fields = []
    if len(shape) == len(expected):
        wanted = {want for have, want in zip(shape, expected, strict=True) if have != want}
        fields = _fields_with(files.config, wanted)
    because = f" ({', '.join(fields)})" if fields else ""
    source = _config_name(files)
    return f"{_where(files, name)}tensor {name} has shape {shape}, {source}{because} asks for {expected}"


def _missing(files: ModelFiles, missing: list[str], shapes: Mapping[str, Shape]) -> str:
    layers, source = _layer_count(shapes), _config_name(files)
    first = missing[0]
    if layers and (match := _LAYER.search("." + first)) and int(match[1]) >= layers:
        return f"{source}: num_hidden_layers asks for tensor {first}, the weights have {layers} layers"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"incomplete: tensor {first}{more} is missing from the weights ({source}: {_model_type(files)})"


def _unexpected(files: ModelFiles, unexpected: list[str], expected: Mapping[str, Shape]) -> str:
    layers, source = _layer_count(expected), _config_name(files)
    first = unexpected[0]
    if layers and (match := _LAYER.search("." + first)) and int(match[1]) >= layers:
        return f"{source}: num_hidden_layers gives {layers} layers, the weights also have tensor {first}"
    more = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
    return f"{_where(files, first)}tensor {first}{more} has no place in the model ({source}: {_model_type(files)})"


def _layer_count(names: Mapping[str, Shape]) -> int:
    numbers = [int(match[1]) for name in names if (match := _LAYER.search("." + name))]
    return max(numbers) + 1 if numbers else 0


def _model_type(files: ModelFiles) -> str:
    return f"model_type {files.config['model_type']}"


def _config_name(files: ModelFiles) -> str:
    return "config.json" if files.kind == "folder" else "metadata"


def _where(files: ModelFiles, name: str) -> str:
    """The file that holds ``name``, where the model did not rename it."""
    return f"{files.tensors[name].file}: " if name in files.tensors else f"{files.path.name}: "


def _fields_with(config: dict[str, Any], values: set[int]) -> list[str]:
    """Configuration fields whose value is one of ``values``, as candidates for the fault."""
    fields = text_fields(config)
    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads")
    return [f"{name} {fields[name]}" for name in names if fields.get(name) in values]
