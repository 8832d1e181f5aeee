"""Typing of plain text by a JSON schema, and the JSON scanner."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.tools.json_scanner import JsonScanner, escaped, is_object
from headrace.text.tools.schema import convert, property_types, types_of


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        (" 5.0 ", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("5.5", {"number"}, 5.5),
        ("007", {"number"}, 7),
        ("nan", {"number"}, "nan"),
        ("1_0", {"number"}, "1_0"),
        ("True", {"boolean"}, True),
        ("yes", {"boolean"}, "yes"),
        ("null", {"string", "null"}, None),
        ("null", {"string"}, "null"),
        ("5", {"string"}, "5"),
        ("5", {"string", "integer"}, 5),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("{'a': True, 'b': null}", {"object"}, {"a": True, "b": None}),
        ("[1, 2]", {"array"}, [1, 2]),
        ("[1, 2", {"array"}, "[1, 2"),
        ("5", set(), 5),
        ("null", set(), None),
        ("plain text", set(), "plain text"),
        ("[" * 5000, {"array"}, "[" * 5000),
        ("9" * 4500, set(), "9" * 4500),
    ],
)
def test_convert(text: str, types: set[str], value: object) -> None:
    assert json.loads(convert(text, frozenset(types))) == value


@given(st.text(), st.sets(st.sampled_from(["null", "boolean", "integer", "number", "object", "array", "string"])))
def test_convert_always_gives_json(text: str, types: set[str]) -> None:
    json.loads(convert(text, frozenset(types)))


def test_types_of_schemas() -> None:
    schema = {
        "properties": {
            "plain": {"type": "integer"},
            "several": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/text"}]},
            "enum": {"enum": ["a", 1, None]},
            "const": {"const": True},
            "loop": {"$ref": "#/properties/loop"},
            "open": {},
        },
        "$defs": {"text": {"type": "string"}},
        "additionalProperties": {"type": "number"},
    }
    expected = {
        "plain": {"integer"}, "several": {"string", "null"}, "either": {"integer", "string"},
        "enum": {"string", "integer", "null"}, "const": {"boolean"}, "loop": set(), "open": set(),
        "new": {"number"},
    }  # fmt: skip
    assert {key: set(property_types(schema, key)) for key in expected} == expected
    assert types_of(True) == frozenset()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.booleans(), st.data())
def test_scanner_accepts_json_and_stops_behind_it(value: object, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    whole = text + data.draw(st.sampled_from([" ", "}", "\n<", "]"]))
    at = data.draw(st.integers(0, len(whole)))
    scanner = JsonScanner()
    out = ""
    for piece in (whole[:at], whole[at:]):
        _, passed = scanner.feed(piece)
        out += passed
    assert scanner.done and not scanner.broken
    assert out == text


@given(st.text(alphabet='{}[]",:\\ \n01e-tfnu.x', max_size=12))
def test_scanner_agrees_with_the_standard_parser(text: str) -> None:
    scanner = JsonScanner()
    used, out = scanner.feed(text + " ")
    whole = scanner.done and not text[used:].strip()
    try:
        json.loads(text, strict=False)
        valid = True
    except ValueError:
        valid = False
    assert whole == valid
    if whole:
        json.loads(out)


def test_control_characters_are_escaped() -> None:
    assert JsonScanner().feed('"a\n\x01"') == (5, '"a\\n\\u0001"')
    assert escaped('é"\n') == 'é\\"\\n'
    assert is_object(' {"a": 1} ') and not is_object("[1]") and not is_object("{} {}")
