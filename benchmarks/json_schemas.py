"""Small JSON schemas of many kinds, made by a seed, and whether a value satisfies one.

The validator knows exactly the words that the generator writes; it shares nothing with what is measured.
"""

from __future__ import annotations

import random
import re
from typing import Any

WORDS = ("name", "age", "city", "tags", "score", "id", "kind", "note", "é key", "a/b")
Schema = dict[str, Any]


def make_schema(rng: random.Random, depth: int = 0) -> Schema:
    """A schema whose shortest values have a few dozen characters, so that small models finish them."""
    leaves = (_string, _integer, _number, _enum, _constant, _boolean, _nullable)
    kinds = (_object, _object, _array, _any_of, _reference) if depth == 0 else (*leaves, _object, _array)
    kind = rng.choice(kinds if depth < 2 else leaves)
    return kind(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 4 - depth))
    return {
        "type": "object",
        "properties": {name: make_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {
        "type": "array",
        "items": make_schema(rng, depth + 1),
        "minItems": least,
        "maxItems": least + rng.randint(0, 2),
    }


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [make_schema(rng, depth + 1) for _ in range(2)]}


def _reference(rng: random.Random, depth: int) -> Schema:
    inner = make_schema(rng, depth + 1)
    return {**_object_of({"it": {"$ref": "#/$defs/it"}, "again": {"$ref": "#/$defs/it"}}), "$defs": {"it": inner}}


def _object_of(properties: dict[str, Schema]) -> Schema:
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _string(rng: random.Random, depth: int) -> Schema:
    return rng.choice((
        {"type": "string", "maxLength": rng.randint(3, 12)},
        {"type": "string", "pattern": rng.choice((r"^[A-Z][a-z]{2,5}$", r"^[0-9]{3}-[0-9]{2}$", r"^(on|off)$"))},
        {"type": "string", "format": "date"},
    ))  # fmt: skip


def _integer(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random, depth: int) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9)}


def _enum(rng: random.Random, depth: int) -> Schema:
    return {"enum": rng.sample(["red", "green", 3, None, 'q"\\', "é😀", True], rng.randint(1, 4))}


def _constant(rng: random.Random, depth: int) -> Schema:
    return {"const": rng.choice(('a"b\\c/é😀\n', 17, {"deep": ["x", {"y": None}]}, False))}


def _boolean(rng: random.Random, depth: int) -> Schema:
    return {"type": "boolean"}


def _nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": ["string", "null"], "maxLength": 6}


def is_valid(value: Any, schema: Schema, root: Schema | None = None) -> bool:
    """Whether ``value`` satisfies a schema of this module."""
    root = schema if root is None else root
    if "$ref" in schema:
        return is_valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(is_valid(value, option, root) for option in schema["anyOf"])
    if "const" in schema:
        return _same(value, schema["const"])
    if "enum" in schema:
        return any(_same(value, option) for option in schema["enum"])
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return any(_is_of(value, kind, schema, root) for kind in types)


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)


def _is_of(value: Any, kind: str, schema: Schema, root: Schema) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "string":
            return isinstance(value, str) and _is_text(value, schema)
        case "integer" | "number":
            is_number = type(value) is int or (kind == "number" and type(value) is float)
            return is_number and schema["minimum"] <= value <= schema["maximum"]
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(is_valid(item, schema["items"], root) for item in value)
            )
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= value.keys() <= properties.keys()
        and all(is_valid(item, properties[name], root) for name, item in value.items())
    )


def _is_text(value: str, schema: Schema) -> bool:
    if "pattern" in schema:
        return re.search(schema["pattern"], value) is not None
    if "format" in schema:
        return re.fullmatch(r"\d{4}-\d{2}-\d{2}", value) is not None
    return len(value) <= schema["maxLength"]
