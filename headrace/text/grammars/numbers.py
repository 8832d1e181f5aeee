"""Numbers in a JSON schema that llguidance can keep to. It computes in 64-bit floats and 64-bit integers:

bounds      moved inwards to the nearest number it has, at most 2^62 from zero: what satisfies them satisfies
            those of the schema, too
constants   one that it would write as another number is refused
multipleOf  its automaton has a state for each remainder: a large divisor, which would take minutes and
            gigabytes, is refused
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal

from headrace.errors import GrammarError

MAX_DIVISOR = 100_000
_MAX_BOUND = 2**62
_EXACT_DIGITS = 15
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
# Words whose values are schemas by name; words whose values are no schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "enum", "default", "examples", "example", "required", "x-guidance"})


def exact_numbers(schema: Mapping[str, object]) -> dict[str, object]:
    """The schema with bounds that can be kept to. Raises GrammarError: no number of the library's can."""
    try:
        return _schema(schema)
    except RecursionError:
        raise GrammarError("it is nested too deep") from None


def _schema(schema: Mapping[str, object]) -> dict[str, object]:
    result = {word: _inner(word, value) for word, value in schema.items()}
    for word in (*_LOWER, *_UPPER):
        if word in result:
            result[word] = _bound(word, result[word])
    for value in (result.get("const"), result.get("enum")):
        _check_constants(value)
    _check_divisor(result.get("multipleOf"))
    return result


def _inner(word: str, value: object) -> object:
    if word in _DATA:
        return value
    if isinstance(value, Mapping):
        return {name: _any(item) for name, item in value.items()} if word in _NAMED else _schema(value)
    return [_any(item) for item in value] if isinstance(value, list) else value


def _any(value: object) -> object:
    return _schema(value) if isinstance(value, Mapping) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bound(word: str, value: object) -> object:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if value < -_MAX_BOUND if word in _UPPER else value > _MAX_BOUND:
        raise GrammarError(f"{word} {value} is beyond what can be compared")
    value = max(-_MAX_BOUND, min(_MAX_BOUND, value))
    if isinstance(value, float):
        return value
    near = float(value)
    if word in _UPPER and near > value:
        near = math.nextafter(near, -math.inf)
    if word in _LOWER and near < value:
        near = math.nextafter(near, math.inf)
    return int(near)


def _check_constants(value: object) -> None:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _check_constants(item)
    elif _is_number(value) and not _is_exact(value):
        raise GrammarError(f"the constant {value} has more digits than can be kept")


def _is_exact(value: object) -> bool:
    if isinstance(value, int):
        return abs(value) <= _MAX_BOUND and float(value) == value
    assert isinstance(value, float)
    return abs(value) <= _MAX_BOUND and float(f"{value:.{_EXACT_DIGITS}g}") == value


def _check_divisor(value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not math.isfinite(value):
        raise GrammarError("multipleOf must be a finite number")
    number = Decimal(repr(value))
    digits = abs(number) if number == int(number) else Decimal((0, number.normalize().as_tuple().digits, 0))
    if digits > MAX_DIVISOR:
        raise GrammarError(f"multipleOf {value} has too many remainders; at most {MAX_DIVISOR} are told apart")
