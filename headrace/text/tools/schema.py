"""Typing of arguments that a model wrote as plain text, by the tool's JSON schema.

Formats of the XML kind write ``<parameter=count>5</parameter>``: whether that is the number 5 or the text "5" is
for the schema to say. A value that fits none of the declared types becomes a string: nothing is lost, and the
client's own validation sees it.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping

_MAX_DEPTH = 16
_INTEGER = re.compile(r"[-+]?\d{1,4000}", re.ASCII)


def types_of(schema: object, root: Mapping[str, object] | None = None, depth: int = 0) -> frozenset[str]:
    """JSON type names that ``schema`` allows; empty when it does not say.

    ``root`` is the schema that local references ("#/$defs/…") point into.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    root = schema if root is None else root
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(item for item in declared if isinstance(item, str))
    found: set[str] = set()
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found |= types_of(_resolve(root, reference), root, depth + 1)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else []:
            found |= types_of(option, root, depth + 1)
    values = schema.get("enum")
    found |= {_type_name(value) for value in (values if isinstance(values, list) else [])}
    if "const" in schema:
        found.add(_type_name(schema["const"]))
    return frozenset(found)


def property_types(parameters: Mapping[str, object], key: str) -> frozenset[str]:
    """Types of the argument ``key`` of a tool with these parameters."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return types_of(properties[key], parameters)
    return types_of(parameters.get("additionalProperties"), parameters)


def is_text(types: frozenset[str]) -> bool:
    """Whether a value can only be a string, so that it may be streamed before it is complete."""
    return types == {"string"}


def convert(text: str, types: frozenset[str]) -> str:
    """The JSON text of a value that a model wrote as ``text``."""
    bare = text.strip()
    if not types:
        return bare if _parsed(bare) is not None or bare == "null" else _string(text)
    for name in ("null", "boolean", "integer", "number", "object", "array"):
        if name in types and (value := _as(name, bare)) is not None:
            return value
    return _string(text)


def _as(name: str, bare: str) -> str | None:
    """``bare`` as a value of one JSON type, or None."""
    if name == "null":
        return "null" if bare in ("null", "None") else None
    if name == "boolean":
        return bare.lower() if bare.lower() in ("true", "false") else None
    if name == "integer":
        if _INTEGER.fullmatch(bare):
            return str(int(bare))
        number = _number(bare)
        return str(int(number)) if number is not None and number.is_integer() and abs(number) < 2**53 else None
    if name == "number":
        if _INTEGER.fullmatch(bare):
            return str(int(bare))
        number = _number(bare)
        return None if number is None else json.dumps(number)
    wanted = dict if name == "object" else list
    value = _parsed(bare)
    if isinstance(value, wanted):
        return bare
    value = python_literal(bare)
    return to_json(value) if isinstance(value, wanted) else None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def _parsed(text: str) -> object:
    """The value of strict JSON text; None when it is not."""

    def refuse(word: str) -> object:
        raise ValueError(word)

    try:
        value: object = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    return value


def python_literal(text: str) -> object:
    """The value of a Python literal; None when it is not one (JSON's words count as literals)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        return literal_value(tree.body)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None


class _JsonWords(ast.NodeTransformer):
    _words = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._words[node.id]) if node.id in self._words else node


def literal_value(node: ast.expr) -> object:
    """Raises ValueError or TypeError for what is not a literal."""
    value: object = ast.literal_eval(_JsonWords().visit(node))
    return value


def to_json(value: object) -> str | None:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _resolve(root: Mapping[str, object], reference: str) -> object:
    node: object = root
    for part in reference[2:].split("/"):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = ((int, "integer"), (float, "number"), (str, "string"), (Mapping, "object"))
    return next((name for kind, name in names if isinstance(value, kind)), "array")
