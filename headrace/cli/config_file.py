"""``--config FILE``: the flags of ``serve`` in YAML, TOML or JSON, one mapping, names as in ``serve --help``."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping

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
    if parsed is None:
        return {}
    if not isinstance(parsed, dict):
        raise UsageError(f"--config {name} must hold one mapping of flag names to values")
    return parsed


def _parse(content: str, suffix: str) -> object:
    """Raises ValueError (both tomllib's and json's errors are ValueErrors)."""
    if suffix == ".toml":
        return tomllib.loads(content)
    if suffix == ".json":
        return json.loads(content)
    import yaml

    try:
        return yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
