"""Following a JSON value while it is being written (RFC 8259), with one kindness.

The scanner is a pushdown automaton over characters: it knows at every point whether the text can still become a
JSON value, and stops at the first character that cannot. The kindness: control characters inside strings, which
JSON forbids and models write, come out escaped.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_BLANK = re.compile(r"[ \t\r\n]+")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]+")
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")


class _Mode(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()  # a value, or the array ends
    KEY = auto()
    FIRST_KEY = auto()  # a key, or the object ends
    COLON = auto()
    AFTER = auto()  # behind a value inside an object or array
    SCALAR = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    DONE = auto()
    BROKEN = auto()


class JsonScanner:
    """One value. ``feed`` until ``done`` or ``broken``; leading white space is allowed."""

    __slots__ = ("_hex_left", "_in_key", "_mode", "_scalar", "_stack")

    def __init__(self) -> None:
        self._mode = _Mode.VALUE
        self._stack: list[str] = []
        self._in_key = False
        self._scalar = ""
        self._hex_left = 0

    @property
    def done(self) -> bool:
        return self._mode is _Mode.DONE

    @property
    def broken(self) -> bool:
        return self._mode is _Mode.BROKEN

    def _in_scalar(self) -> bool:
        return self._mode is _Mode.SCALAR

    def feed(self, text: str) -> tuple[int, str]:
        """Take a piece: (characters that belong to the value, those characters as JSON)."""
        out: list[str] = []
        at = 0
        while at < len(text) and self._mode not in (_Mode.DONE, _Mode.BROKEN):
            if self._mode in (_Mode.STRING, _Mode.ESCAPE, _Mode.HEX):
                at = self._string(text, at, out)
            elif self._mode is _Mode.SCALAR:
                at = self._number_or_word(text, at, out)
            elif (blank := _BLANK.match(text, at)) is not None:
                out.append(blank.group())
                at = blank.end()
            elif self._structure(text[at]):
                if not self._in_scalar():  # a scalar's first character is read with the others
                    out.append(text[at])
                    at += 1
            else:
                self._mode = _Mode.BROKEN
        return at, "".join(out)

    def _string(self, text: str, at: int, out: list[str]) -> int:
        char = text[at]
        if self._mode is _Mode.ESCAPE:
            if char not in '"\\/bfnrtu':
                self._mode = _Mode.BROKEN
                return at
            self._mode, self._hex_left = (_Mode.HEX, 4) if char == "u" else (_Mode.STRING, 0)
        elif self._mode is _Mode.HEX:
            if char not in _HEX:
                self._mode = _Mode.BROKEN
                return at
            self._hex_left -= 1
            if self._hex_left == 0:
                self._mode = _Mode.STRING
        elif (plain := _PLAIN.match(text, at)) is not None:
            out.append(plain.group())
            return plain.end()
        elif char == '"':
            self._mode = _Mode.COLON if self._in_key else self._mode_after_value()
        elif char == "\\":
            self._mode = _Mode.ESCAPE
        else:
            char = json.dumps(char)[1:-1]
        out.append(char)
        return at + 1

    def _number_or_word(self, text: str, at: int, out: list[str]) -> int:
        run = _SCALAR_RUN.match(text, at)
        if run is not None:
            self._scalar += run.group()
            out.append(run.group())
            at = run.end()
        if at < len(text):  # what follows shows that the scalar is over
            valid = _SCALAR.fullmatch(self._scalar) is not None
            self._mode = self._mode_after_value() if valid else _Mode.BROKEN
        return at

    def _structure(self, char: str) -> bool:
        """Change mode for a character outside strings and scalars; False when it cannot stand here."""
        mode = self._mode
        if mode in (_Mode.VALUE, _Mode.FIRST_VALUE):
            if char in "{[":
                self._stack.append(char)
                self._mode = _Mode.FIRST_KEY if char == "{" else _Mode.FIRST_VALUE
            elif char == '"':
                self._mode, self._in_key = _Mode.STRING, False
            elif char in "-0123456789tfn":
                self._mode, self._scalar = _Mode.SCALAR, ""
            else:
                return char == "]" and mode is _Mode.FIRST_VALUE and self._close("[")
            return True
        if mode in (_Mode.KEY, _Mode.FIRST_KEY):
            if char == '"':
                self._mode, self._in_key = _Mode.STRING, True
                return True
            return char == "}" and mode is _Mode.FIRST_KEY and self._close("{")
        if mode is _Mode.COLON:
            self._mode = _Mode.VALUE
            return char == ":"
        if char == ",":
            self._mode = _Mode.KEY if self._stack[-1] == "{" else _Mode.VALUE
            return True
        return char in "}]" and self._close("{" if char == "}" else "[")

    def _close(self, opening: str) -> bool:
        if self._stack[-1] != opening:
            return False
        self._stack.pop()
        self._mode = self._mode_after_value()
        return True

    def _mode_after_value(self) -> _Mode:
        return _Mode.AFTER if self._stack else _Mode.DONE


def escaped(text: str) -> str:
    """``text`` as the inside of a JSON string; pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_object(text: str) -> bool:
    """Whether ``text`` is one JSON object."""
    scanner = JsonScanner()
    if not text.lstrip().startswith("{"):
        return False
    used, _ = scanner.feed(text)
    return scanner.done and not text[used:].strip()
