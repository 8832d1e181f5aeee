"""What a running request tells its renderer: one vocabulary for all API dialects, streamed or not.

Order: ``Started``; then, within one sequence, an optional ``PromptScored``, any number of ``TextDelta``,
``ReasoningDelta`` and calls (``CallStarted``, ``CallArguments`` …, ``CallEnded``, never two at once), then one
``SequenceFinished``.
``Usage`` is the last event of a request that did not fail. Events come in lists, one list per batch of engine
outputs. ``Folded`` makes the whole answer of the same events.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.request import FinishReason


class ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """A token with its logprob, ready to be shown.

    Attributes:
        token_id: in the vocabulary.
        text: what the token added to the text ("" for all but the last token of a character that several
            tokens make up); for alternatives that were not sampled, the token's text on its own.
        data: the token's own bytes.
        logprob: finite; None only for a prompt's first token, which nothing predicts.
        top: the most likely tokens here, best first; their own ``top`` is empty.
    """

    token_id: int
    text: str
    data: bytes
    logprob: float | None
    top: tuple[ScoredToken, ...] = ()


class Started(msgspec.Struct, frozen=True, gc=False):
    """The engine works on a prompt (once per prompt): so many of its tokens came from the prefix cache."""

    cached_tokens: int


class PromptScored(msgspec.Struct, frozen=True, gc=False):
    """Logprobs of the prompt's tokens; once per prompt, with the index of its first sequence."""

    index: int
    tokens: tuple[ScoredToken, ...]


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of one sequence and the tokens it came from.

    ``token_ids`` of all deltas together are every token that counts as completion, an end token or the tokens of
    a matched stop string included. ``logprobs`` (when asked) has one entry per token whose text is in the
    answer. Either may be empty where the other is not. Where reasoning and calls are parsed, the tokens and
    logprobs of all kinds of text come with deltas that may have no text of their own.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ScoredToken, ...] = ()


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """Text that the model thought aloud; never empty."""

    index: int
    text: str


class CallStarted(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins; ``call`` counts 0, 1, … within the sequence."""

    index: int
    call: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """The next piece of a call's arguments, as JSON text; never empty."""

    index: int
    call: int
    text: str


class CallEnded(msgspec.Struct, frozen=True, gc=False):
    """A call is over; ``complete``: its joined arguments are a JSON object (otherwise: what the model wrote)."""

    index: int
    call: int
    complete: bool


class SequenceFinished(msgspec.Struct, frozen=True, gc=False):
    """One sequence is over.

    Attributes:
        stop: the stop string or the asked-for stop token that ended it.
        completion_tokens: all that were sampled, those of thinking included.
        reasoning_tokens: of these, the tokens up to the last piece of each thinking block, markup included.
        num_calls: tool calls in the answer.
    """

    index: int
    reason: FinishReason
    stop: str | int | None
    completion_tokens: int
    reasoning_tokens: int = 0
    num_calls: int = 0


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of the whole request: each prompt once, the completions of all sequences summed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0


class Embedded(msgspec.Struct, frozen=True, gc=False):
    """A prompt's hidden state (once per prompt, where asked for): little-endian float32, not normalised."""

    index: int
    hidden: bytes


class KeepAlive(msgspec.Struct, frozen=True, gc=False):
    """Nothing has happened for a while; the connection is still wanted."""


Event = (
    Started
    | Embedded
    | PromptScored
    | TextDelta
    | ReasoningDelta
    | CallStarted
    | CallArguments
    | CallEnded
    | SequenceFinished
    | Usage
    | KeepAlive
)


class FoldedCall:
    """One tool call; ``arguments`` is JSON text if ``complete``, else what the model wrote."""

    def __init__(self, started: CallStarted) -> None:
        self.id = started.id
        self.name = started.name
        self._arguments: list[str] = []
        self.complete = False

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    def add(self, piece: CallArguments) -> None:
        self._arguments.append(piece.text)


class FoldedSequence:
    """All that one sequence said, text of a kind joined."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[FoldedCall] = []
        self.token_ids: list[int] = []
        self.logprobs: list[ScoredToken] = []
        self.prompt: tuple[ScoredToken, ...] = ()
        self.finished: SequenceFinished | None = None

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add(self, event: TextDelta | ReasoningDelta | CallStarted | CallArguments | CallEnded) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
                self.token_ids.extend(event.token_ids)
                self.logprobs.extend(event.logprobs)
            case ReasoningDelta():
                self._reasoning.append(event.text)
            case CallStarted():
                self.calls.append(FoldedCall(event))
            case CallArguments():
                self.calls[event.call].add(event)
            case CallEnded():
                self.calls[event.call].complete = event.complete


class Folded:
    """A whole answer, folded from its events: ``sequences`` by index, and the usage."""

    def __init__(self, num_sequences: int) -> None:
        self.sequences = [FoldedSequence() for _ in range(num_sequences)]
        self.usage = Usage(0, 0, 0)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case TextDelta() | ReasoningDelta() | CallStarted() | CallArguments() | CallEnded():
                    self.sequences[event.index].add(event)
                case SequenceFinished():
                    self.sequences[event.index].finished = event
                case PromptScored():
                    self.sequences[event.index].prompt = event.tokens
                case Usage():
                    self.usage = event
                case KeepAlive() | Started() | Embedded():
                    pass
