"""Calls whose arguments are tagged one by one, in the manner of XML.

    qwen3_coder   <function=NAME><parameter=KEY>VALUE</parameter>…</function>
    minimax_m2    <invoke name="NAME"><parameter name="KEY">VALUE</parameter>…</invoke>
    deepseek_v4   the same with ｜DSML｜ in every tag, and an attribute string="true" or "false" behind the key
    glm4          NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…

Values are plain text; the tool's schema (or the ``string`` attribute) says their type. A value that can only be a
string streams; others are converted when they are complete. A call begins with its first argument, or at its
closing tag.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.text.reasoning.cursor import WHITE_SPACE, Cursor, Step
from headrace.text.reasoning.events import TextSink
from headrace.text.tools.calls import ArgumentWriter, Calls, break_off
from headrace.text.tools.json_scanner import escaped
from headrace.text.tools.schema import convert, is_text


@dataclass(frozen=True, slots=True)
class TagForm:
    """How one format tags.

    Attributes:
        key_open, key_close: around a key.
        value_open: between key and value, white space before it allowed; "" when the key's tag is followed by the
            value at once.
        value_close: behind a value.
        call_ends: any of them ends the call.
        borders: end broken arguments without belonging to them.
        has_attributes: the key's tag goes on with attributes up to ">".
        trims_line_ends: one line end behind the opening and one before the closing tag of a value are markup.
    """

    key_open: str
    key_close: str
    value_close: str
    call_ends: tuple[str, ...]
    value_open: str = ""
    borders: tuple[str, ...] = ()
    has_attributes: bool = False
    trims_line_ends: bool = False


QWEN = TagForm("<parameter=", ">", "</parameter>", ("</function>", "</tool_call>"), trims_line_ends=True)
GLM = TagForm("<arg_key>", "</arg_key>", "</arg_value>", ("</tool_call>",), value_open="<arg_value>")
MINIMAX = TagForm(
    '<parameter name="',
    '"',
    "</parameter>",
    ("</invoke>",),
    borders=("</minimax:tool_call>",),
    has_attributes=True,
)
DSML = TagForm(
    '<｜DSML｜parameter name="',
    '"',
    "</｜DSML｜parameter>",
    ("</｜DSML｜invoke>",),
    borders=("</｜DSML｜tool_calls>", "</｜DSML｜function_calls>"),
    has_attributes=True,
)


def tagged_arguments(cursor: Cursor, calls: Calls, name: str, form: TagForm) -> Step[bool]:
    """Read arguments up to the call's end. False: nothing of a call was found."""
    writer = ArgumentWriter(calls, name)
    while True:
        yield from cursor.skip(WHITE_SPACE)
        mark = yield from cursor.literal(form.key_open, *form.call_ends)
        if mark in form.call_ends:
            writer.close()
            return True
        key = (yield from _key(cursor, form)) if mark else None
        if key is None:
            break
        writer.key(key[0])
        if not (yield from _value(cursor, calls, form, _types(calls, name, *key))):
            break
    if not calls.is_open:
        return False
    # Behind a key's opening tag any rest may be its unfinished remainder.
    markup = ("",) if mark else (form.key_open, *form.call_ends)
    yield from break_off(cursor, calls, form.call_ends, form.borders, markup)
    return True


def _key(cursor: Cursor, form: TagForm) -> Step[tuple[str, str] | None]:
    """Read a key and its attributes up to the value; None when the form is broken."""
    key, end = yield from cursor.word_until((form.key_close,))
    if not end or not key.strip():
        return None
    attributes = ""
    if form.has_attributes:
        attributes, end = yield from cursor.word_until((">",))
    elif form.value_open:
        yield from cursor.skip(WHITE_SPACE)
        end = yield from cursor.literal(form.value_open)
    return (key.strip(), attributes) if end else None


def _types(calls: Calls, name: str, key: str, attributes: str) -> frozenset[str]:
    if 'string="true"' in attributes:
        return frozenset({"string"})
    declared = calls.types(name, key)
    if 'string="false"' in attributes and is_text(declared):
        return frozenset()  # the model says JSON where the schema says text: take what parses
    return declared


def _value(cursor: Cursor, calls: Calls, form: TagForm, types: frozenset[str]) -> Step[bool]:
    """Read a value and its closing tag. False: the answer ended in it; of a string, what is certain is written."""
    if form.trims_line_ends:
        yield from cursor.literal("\r\n", "\n")
    if is_text(types):
        calls.write('"')
        sink = _LineEndKeeper(lambda text: calls.write(escaped(text)), form.trims_line_ends)
        closed = yield from cursor.text_until((form.value_close,), sink, drop_unfinished=True)
        calls.write('"' if closed else "")
        return bool(closed)
    parts: list[str] = []
    sink = _LineEndKeeper(parts.append, form.trims_line_ends)
    closed = yield from cursor.text_until((form.value_close,), sink)
    if closed:
        calls.write(convert("".join(parts), types))
    return bool(closed)


class _LineEndKeeper:
    """Passes text on, except one line end at the very end."""

    def __init__(self, sink: TextSink, is_active: bool) -> None:
        self._sink = sink
        self._is_active = is_active
        self._kept = ""

    def __call__(self, text: str) -> None:
        text = self._kept + text
        if self._is_active:
            self._kept = next((end for end in ("\r\n", "\n", "\r") if text.endswith(end)), "")
            text = text[: len(text) - len(self._kept)]
        if text:
            self._sink(text)
