"""Reading a text that is still being written.

A grammar is written as a plain sequential reader: a generator that asks the cursor for what comes next and yields
whenever that is not decided yet. Since every primitive waits until its answer can no longer change, a reader sees
the same text however it was cut.

    given out ..... | hold ......... | position | visible, not read ... | fence? | not written yet
                    ^ rewind goes back here     ^ literal, text_before …

``hold`` marks where an attempt began: its text is kept, and ``rewind`` returns to it. A hold with a fence shows
only so many characters, then pretends the end: what an attempt may keep back is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from headrace.text.reasoning.events import Event, TextSink

T = TypeVar("T")
Step = Generator[None, None, T]  # yields to wait for more text, returns its result

WHITE_SPACE = " \t\r\n"
NEWLINES = "\r\n"


class Cursor:
    """Text so far and a position in it. Characters before the hold, or before the position, are forgotten."""

    __slots__ = ("_buffer", "_ended", "_fence", "_hold", "_position")

    def __init__(self) -> None:
        self._buffer = ""
        self._position = 0
        self._hold: int | None = None
        self._fence: int | None = None
        self._ended = False

    # -- the writer's side

    def append(self, text: str) -> None:
        done = self._position if self._hold is None else self._hold
        if done:
            self._buffer = self._buffer[done:]
            self._position -= done
            self._hold = None if self._hold is None else 0
            self._fence = None if self._fence is None else self._fence - done
        self._buffer += text

    def end(self) -> None:
        self._ended = True

    # -- holding

    def hold(self, fence_chars: int | None = None) -> None:
        """Remember this position; with a fence, show only so many characters beyond it."""
        self._hold = self._position
        self._fence = None if fence_chars is None else self._position + fence_chars

    def lift_fence(self) -> None:
        self._fence = None

    def rewind(self) -> None:
        """Back to the hold, which is given up together with its fence."""
        assert self._hold is not None
        self._position = self._hold
        self.release()

    def release(self) -> None:
        self._hold = self._fence = None

    def held(self) -> str:
        """Text from the hold to the position."""
        return self._buffer[self._hold : self._position]

    # -- looking

    @property
    def _visible_end(self) -> int:
        end = len(self._buffer)
        return end if self._fence is None else min(end, self._fence)

    @property
    def at_end(self) -> bool:
        """Nothing follows, and nothing will."""
        return self._position >= self._visible_end and self.is_last

    @property
    def is_last(self) -> bool:
        """What is visible will not grow."""
        return self._ended or (self._fence is not None and self._fence <= len(self._buffer))

    def visible(self) -> str:
        return self._buffer[self._position : self._visible_end]

    def advance(self, chars: int) -> None:
        self._position += chars

    def char(self) -> Step[str]:
        """The next character, not consumed; "" at the end."""
        while self._position >= self._visible_end:
            if self.is_last:
                return ""
            yield
        return self._buffer[self._position]

    # -- consuming

    def literal(self, *options: str) -> Step[str]:
        """Consume the longest option that comes next; "" when none does."""
        longest = max(map(len, options))
        while True:
            ahead = self._buffer[self._position : min(self._position + longest, self._visible_end)]
            found = max((o for o in options if ahead.startswith(o)), key=len, default="")
            undecided = any(len(o) > len(ahead) and o.startswith(ahead) for o in options)
            if not undecided or self.is_last:
                self._position += len(found)
                return found
            yield

    def skip(self, chars: str) -> Step[None]:
        yield from self.take_while(chars)

    def take_while(self, chars: str) -> Step[str]:
        """Consume the run of characters that are in ``chars``."""
        taken: list[str] = []
        while True:
            char = yield from self.char()
            if char == "" or char not in chars:
                return "".join(taken)
            ahead = self.visible()
            run = len(ahead) - len(ahead.lstrip(chars))
            taken.append(ahead[:run])
            self._position += run

    def text_before(self, marks: Sequence[str], sink: TextSink, drop_unfinished: bool = False) -> Step[str]:
        """Give text to ``sink`` up to the first of ``marks`` and return that mark, not consumed; "" at the end.

        No mark may be the beginning of another. Only text that may still become a mark is kept back; at the end
        it is given out as text, or with ``drop_unfinished`` not at all.
        """
        pattern = _alternatives(tuple(marks))
        while True:
            end = self._visible_end
            match = pattern.search(self._buffer, self._position, end)
            if match is not None:
                self._give(match.start(), sink)
                return match.group()
            unfinished = _unfinished(self._buffer[self._position : end], marks)
            self._give(end if self.is_last and not drop_unfinished else end - unfinished, sink)
            if self.is_last:
                self._position = end
                return ""
            yield

    def text_until(self, marks: Sequence[str], sink: TextSink, drop_unfinished: bool = False) -> Step[str]:
        """``text_before``, and the mark is consumed."""
        mark = yield from self.text_before(marks, sink, drop_unfinished)
        self._position += len(mark)
        return mark

    def word_until(self, ends: Sequence[str], max_chars: int = 256, banned: str = "\n") -> Step[tuple[str, str]]:
        """Consume a short text and the mark behind it: (text, mark).

        The mark is "" when the text is longer than ``max_chars``, holds a ``banned`` character, or the end comes.
        """
        pattern = _alternatives(tuple(ends))
        longest = max_chars + max(map(len, ends))
        while True:
            ahead = self._buffer[self._position : min(self._position + longest, self._visible_end)]
            match = pattern.search(ahead)
            text = ahead[: len(ahead) - _unfinished(ahead, ends) if match is None else match.start()]
            spoiled = len(text) > max_chars or any(char in banned for char in text)
            if match is not None and not spoiled:
                self._position += match.end()
                return text, match.group()
            if spoiled or self.is_last:
                return "", ""
            yield

    def _give(self, end: int, sink: TextSink) -> None:
        if end > self._position:
            text = self._buffer[self._position : end]
            self._position = end
            sink(text)


@lru_cache(maxsize=256)
def _alternatives(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)) if marks else r"(?!)")


def _unfinished(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins some mark."""
    longest = max(map(len, marks), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        tail = text[-size:]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0


class ReaderParser:
    """Runs a reader over pieces. Subclasses implement ``_read`` and append to ``_events``."""

    def __init__(self) -> None:
        self._cursor = Cursor()
        self._events: list[Event] = []
        self._reader: Step[None] | None = None
        self._done = False

    def _read(self) -> Step[None]:
        raise NotImplementedError

    def feed(self, text: str) -> list[Event]:
        if text:
            self._cursor.append(text)
        return self._resume()

    def finish(self) -> list[Event]:
        self._cursor.end()
        return self._resume()

    def _resume(self) -> list[Event]:
        if self._reader is None:
            self._reader = self._read()
        if not self._done:
            try:
                next(self._reader)
            except StopIteration:
                self._done = True
        events, self._events = self._events, []
        return events
