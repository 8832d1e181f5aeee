"""The harmony format of gpt-oss: an answer is a sequence of messages, each with a channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The prompt ends in ``<|start|>assistant``. ``analysis`` is reasoning; ``final`` and ``commentary`` are content;
a message to a function is a call (``headrace.text.tools.harmony``), and content where calls are not parsed. A
message to another recipient (a built-in tool) is reasoning. Text outside any message is content. A header that
the answer's end cuts has no text and is dropped. (Source: the published description of the format.)
"""

from __future__ import annotations

import re

from headrace.text.reasoning.cursor import WHITE_SPACE, ReaderParser, Step
from headrace.text.reasoning.events import Content, Reasoning

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
FINAL = f"<|end|>{START}assistant{CHANNEL}final{MESSAGE}"
MARKS = frozenset({START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS})

_MAX_HEADER_CHARS = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(ReaderParser):
    """Splits channels.

    Args:
        reasoning: False: analysis is content too.
        opened: part of the answer that is already in the prompt, behind ``<|start|>assistant``.
    """

    def __init__(self, reasoning: bool = True, opened: str = "") -> None:
        super().__init__()
        self._splits_reasoning = reasoning
        if opened:
            self.feed(opened)

    def _read(self) -> Step[None]:
        cursor = self._cursor
        # Directly behind the prompt the header goes on: a recipient may come before the channel.
        begun = yield from cursor.literal(CHANNEL, MESSAGE, " to=")
        cursor.advance(-len(begun))
        in_header = bool(begun)
        while not cursor.at_end:
            if in_header:
                yield from self._message()
            elif not (yield from cursor.literal(*ENDS)):
                yield from cursor.text_before((START, CHANNEL, *ENDS), self._content)
            in_header = bool((yield from cursor.literal(START)))
            if not in_header and (yield from cursor.literal(CHANNEL)):
                cursor.advance(-len(CHANNEL))
                in_header = True

    def _message(self) -> Step[None]:
        cursor = self._cursor
        cursor.hold(_MAX_HEADER_CHARS)
        header: list[str] = []
        mark = yield from cursor.text_until((MESSAGE, START, *ENDS), header.append)
        if mark == MESSAGE:
            cursor.release()
            yield from self._body("".join(header))
            return
        cut_by_end = mark == "" and len(cursor.held()) < _MAX_HEADER_CHARS
        if cut_by_end:
            cursor.release()
            return
        # Not a header after all: text, the marks around it aside.
        cursor.rewind()
        yield from cursor.literal(CHANNEL)
        yield from cursor.text_before((START, CHANNEL, *ENDS), self._content)

    def _body(self, header: str) -> Step[None]:
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        is_analysis = channel is not None and channel.group(1) == "analysis"
        if recipient is not None and recipient.group(1) not in ("all", "user", "assistant"):
            target = recipient.group(1)
            if (yield from self._call(target, MESSAGE.join(("<|start|>assistant" + header, "")))):
                return
            is_analysis = not target.startswith("functions.")
        sink = self._reasoning if is_analysis and self._splits_reasoning else self._content
        if is_analysis:
            yield from self._cursor.skip(WHITE_SPACE)
        yield from self._cursor.text_before((*ENDS, START, CHANNEL), sink)

    def _call(self, recipient: str, markup: str) -> Step[bool]:
        """Read the body of a message to a tool as a call; False (nothing consumed): it is none.

        ``markup`` is what stands before the body.
        """
        return False
        yield

    def _content(self, text: str) -> None:
        self._events.append(Content(text))

    def _reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))
