"""Gemma 4's calls: ``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:5,list:[…],obj:{…}}<tool_call|>``.

An object notation with bare keys and a string quote that is one token of its own, turned into JSON as it comes.
(Source: Gemma 4's published prompt format and chat template.)
"""

from __future__ import annotations

from headrace.text.reasoning.cursor import WHITE_SPACE, Cursor, Step
from headrace.text.tools.calls import ArgumentWriter, Calls, break_off
from headrace.text.tools.json_scanner import escaped
from headrace.text.tools.schema import convert

QUOTE = '<|"|>'
CLOSE, RESPONSE = "<tool_call|>", "<|tool_response>"
_MAX_DEPTH = 64
_ANY = frozenset({"null", "boolean", "integer", "number"})


def gemma_calls(cursor: Cursor, calls: Calls) -> Step[bool]:
    """Reader behind ``<|tool_call>``."""
    yield from cursor.skip(WHITE_SPACE)
    if not (yield from cursor.literal("call:")):
        return False
    name, found = yield from cursor.word_until(("{",))
    if not found or not name.strip():
        return False
    writer = ArgumentWriter(calls, name.strip())
    if (yield from _members(cursor, calls, writer, 0)):
        writer.close()
        yield from cursor.skip(WHITE_SPACE)
        yield from cursor.literal(CLOSE)
    elif calls.is_open:
        yield from break_off(cursor, calls, (CLOSE,), markup=("",))
    else:
        return False
    yield from cursor.skip(WHITE_SPACE)
    yield from cursor.literal(RESPONSE)  # asks for the result: the end of the model's turn
    return True


def _members(cursor: Cursor, calls: Calls, writer: ArgumentWriter | None, depth: int) -> Step[bool]:
    """Read ``key:value,…}`` behind an opening brace; inside values there is no ``writer``."""
    is_first = True
    while True:
        yield from cursor.skip(WHITE_SPACE)
        if (yield from cursor.literal("}")):
            return True
        if not is_first and not (yield from cursor.literal(",")):
            return False
        yield from cursor.skip(WHITE_SPACE)
        quote = yield from cursor.literal(QUOTE)
        key, found = yield from cursor.word_until((QUOTE if quote else ":",))
        if quote and found:
            found = yield from cursor.literal(":")
        if not found:
            return False
        key = key if quote else key.strip()
        if writer is not None:
            writer.key(key)
        else:
            calls.write(f'{"" if is_first else ", "}"{escaped(key)}": ')
        is_first = False
        if not (yield from _value(cursor, calls, depth)):
            return False


def _value(cursor: Cursor, calls: Calls, depth: int) -> Step[bool]:
    yield from cursor.skip(WHITE_SPACE)
    opening = yield from cursor.literal(QUOTE, "{", "[")
    if depth >= _MAX_DEPTH:
        return False
    if opening == QUOTE:
        calls.write('"')
        closed = yield from cursor.text_until(
            (QUOTE,), lambda text: calls.write(escaped(text)), drop_unfinished=True
        )
        calls.write('"' if closed else "")
        return bool(closed)
    if opening:
        calls.write(opening)
        inside = _members(cursor, calls, None, depth + 1) if opening == "{" else _items(cursor, calls, depth + 1)
        if not (yield from inside):
            return False
        calls.write("}" if opening == "{" else "]")
        return True
    parts: list[str] = []
    border = yield from cursor.text_before((",", "}", "]"), parts.append)
    if border:
        calls.write(convert("".join(parts).strip(), _ANY))
    return bool(border)


def _items(cursor: Cursor, calls: Calls, depth: int) -> Step[bool]:
    is_first = True
    while True:
        yield from cursor.skip(WHITE_SPACE)
        if (yield from cursor.literal("]")):
            return True
        if not is_first:
            if not (yield from cursor.literal(",")):
                return False
            calls.write(", ")
        is_first = False
        if not (yield from _value(cursor, calls, depth)):
            return False
