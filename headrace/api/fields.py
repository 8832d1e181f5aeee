"""From a JSON object to a typed struct, with messages that name the field, the limit and the value.

msgspec checks types and bounds (declared once, in the schemas); this module turns its complaint into a sentence
about the user's own field.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from headrace.errors import InvalidRequest

T = TypeVar("T")

_COMPLAINT = re.compile(r"Expected `(?P<kind>[^`]+)`(?P<bound>[^,\-]*(?:-?[\d.]+)?)(?:, got `(?P<got>[^`]+)`)?")
_AT = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_ENTRY = re.compile(r" - at `\$\.(?P<name>\w+)\[\.\.\.\]`$")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_NAMES = {
    "float": "a number", "int": "an integer", "str": "a string", "bool": "true or false",
    "array": "an array", "object": "an object", "null": "",
}  # fmt: skip
_BOUNDS = (
    (">=", "at least"),
    ("<=", "at most"),
    (">", "more than"),
    ("<", "less than"),
    ("of length", "of length"),
)


def convert(body: dict[str, Any], schema: type[T]) -> T:
    """``body`` as ``schema``; ``InvalidRequest`` naming the field otherwise. Unknown fields are ignored."""
    try:
        return msgspec.convert(body, schema)
    except msgspec.ValidationError as error:
        raise _explain(str(error), body, schema) from None


def unknown_fields(body: dict[str, Any], schema: type[msgspec.Struct]) -> list[str]:
    return [name for name in body if name not in schema.__struct_fields__]


def shown(value: object) -> str:
    """A value as it goes into a message: JSON, at most 60 characters."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}…"


def _explain(message: str, body: dict[str, Any], schema: type) -> InvalidRequest:
    if entry := _faulty_entry(message, body, schema):
        name, key, value = entry
        demand = _demand(_AT.sub("", message), schema, name)
        return InvalidRequest(f"{name}[{shown(key)}] {demand}, not {shown(value)}", param=name)
    at = _AT.search(message)
    path = at.group("path").lstrip(".") if at else ""
    message = _AT.sub("", message)
    if missing := _MISSING.fullmatch(message):
        name = f"{path}.{missing.group('name')}" if path else missing.group("name")
        return InvalidRequest(f"{name} is required", param=name)
    found, value = _look_up(body, at.group("path") if at else "")
    but = f", not {shown(value)}" if found else ""
    param = path.replace("[...]", "") or None
    return InvalidRequest(f"{path or 'the body'} {_demand(message, schema, path)}{but}", param=param)


def _faulty_entry(message: str, body: dict[str, Any], schema: type) -> tuple[str, str, object] | None:
    """Field, key and value that a complaint about some entry of a mapping is about; msgspec does not say which."""
    at = _ENTRY.search(message)
    entries = body.get(at.group("name")) if at else None
    if at is None or not isinstance(entries, dict):
        return None
    for key, value in entries.items():
        try:
            msgspec.convert({at.group("name"): {key: value}}, schema)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return at.group("name"), key, value
    return None


def _demand(message: str, schema: type, path: str) -> str:
    complaint = _COMPLAINT.match(message)
    if complaint is None:
        return f"must be {_choices(schema, path)}" if "enum" in message else "must be in range"
    kinds = [_NAMES.get(kind, kind) for kind in complaint.group("kind").split(" | ")]
    kind = " or ".join(name for name in kinds if name)
    bound = complaint.group("bound").strip()
    for symbol, words in _BOUNDS:
        if bound.startswith(symbol):
            return f"must be {kind} of {words.removeprefix('of ')} {bound.removeprefix(symbol).strip()}"
    return f"must be {kind}"


def _choices(schema: type, name: str) -> str:
    """The values that a field of ``schema`` may have, as a phrase."""
    info = msgspec.inspect.type_info(schema)
    fields = info.fields if isinstance(info, msgspec.inspect.StructType) else ()
    for field in fields:
        if field.encode_name == name:
            kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
            values = [
                value for kind in kinds if isinstance(kind, msgspec.inspect.LiteralType) for value in kind.values
            ]
            return " or ".join(shown(value) for value in values)
    return "one of the accepted values"


def _look_up(body: object, path: str) -> tuple[bool, object]:
    """The value at msgspec's ``path``; not found where it does not say which element is meant."""
    value = body
    for step in _STEP.finditer(path):
        name, position = step.groups()
        try:
            value = value[name] if name is not None else value[int(position)]  # type: ignore[index]
        except (KeyError, IndexError, TypeError, ValueError):
            return False, None
    return True, value
