"""The parser of a whole answer: reasoning first, then tool calls on what is content.

    text ──► reasoning parser ──► content ──► tool-call parser ──► [whole calls only] ──► events
                             └──► reasoning ───────────────────────────────────────────►

The same object serves streamed and non-streamed answers. Dialects that cannot show arguments which are not JSON
ask for ``whole_calls``: then a call is held until it is complete, and one that stays incomplete becomes content.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.text import reasoning as reasoning_room
from headrace.text import tools as tools_room
from headrace.text.reasoning.events import (
    Content,
    Event,
    Parser,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    ToolDefinition,
)
from headrace.text.tools.harmony import HarmonyCalls


def answer_parser(
    *,
    reasoning: str | None = None,
    tools: str | None = None,
    definitions: Iterable[ToolDefinition] = (),
    opened: str = "",
    whole_calls: bool = False,
    parallel: bool = True,
) -> AnswerParser:
    """A parser of one answer.

    Args:
        reasoning: name of the reasoning parser; None: thinking is content, verbatim.
        tools: name of the tool-call parser; None (as for requests without tools): calls are content, verbatim.
        definitions: the declared tools.
        opened: what the prompt already holds of the answer (``reasoning.opening_of``, or a continued message).
        whole_calls: hold each call until it is complete.
        parallel: False: the answer is over with its first call.
    """
    stages: list[Parser] = []
    is_harmony = tools is not None and tools_room.is_harmony(tools)
    if is_harmony and (reasoning is None or reasoning_room.is_harmony(reasoning)):
        stages.append(HarmonyCalls(definitions, reasoning is not None, opened))
    else:
        if reasoning is not None:
            stages.append(reasoning_room.get_reasoning_parser(reasoning, opened))
        if tools is not None:
            stages.append(tools_room.get_tool_parser(tools, definitions))
    if whole_calls:
        stages.append(_WholeCalls())
    return AnswerParser(stages, parallel)


def needs_special(reasoning: str | None, tools: str | None) -> frozenset[str]:
    """Texts of special tokens that the answer's text must contain for these parsers."""
    found: frozenset[str] = frozenset()
    if reasoning is not None:
        found |= reasoning_room.needs_special(reasoning)
    if tools is not None:
        found |= tools_room.needs_special(tools)
    return found


class AnswerParser:
    """Stages in order; each sees the content that the one before it leaves.

    Attributes:
        is_over: the one call that is allowed has ended: what follows is ignored and need not be generated.
    """

    def __init__(self, stages: list[Parser], parallel: bool = True) -> None:
        self._stages = stages
        self._parallel = parallel
        self.is_over = False

    def feed(self, text: str) -> list[Event]:
        if not text or self.is_over:
            return []
        return self._limited(self._through([Content(text)], self._stages))

    def finish(self) -> list[Event]:
        if self.is_over:
            return []
        events: list[Event] = []
        for position, stage in enumerate(self._stages):
            events += self._through(stage.finish(), self._stages[position + 1 :])
        return self._limited(events)

    @staticmethod
    def _through(events: list[Event], stages: list[Parser]) -> list[Event]:
        for stage in stages:
            passed: list[Event] = []
            for event in events:
                if isinstance(event, Content):
                    passed += stage.feed(event.text)
                elif isinstance(stage, _WholeCalls):
                    passed += stage.take(event)
                else:
                    passed.append(event)
            events = passed
        return events

    def _limited(self, events: list[Event]) -> list[Event]:
        if not self._parallel:
            for position, event in enumerate(events):
                if isinstance(event, ToolCallEnd):
                    self.is_over = True
                    return events[: position + 1]
        return events


class _WholeCalls:
    """Holds the events of a call until its end; an incomplete call becomes its own text. Renumbers the calls."""

    def __init__(self) -> None:
        self._start: ToolCallStart | None = None
        self._arguments: list[str] = []
        self._count = 0

    def feed(self, text: str) -> list[Event]:
        return [Content(text)]

    def finish(self) -> list[Event]:
        return []

    def take(self, event: Event) -> list[Event]:
        match event:
            case ToolCallStart():
                self._start, self._arguments = event, []
                return []
            case ToolCallArguments(_, delta):
                self._arguments.append(delta)
                return []
            case ToolCallEnd(_, complete, raw):
                return self._end(raw) if complete else [Content(raw)]
        return [event]

    def _end(self, raw: str) -> list[Event]:
        assert self._start is not None
        index = self._count
        self._count += 1
        return [
            ToolCallStart(index, self._start.id, self._start.name),
            ToolCallArguments(index, "".join(self._arguments)),
            ToolCallEnd(index, True, raw),
        ]
