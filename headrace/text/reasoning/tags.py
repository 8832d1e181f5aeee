"""Reasoning between two tags, such as ``<think>`` and ``</think>``.

Every block counts, wherever it stands. White space: line ends right behind an opening tag, and on both sides of
a closing tag, belong to the markup and are dropped, as are line ends before a block that begins the answer; all
other white space is text. An opening tag inside a block is text, except at the block's very beginning (the
template wrote it and the model repeats it). A closing tag without a block is text, except where it begins the
answer (the empty block of a model that was told not to think). A block that the answer's end cuts stays
reasoning.
"""

from __future__ import annotations

from headrace.text.reasoning.cursor import NEWLINES, ReaderParser, Step
from headrace.text.reasoning.events import Content, Reasoning


class TagReasoning(ReaderParser):
    """Splits reasoning from content at ``opening`` and ``closing``.

    Args:
        opening: tag that begins a block.
        closing: tag that ends it.
        opened: part of the answer that is already in the prompt, usually "" or the opening tag that the template
            wrote.
    """

    def __init__(self, opening: str, closing: str, opened: str = "") -> None:
        super().__init__()
        self._opening = opening
        self._closing = closing
        self._line_ends = ""  # seen in a block; dropped when its closing tag follows
        if opened:
            self.feed(opened)

    def _read(self) -> Step[None]:
        cursor = self._cursor
        before = yield from cursor.take_while(NEWLINES)
        mark = yield from cursor.literal(self._opening, self._closing)
        if not mark:
            self._content(before)
        while True:
            if mark == self._opening:
                mark = yield from self._block()
            if mark == self._closing:
                yield from cursor.skip(NEWLINES)
            if cursor.at_end:
                return
            mark = yield from cursor.text_until((self._opening,), self._content)

    def _block(self) -> Step[str]:
        """Behind an opening tag: its reasoning. Returns the closing tag, or "" at the end."""
        yield from self._cursor.skip(NEWLINES)
        if (yield from self._cursor.literal(self._opening)):
            yield from self._cursor.skip(NEWLINES)
        mark = yield from self._cursor.text_until((self._closing,), self._reasoning)
        if not mark:
            self._reasoning("", at_end=True)
        self._line_ends = ""
        return mark

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _reasoning(self, text: str, at_end: bool = False) -> None:
        text = self._line_ends + text
        kept = text if at_end else text.rstrip(NEWLINES)
        self._line_ends = text[len(kept) :]
        if kept:
            self._events.append(Reasoning(kept))
