"""Calls written as JSON: an object with a name and arguments, lists of such objects, and bare arguments.

Arguments stream as the model writes them. Where they stop being JSON, everything up to the format's closing mark
is taken for them as it stands, and the call is incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.text.reasoning.cursor import WHITE_SPACE, Cursor, Step
from headrace.text.reasoning.events import TextSink
from headrace.text.tools.calls import Calls, Reader, break_off
from headrace.text.tools.json_scanner import JsonScanner, is_object

ARGUMENT_KEYS = ("arguments", "parameters")


def scan(cursor: Cursor, sink: TextSink) -> Step[bool]:
    """Read one JSON value, giving its text to ``sink``; False where it breaks or the text ends."""
    scanner = JsonScanner()
    while True:
        used, text = scanner.feed(cursor.visible())
        cursor.advance(used)
        if text:
            sink(text)
        if scanner.done:
            return True
        if scanner.broken or cursor.at_end:
            return False
        yield


def json_text(cursor: Cursor) -> Step[str | None]:
    parts: list[str] = []
    whole = yield from scan(cursor, parts.append)
    return "".join(parts) if whole else None


def json_string(cursor: Cursor) -> Step[str | None]:
    if (yield from cursor.char()) != '"':
        return None
    text = yield from json_text(cursor)
    return None if text is None else str(json.loads(text))


def arguments(
    cursor: Cursor,
    calls: Calls,
    name: str,
    closers: Sequence[str] = (),
    borders: Sequence[str] = (),
    call_id: str = "",
) -> Step[bool]:
    """Read a call's arguments at the cursor. False: none begin here, and no call was made.

    Args:
        cursor: at the value.
        calls: gets the call.
        name: of the tool.
        closers: marks that end broken arguments and belong to the call.
        borders: marks that end broken arguments and belong to what follows.
        call_id: the model's own id for the call.
    """
    if (yield from cursor.char()) == "{":
        calls.start(name, call_id)
        whole = yield from scan(cursor, calls.write)
        if whole:
            calls.end(complete=True)
        else:
            yield from break_off(cursor, calls, closers, borders)
        return True
    text = yield from json_text(cursor)
    if text is None:
        return False
    _whole_call(calls, name, text, call_id)
    return True


def _whole_call(calls: Calls, name: str, text: str, call_id: str = "") -> None:
    """A call whose arguments are all there. Null is no arguments; a string holds them as JSON text."""
    text = text.strip()
    if text in ("", "null"):
        text = "{}"
    elif text.startswith('"'):
        text = json.loads(text)
    calls.start(name, call_id)
    calls.write(text)
    calls.end(is_object(text))


def call_object(cursor: Cursor, calls: Calls, closers: Sequence[str], only_declared: bool) -> Step[bool]:
    """Read ``{"name": …, "arguments": {…}}``; other keys are passed over. False: no call was made."""
    if not (yield from cursor.literal("{")):
        return False
    name: str | None = None
    early = ""  # arguments that came before the name
    is_first = True
    while True:
        yield from cursor.skip(WHITE_SPACE)
        if (yield from cursor.literal("}")):
            break
        key = yield from _key(cursor, is_first)
        is_first = False
        if key == "name":
            name = yield from json_string(cursor)
            if not name or (only_declared and not calls.is_declared(name)):
                return False
        elif key in ARGUMENT_KEYS and name:
            if not (yield from arguments(cursor, calls, name, closers)):
                return False
            yield from _rest_of_object(cursor, calls)
            return True
        else:
            value = None if key is None else (yield from json_text(cursor))
            if value is None:
                return False
            early = value if key in ARGUMENT_KEYS else early
    if name:
        _whole_call(calls, name, early)
    return bool(name)


def _key(cursor: Cursor, is_first: bool) -> Step[str | None]:
    """Read ``"key":``, behind a comma unless it is the first."""
    if not is_first and not (yield from cursor.literal(",")):
        return None
    yield from cursor.skip(WHITE_SPACE)
    key = yield from json_string(cursor)
    yield from cursor.skip(WHITE_SPACE)
    if key is None or not (yield from cursor.literal(":")):
        return None
    yield from cursor.skip(WHITE_SPACE)
    return key


def _rest_of_object(cursor: Cursor, calls: Calls) -> Step[None]:
    """Behind the arguments: further keys and the closing brace, which some models forget."""
    while True:
        yield from cursor.skip(WHITE_SPACE)
        if (yield from cursor.literal("}")):
            calls.settle()
            return
        key = yield from _key(cursor, is_first=False)
        if key is None or (yield from json_text(cursor)) is None:
            cursor.rewind()
            calls.settle()
            return


def call_objects(cursor: Cursor, calls: Calls, closers: Sequence[str], only_declared: bool = False) -> Step[bool]:
    """Read one object, or a list of them, or several separated by white space, ``,`` or ``;``.

    A list without any is read, and stays text.
    """
    before = calls.count
    yield from cursor.skip(WHITE_SPACE)
    in_list = bool((yield from cursor.literal("[")))
    while True:
        yield from cursor.skip(WHITE_SPACE)
        if in_list and (yield from cursor.literal("]")):
            if calls.count > before:
                calls.settle()
            return True
        if not (yield from call_object(cursor, calls, closers, only_declared)):
            return False
        blank = yield from cursor.take_while(WHITE_SPACE)
        separator = yield from cursor.literal(",", ";")
        if in_list:
            if not separator and (yield from cursor.char()) != "]":
                return False
        elif not separator and (yield from cursor.char()) != "{":
            cursor.advance(-len(blank))
            return True


def objects_until(closer: str) -> Reader:
    """Reader of ``call_objects`` and ``closer``, which may be missing."""

    def read(cursor: Cursor, calls: Calls) -> Step[bool]:
        before = calls.count
        if not (yield from call_objects(cursor, calls, (closer,))) or calls.count == before:
            return False
        # Models write a brace too many; it belongs to the markup only when the closing mark follows.
        extra = yield from cursor.take_while(WHITE_SPACE + "}")
        return bool((yield from cursor.literal(closer))) or "}" not in extra

    return read


def bare_objects(cursor: Cursor, calls: Calls) -> Step[bool]:
    """Reader of objects without marks: each must name a declared tool."""
    if (yield from cursor.char()) not in ("{", "["):
        return False
    before = calls.count
    in_order = yield from call_objects(cursor, calls, (), only_declared=True)
    return in_order and calls.count > before
