"""One sequence's text through its answer parser, as events of the pipeline.

Neighbouring pieces of a kind are merged until they are taken, so what is delivered together is one event. Tokens
are attributed as they come: a piece of reasoning claims every token since the piece before it, whatever its kind
(so an opening tag counts as reasoning, and a closing one goes to what follows).
"""

from __future__ import annotations

import msgspec

from headrace.gateway.events import CallArguments, CallEnded, CallStarted, Event, ReasoningDelta, TextDelta
from headrace.text.reasoning import events as parsed
from headrace.text.tools.answer import AnswerParser, answer_parser


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is split into reasoning, content and tool calls; shared by all sequences of a request.

    Attributes:
        reasoning: name of the reasoning parser; None: thinking is content, verbatim.
        tools: name of the tool-call parser; None: calls are content, verbatim.
        definitions: the declared tools.
        opened: what the prompt already holds of the answer.
        whole_calls: calls come only when complete; a broken one is content.
        parallel: False: the sequence ends with its first call.
        hides_reasoning: thinking is counted and not shown.
    """

    reasoning: str | None = None
    tools: str | None = None
    definitions: tuple[parsed.ToolDefinition, ...] = ()
    opened: str = ""
    whole_calls: bool = False
    parallel: bool = True
    hides_reasoning: bool = False

    def make_parser(self) -> AnswerParser:
        return answer_parser(
            reasoning=self.reasoning,
            tools=self.tools,
            definitions=self.definitions,
            opened=self.opened,
            whole_calls=self.whole_calls,
            parallel=self.parallel,
        )


class ParsedText:
    """Events of one sequence's text. ``token`` for each token, then ``feed`` with the text it released.

    Attributes:
        reasoning_tokens: so far.
        num_calls: calls begun so far.
    """

    def __init__(self, index: int, options: AnswerOptions) -> None:
        self._index = index
        self._parser = options.make_parser()
        self._hides_reasoning = options.hides_reasoning
        self._events: list[parsed.Event] = []
        self._unclaimed = 0
        self._is_thinking = False
        self.reasoning_tokens = 0
        self.num_calls = 0

    @property
    def is_over(self) -> bool:
        """The answer has ended by its own form: what follows does not belong to it."""
        return self._parser.is_over

    @property
    def is_thinking(self) -> bool:
        """The last token was a piece of reasoning: a block is open, and no mark is half written."""
        return self._is_thinking and not self._unclaimed

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def token(self) -> None:
        self._unclaimed += 1

    def feed(self, text: str) -> None:
        self._note(self._parser.feed(text))

    def finish(self) -> None:
        self._note(self._parser.finish())

    def take(self) -> list[Event]:
        """All events since the last time."""
        events, self._events = self._events, []
        merged: list[Event] = []
        position = 0
        while position < len(events):
            end = position + 1
            while end < len(events) and _continues(events[position], events[end]):
                end += 1
            merged.append(self._event(events[position:end]))
            position = end
        return merged

    def _note(self, events: list[parsed.Event]) -> None:
        for event in events:
            self._is_thinking = isinstance(event, parsed.Reasoning)
            if self._is_thinking:
                self.reasoning_tokens += self._unclaimed
            elif isinstance(event, parsed.ToolCallStart):
                self.num_calls += 1
            self._unclaimed = 0
        if self._hides_reasoning:
            events = [event for event in events if not isinstance(event, parsed.Reasoning)]
        self._events += events

    def _event(self, run: list[parsed.Event]) -> Event:
        match run[0]:
            case parsed.Content():
                return TextDelta(self._index, _joined(run), ())
            case parsed.Reasoning():
                return ReasoningDelta(self._index, _joined(run))
            case parsed.ToolCallStart(call, call_id, name):
                return CallStarted(self._index, call, call_id, name)
            case parsed.ToolCallArguments(call):
                return CallArguments(self._index, call, _joined(run))
            case parsed.ToolCallEnd(call, complete):
                return CallEnded(self._index, call, complete)


def _continues(first: parsed.Event, other: parsed.Event) -> bool:
    """Whether two neighbours are pieces of one text (calls do not overlap, so their arguments are)."""
    return type(first) is type(other) and not isinstance(first, parsed.ToolCallStart | parsed.ToolCallEnd)


def _joined(run: list[parsed.Event]) -> str:
    return "".join(
        event.delta if isinstance(event, parsed.ToolCallArguments) else event.text
        for event in run
        if not isinstance(event, parsed.ToolCallStart | parsed.ToolCallEnd)
    )
