"""``--config FILE``: the flags of ``serve`` in YAML, TOML or JSON, one mapping, names as in ``serve --help``."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.cli.flags import UsageError


def load_config_file(path: str) -> Mapping[str, object]:
    """The mapping in the file. Raises UsageError: not readable, not parseable, not a mapping."""
    name = os.path.basename(path)
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in (".yaml", ".yml", ".toml", ".json"):
        raise UsageError(f"--config {name}: the name must end in .yaml, .yml, .toml or .json")
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {name} cannot be read: {_one_line(error)}") from None
    try:
        parsed = _parse(content, suffix)
    except ValueError as error:
        raise UsageError(f"--config {name} cannot be parsed: {_one_line(error)}") from None
    except RecursionError:
        raise UsageError(f"--config {name} cannot be parsed: it is nested too deeply") from None
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise UsageError(f"--config {name} must hold one mapping of flag names to values")
    return parsed


def _parse(content: str, suffix: str) -> object:
    """Raises ValueError (both tomllib's and json's errors are ValueErrors); also for a name given twice."""
    if suffix == ".toml":
        return tomllib.loads(content)
    if suffix == ".json":
        return json.loads(content, object_pairs_hook=_unique)
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """YAML forbids a mapping to name a thing twice; PyYAML takes the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            _unique((key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            mapping: dict[Any, Any] = super().construct_mapping(node, deep)
            return mapping

    try:
        return yaml.load(content, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _unique(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is there twice")
        found[name] = value
    return found


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
