"""What a running request tells its renderer: one vocabulary for all API dialects, streamed or not.

Order within one sequence: an optional ``PromptScored``, then ``TextDelta`` …, then one ``SequenceFinished``.
``Usage`` is the last event of a request that did not fail. Events come in lists, one list per batch of engine
outputs. ``fold`` makes the whole answer of the same events.
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


class PromptScored(msgspec.Struct, frozen=True, gc=False):
    """Logprobs of the prompt's tokens; once per prompt, with the index of its first sequence."""

    index: int
    tokens: tuple[ScoredToken, ...]


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of one sequence and the tokens it came from.

    ``token_ids`` of all deltas together are every token that counts as completion, an end token or the tokens of
    a matched stop string included. ``logprobs`` (when asked) has one entry per token whose text is in the
    answer. Either may be empty where the other is not.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ScoredToken, ...] = ()


class SequenceFinished(msgspec.Struct, frozen=True, gc=False):
    """One sequence is over; ``stop`` is the stop string or the asked-for stop token that ended it."""

    index: int
    reason: FinishReason
    stop: str | int | None
    completion_tokens: int


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of the whole request: each prompt once, the completions of all sequences summed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class KeepAlive(msgspec.Struct, frozen=True, gc=False):
    """Nothing has happened for a while; the connection is still wanted."""


Event = PromptScored | TextDelta | SequenceFinished | Usage | KeepAlive


class FoldedSequence:
    """All that one sequence said."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[ScoredToken] = []
        self.prompt: tuple[ScoredToken, ...] = ()
        self.finished: SequenceFinished | None = None

    @property
    def text(self) -> str:
        return "".join(self._text)

    def add(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


class Folded:
    """A whole answer, folded from its events: ``sequences`` by index, and the usage."""

    def __init__(self, num_sequences: int) -> None:
        self.sequences = [FoldedSequence() for _ in range(num_sequences)]
        self.usage = Usage(0, 0, 0)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case TextDelta():
                    self.sequences[event.index].add(event)
                case SequenceFinished():
                    self.sequences[event.index].finished = event
                case PromptScored():
                    self.sequences[event.index].prompt = event.tokens
                case Usage():
                    self.usage = event
                case KeepAlive():
                    pass
