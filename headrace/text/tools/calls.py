"""What readers of call formats write to, and the frame that runs them over an answer.

An answer is content until a mark of the format appears (or, for formats without marks, from its first
character). Behind the mark a reader tries to read calls:

    content … <mark> undecided … ToolCallStart ─ arguments … ─ ToolCallEnd … content
              ^ hold: what never becomes a call is content, mark included

Nothing is emitted until the call's name is known and its arguments have begun. From then on it is a call: its
arguments stream, and if the model breaks the form or is cut, they are what it wrote, marked as incomplete. A
stretch may stay undecided for ``max_held`` characters. White space between calls, before a call that begins the
answer and after the last one is dropped.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.text.reasoning.cursor import WHITE_SPACE, Cursor, ReaderParser, Step
from headrace.text.reasoning.events import (
    Content,
    Event,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolDefinition,
)
from headrace.text.tools.json_scanner import escaped
from headrace.text.tools.schema import property_types

MAX_HELD_CHARS = 16_384


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class Calls:
    """The calls of one answer, in order. Readers ``start``, ``write`` … and ``end`` one after the other."""

    def __init__(
        self,
        cursor: Cursor,
        events: Callable[[Event], None],
        tools: Iterable[ToolDefinition],
        new_id: Callable[[], str],
        max_held: int,
    ) -> None:
        self._cursor = cursor
        self._emit = events
        self._tools = {tool.name: tool for tool in tools}
        self._new_id = new_id
        self._max_held = max_held
        self._ids: set[str] = set()
        self._mark = ""
        self.count = 0
        self.is_open = False

    def attempt(self, mark: str) -> None:
        """A mark was read: what follows is undecided."""
        self._mark = mark
        self._cursor.hold(self._max_held)

    def is_declared(self, name: str) -> bool:
        return name in self._tools

    def types(self, name: str, key: str) -> frozenset[str]:
        tool = self._tools.get(name)
        return frozenset() if tool is None else property_types(tool.parameters, key)

    def start(self, name: str, call_id: str = "") -> None:
        """From here on it is a call. ``call_id`` is the model's own, taken when it is new."""
        if not call_id or call_id in self._ids:
            call_id = self._new_id()
        self._ids.add(call_id)
        self._cursor.lift_fence()
        self.is_open = True
        self._emit(ToolCallStart(self.count, call_id, name))

    def write(self, arguments: str) -> None:
        if arguments:
            self._emit(ToolCallArguments(self.count, arguments))

    def end(self, complete: bool) -> None:
        raw = self._mark + self._cursor.held()
        self._emit(ToolCallEnd(self.count, complete, raw))
        self.count += 1
        self.is_open = False
        self.settle()

    def settle(self) -> None:
        """All read so far belongs to the calls that ended; what follows is undecided."""
        self._mark = ""
        self._cursor.hold(self._max_held)


class ArgumentWriter:
    """Writes one call's arguments key by key; the call starts with the first key, or when it closes."""

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls = calls
        self._name = name

    def key(self, key: str) -> None:
        if self._calls.is_open:
            self._calls.write(f', "{escaped(key)}": ')
        else:
            self._calls.start(self._name)
            self._calls.write(f'{{"{escaped(key)}": ')

    def close(self) -> None:
        if self._calls.is_open:
            self._calls.write("}")
        else:
            self._calls.start(self._name)
            self._calls.write("{}")
        self._calls.end(complete=True)


def break_off(
    cursor: Cursor,
    calls: Calls,
    closers: Sequence[str],
    borders: Sequence[str] = (),
    markup: Sequence[str] = (),
) -> Step[None]:
    """End an open call whose form is broken: what the model wrote up to a mark is arguments, as it stands.

    Args:
        cursor: where the form broke.
        calls: has an open call.
        closers: marks that belong to the call.
        borders: marks that belong to what follows.
        markup: where the answer ends without a mark, a rest that begins like one of these is unfinished markup
            and no argument ("" stands for any rest).
    """
    rest: list[str] = []
    mark = yield from cursor.text_before((*closers, *borders), rest.append, drop_unfinished=True)
    text = "".join(rest)
    if mark or not any(text.startswith(begin) or begin.startswith(text) for begin in markup):
        calls.write(text)
    if mark and closers:
        yield from cursor.literal(*closers)
    calls.end(complete=False)


# Reads calls behind a mark. True: it ended in good order. False: what follows the last call (or the mark, when
# there was none) is content.
Reader = Callable[[Cursor, Calls], Step[bool]]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls.

    Attributes:
        readers: per mark, what reads behind it.
        at_start: tried at the answer's first character that is not white space, for formats without marks.
        closers: further texts of the format that may be special tokens.
        new_id: makes ids the model's template accepts.
        max_held: characters that may stay undecided.
    """

    readers: Mapping[str, Reader]
    at_start: Reader | None = None
    closers: frozenset[str] = frozenset()
    new_id: Callable[[], str] = new_call_id
    max_held: int = MAX_HELD_CHARS

    @property
    def needs_special(self) -> frozenset[str]:
        return self.closers.union(self.readers)


class ToolCallParser(ReaderParser):
    """Splits calls from content. One object per answer."""

    def __init__(self, form: CallFormat, tools: Iterable[ToolDefinition]) -> None:
        super().__init__()
        self._form = form
        self._marks = tuple(form.readers)
        self._calls = Calls(
            self._cursor, lambda event: self._events.append(event), tools, form.new_id, form.max_held
        )
        self._blank = ""  # white space that is dropped when a call follows
        self._is_behind_call = False

    def _read(self) -> Step[None]:
        cursor = self._cursor
        self._blank = yield from cursor.take_while(WHITE_SPACE)
        if self._form.at_start is not None:
            yield from self._attempt(self._form.at_start, "")
        while not cursor.at_end:
            mark = yield from cursor.text_until(self._marks, self._content)
            if mark and not (yield from self._attempt(self._form.readers[mark], mark)):
                self._content(mark)
        if not self._is_behind_call:
            self._content("")

    def _attempt(self, reader: Reader, mark: str) -> Step[bool]:
        """Try to read calls; False: there were none, and the cursor is where it was."""
        before = self._calls.count
        self._calls.attempt(mark)
        in_order = yield from reader(self._cursor, self._calls)
        if in_order:
            self._cursor.release()
        else:
            self._cursor.rewind()
        if self._calls.count == before:
            return in_order
        self._is_behind_call = True
        self._blank = yield from self._cursor.take_while(WHITE_SPACE)
        return True

    def _content(self, text: str) -> None:
        text, self._blank = self._blank + text, ""
        self._is_behind_call = False
        if text:
            self._events.append(Content(text))
