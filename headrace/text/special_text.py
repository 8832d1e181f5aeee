"""Finding the text of special tokens inside other text, and defusing it.

A prompt is a template's own text with users' text inside. Where users' text spells a control token, the
control token must not come out. Before rendering, such places get a guard character that occurs nowhere
else: inside every special text, and at a string's ends where it could complete one together with its
neighbours. In the rendered text the special tokens that are still intact are then the template's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

# Noncharacters: valid in strings, never meant for interchange.
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class SpecialText:
    """The texts of a vocabulary's special tokens (those of one character cannot be guarded and are left out).

    Args:
        ids: text -> token id.
    """

    __slots__ = ("_first", "_haystack", "_ids", "_lengths", "_max_length", "_prefixes", "_suffixes")

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token_id for text, token_id in ids.items() if len(text) > 1}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {char: sorted(found, reverse=True) for char, found in lengths.items()}
        self._first = re.compile("[" + "".join(map(re.escape, lengths)) + "]") if lengths else None
        self._prefixes = {text[:cut] for text in self._ids for cut in range(1, len(text))}
        self._suffixes = {text[cut:] for text in self._ids for cut in range(1, len(text))}
        self._haystack = "\0".join(self._ids)
        self._max_length = max(map(len, self._ids), default=0)

    def _match(self, text: str, position: int) -> int:
        """Length of the longest special text at ``position``, 0 when there is none."""
        for length in self._lengths.get(text[position], ()):
            candidate = text[position : position + length]  # shorter at the end of the text
            if candidate in self._ids:
                return len(candidate)
        return 0

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Leftmost, longest, non-overlapping occurrences as (start, end, token id)."""
        position = 0
        while self._first is not None and (candidate := self._first.search(text, position)) is not None:
            start = candidate.start()
            length = self._match(text, start)
            if length:
                yield start, start + length, self._ids[text[start : start + length]]
            position = start + max(length, 1)

    def broken(self, text: str, guard: str) -> str:
        """``text`` with ``guard`` after the first character of every occurrence, overlapping ones too."""
        if self._first is None:
            return text
        parts: list[str] = []
        done = 0
        for candidate in self._first.finditer(text):
            if self._match(text, candidate.start()):
                parts += [text[done : candidate.end()], guard]
                done = candidate.end()
        return "".join(parts) + text[done:] if parts else text

    def guarded(self, text: str, guard: str) -> str:
        """``broken`` text, with ``guard`` also at ends where neighbouring text could complete an occurrence."""
        if not text or self._first is None:
            return text
        longest = min(len(text), self._max_length - 1)
        sizes = range(1, longest + 1)
        inside = len(text) < self._max_length and text in self._haystack
        head = guard if inside or any(text[:size] in self._suffixes for size in sizes) else ""
        tail = guard if inside or any(text[-size:] in self._prefixes for size in sizes) else ""
        return head + self.broken(text, guard) + tail

    def split(self, text: str) -> list[str | int]:
        """``text`` as pieces between special tokens, and the tokens' ids."""
        parts: list[str | int] = []
        done = 0
        for start, end, token_id in self.find(text):
            if start > done:
                parts.append(text[done:start])
            parts.append(token_id)
            done = end
        if done < len(text):
            parts.append(text[done:])
        return parts


def unused_guards(texts: Iterable[str]) -> tuple[str, str]:
    """Two guard characters that are in none of ``texts``.

    Raises ValueError when too many candidates are used, which no honest text does.
    """
    used: set[str] = set()
    for text in texts:
        if not text.isascii():
            used.update(char for char in _GUARDS if char in text)
    free = [char for char in _GUARDS if char not in used]
    if len(free) < 2:
        raise ValueError("they use all reserved noncharacters")
    return free[0], free[1]
