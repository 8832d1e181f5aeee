"""Calls written as a Python list: ``[get_weather(city="Paris", days=3), …]``.

Each call is read whole, so that what is not a call of a declared tool with literal keyword arguments stays text;
its arguments arrive in one piece.
"""

from __future__ import annotations

import ast
import string
import warnings

from headrace.text.reasoning.cursor import WHITE_SPACE, Cursor, Step
from headrace.text.tools.calls import Calls
from headrace.text.tools.schema import literal_value, to_json

MAX_HELD_CHARS = 262_144
_NAME_CHARS = string.ascii_letters + string.digits + "_."
_CLOSING = {"(": ")", "[": "]", "{": "}"}


def pythonic_calls(cursor: Cursor, calls: Calls) -> Step[bool]:
    """Reader of one list. False: the rest, or all, is text."""
    if not (yield from cursor.literal("[")):
        return False
    before = calls.count
    while True:
        yield from cursor.skip(WHITE_SPACE)
        if calls.count > before:
            if (yield from cursor.literal("]")):
                return True
            if not (yield from cursor.literal(",")):
                return False
            yield from cursor.skip(WHITE_SPACE)
        name = yield from cursor.take_while(_NAME_CHARS)
        if not calls.is_declared(name) or not (yield from cursor.literal("(")):
            return False
        inside = yield from _until_closed(cursor)
        arguments = None if inside is None else keyword_arguments(inside)
        if arguments is None:
            return False
        calls.start(name)
        calls.write(arguments)
        calls.end(complete=True)


def _until_closed(cursor: Cursor) -> Step[str | None]:
    """Text up to the parenthesis that closes the one before the cursor, consumed; None where the text ends."""
    parts: list[str] = []
    open_brackets = ["("]
    quote = ""
    while True:
        char = yield from cursor.char()
        if char == "":
            return None
        if quote:
            taken = yield from cursor.literal("\\\\", f"\\{quote[0]}", quote, char)
            quote = "" if taken == quote else quote
        elif char in "\"'":
            taken = yield from cursor.literal(char * 3, char * 2, char)
            quote = "" if len(taken) == 2 else taken  # two are an empty string
        else:
            taken = yield from cursor.literal(char)
            if char in _CLOSING:
                open_brackets.append(char)
            elif char in ")]}" and _CLOSING[open_brackets.pop()] != char:
                return None
            if not open_brackets:
                return "".join(parts)
        parts.append(taken)


def keyword_arguments(text: str) -> str | None:
    """JSON text of literal keyword arguments; None for anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = ast.parse(f"f({text}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            return None
        values: dict[str, object] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                return None
            values[keyword.arg] = literal_value(keyword.value)
        return to_json(values)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
