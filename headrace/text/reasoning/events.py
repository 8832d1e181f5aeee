"""What a parsed answer consists of: one vocabulary for reasoning, content and tool calls, streamed or not.

A parser is fed complete text pieces and answers with events. Joining the events of the same kind gives the
whole: that result depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought aloud; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. Indices count 0, 1, … within one answer; calls do not overlap."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    delta: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A call is over.

    Attributes:
        index: which call.
        complete: the joined arguments are a whole JSON object. False: the model broke off or broke the form, and
            the arguments hold what it wrote, not repaired and possibly not JSON.
        raw: the model's own text of this call, markup included, for who cannot show a broken call as a call.
    """

    index: int
    complete: bool
    raw: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments | ToolCallEnd


class Parser(Protocol):
    """Parser of one answer. ``finish`` is called once, also when the answer was cut by length."""

    def feed(self, text: str) -> list[Event]:
        """Take the next piece; pieces may be empty."""

    def finish(self) -> list[Event]:
        """The answer is over: give out what was held back."""


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A tool the model may call; ``parameters`` is its JSON schema ({} when the caller gave none)."""

    name: str
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class FoldedCall:
    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass(slots=True)
class FoldedAnswer:
    """A whole answer, folded from its events."""

    reasoning: str = ""
    content: str = ""
    calls: list[FoldedCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolCallStart(_, call_id, name):
                    self.calls.append(FoldedCall(call_id, name))
                case ToolCallArguments(index, delta):
                    self.calls[index].arguments += delta
                case ToolCallEnd(index, complete, _):
                    self.calls[index].complete = complete


def parse_whole(parser: Parser, text: str) -> FoldedAnswer:
    """Parse an answer that is already complete: the same parser, one piece."""
    folded = FoldedAnswer()
    folded.add(parser.feed(text))
    folded.add(parser.finish())
    return folded


EventSink = Callable[[Event], None]
TextSink = Callable[[str], None]
