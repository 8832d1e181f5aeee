"""Tokens of one sequence -> events: detokenize, stop strings, answer parser, then deltas of the wanted size.

    tokens ──► detokenizer ──► stop strings ──► [reasoning and calls] ──► delivery ──► TextDelta … SequenceFinished

Tokens are taken one by one, whatever batch they came in, so the result depends on the tokens alone: a stop
string ends the sequence at the very token that completes it, and tokens behind it do not exist.

    detokenized text:  | delivered ......... | released | held back by the stop strings |
    tokens:            | delivered ..... | waiting (their text is not all released yet) |
"""

from __future__ import annotations

from collections import deque

import msgspec

from headrace.gateway.events import Event, ScoredToken, SequenceFinished, TextDelta
from headrace.gateway.parsed_text import AnswerOptions, ParsedText
from headrace.request import FinishReason, SequenceOutput, TokenLogprobs
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop_strings import StopStrings
from headrace.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0


class ThinkingLimit(msgspec.Struct, frozen=True):
    """Thinking is cut short: behind so many tokens of it the sequence goes on with ``ending``.

    Attributes:
        tokens: at least 1.
        ending: token ids that end a block and begin the answer; they count as completion.
        max_tokens: of the sequence; where it would be reached, nothing is cut.
    """

    tokens: int
    ending: tuple[int, ...]
    max_tokens: int


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens become text; shared by all sequences of a request.

    Attributes:
        stop: stop strings.
        include_stop: whether the stop string, or the stop token's text, is part of the answer.
        skip_special: whether special tokens have no text.
        end_token_ids: the model's own end tokens: they end a sequence without being reported as ``stop``.
        min_tokens: stop strings are not looked for in the text of so many first tokens.
        interval: tokens per delta behind the first; None: one delta at the end.
        kept_token_ids: special tokens whose text is seen all the same: the answer parser needs them.
        thinking: limit of the tokens of thinking; needs an ``answer`` with a reasoning parser.
        answer: how the text is split into reasoning, content and calls; None: all of it is content.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    end_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    interval: int | None = 1
    kept_token_ids: frozenset[int] = frozenset()
    answer: AnswerOptions | None = None
    thinking: ThinkingLimit | None = None


class _Waiting(msgspec.Struct, gc=False):
    """A token that is not delivered, and where its text begins in the sequence's text."""

    token_id: int
    start: int
    text: str
    logprobs: TokenLogprobs | None

    def is_covered(self, released_chars: int) -> bool:
        """Whether all its text is released; a token without text waits for the character behind it."""
        return self.start < released_chars and self.start + len(self.text) <= released_chars


class SequenceText:
    """Text of one sequence as its outputs come. ``push`` returns events; ``finished`` says that it is over.

    ``taken`` is not None when thinking was cut short: the engine has to go on behind these tokens (all of the
    sequence so far), and what it made beyond them does not exist.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._options = options
        self._detokenizer = IncrementalDetokenizer(tokenizer, options.skip_special, kept=options.kept_token_ids)
        self._stops = StopStrings(options.stop, options.include_stop) if options.stop else None
        self._waiting: deque[_Waiting] = deque()
        self._parsed = ParsedText(index, options.answer) if options.answer is not None else None
        self._text: list[str] = []  # released, not delivered; where there is no parser
        self._seen_chars = 0  # length of the detokenized text
        self._released_chars = 0  # of that, what the stop strings let go
        self._delivered_any = False
        self._token_ids: list[int] = []  # all of them, where there is a limit of thinking
        self.completion_tokens = 0
        self.finished = False
        self.taken: list[int] | None = None

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._parsed is None else self._parsed.reasoning_tokens

    def push(self, output: SequenceOutput) -> list[Event]:
        """Take new tokens; nothing after the end. A stop string may end the sequence before the engine does."""
        if self.finished:
            return []
        self.taken = None
        last = len(output.token_ids) - 1
        scored = output.logprobs or None
        for position, token_id in enumerate(output.token_ids):
            self.completion_tokens += 1
            logprobs = scored[position] if scored else None
            if position == last and output.finish_reason is FinishReason.STOP:
                return self._end_at_stop_token(token_id, logprobs)
            matched = self._take(token_id, self._text_of(token_id), logprobs)
            if matched is not None:
                return self._finish(FinishReason.STOP, matched)
            if self._parsed is not None:
                if self._parsed.is_over:
                    return self._finish(FinishReason.STOP, None)
                if self._options.thinking is not None and self._cut_thinking(token_id, self._options.thinking):
                    return self._deliver_if_due()
        if output.finish_reason is not None:
            self._release_rest()
            return self._finish(output.finish_reason, None)
        return self._deliver_if_due()

    def _deliver_if_due(self) -> list[Event]:
        interval = self._options.interval
        if interval is None or not (self._text or (self._parsed is not None and self._parsed.has_events)):
            return []
        return self._deliver() if not self._delivered_any or self._are_covered(interval) else []

    def end(self, reason: FinishReason) -> list[Event]:
        """End from outside (cancelled, for example): what is there is delivered."""
        if self.finished:
            return []
        self._release_rest()
        return self._finish(reason, None)

    # -- inside

    def _cut_thinking(self, token_id: int, limit: ThinkingLimit) -> bool:
        """At the limit: append the ending, which needs no engine. Stop strings do not apply to it."""
        self._token_ids.append(token_id)
        assert self._parsed is not None
        if (
            not self._parsed.is_thinking
            or self._parsed.reasoning_tokens < limit.tokens
            or self.completion_tokens + len(limit.ending) >= limit.max_tokens
        ):
            return False
        for forced in limit.ending:
            self.completion_tokens += 1
            self._token_ids.append(forced)
            self._append(forced, self._text_of(forced), None)
        self.taken = self._token_ids.copy()
        return True

    def _append(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> None:
        """Append one token, its text released at once, behind what stop strings held back."""
        if self._stops is not None:
            self._release(self._stops.finish())
        self._waiting.append(_Waiting(token_id, self._seen_chars, text, logprobs))
        self._seen_chars += len(text)
        if self._parsed is not None:
            self._parsed.token()
        self._release(text)

    def _text_of(self, token_id: int) -> str:
        """Text that the token completes; ids that pad the model's logits beyond the vocabulary have none."""
        return self._detokenizer.push(token_id) if token_id < self._tokenizer.vocab_size else ""

    def _take(self, token_id: int, text: str, logprobs: TokenLogprobs | None) -> str | None:
        """Append one token; returns the stop string that it completed."""
        start = self._seen_chars
        self._seen_chars += len(text)
        self._waiting.append(_Waiting(token_id, start, text, logprobs))
        if self._parsed is not None:
            self._parsed.token()
        if self._stops is None or self.completion_tokens <= self._options.min_tokens:
            self._release(text)
            return None
        released, matched = self._stops.push(text)
        self._release(released)
        return matched

    def _release(self, text: str) -> None:
        if text:
            self._released_chars += len(text)
            if self._parsed is None:
                self._text.append(text)
            else:
                self._parsed.feed(text)

    def _release_rest(self) -> None:
        """The engine ended the sequence: bytes of an unfinished character, then what stop strings held back."""
        rest = self._detokenizer.flush()
        if rest:
            self._seen_chars += len(rest)
            if self._waiting:
                self._waiting[-1].text += rest
        if self._stops is not None:
            released, matched = self._stops.push(rest)
            self._release(released)
            if matched is None:
                self._release(self._stops.finish())
        else:
            self._release(rest)

    def _end_at_stop_token(self, token_id: int, logprobs: TokenLogprobs | None) -> list[Event]:
        is_end = token_id in self._options.end_token_ids
        self._release_rest()
        if self._options.include_stop and not is_end:
            self._take(token_id, self._text_of(token_id), logprobs)
            self._release_rest()
        else:
            # Beyond the text: it counts as a token and has no place in text or logprobs.
            self._waiting.append(_Waiting(token_id, self._seen_chars, "", None))
        return self._finish(FinishReason.STOP, None if is_end else token_id)

    def _finish(self, reason: FinishReason, stop: str | int | None) -> list[Event]:
        self.finished = True
        num_calls = 0
        if self._parsed is not None:
            self._parsed.finish()
            num_calls = self._parsed.num_calls
        events = self._deliver(at_end=True)
        events.append(
            SequenceFinished(
                self._index, reason, stop, self.completion_tokens, self.reasoning_tokens, num_calls=num_calls
            )
        )
        return events

    def _are_covered(self, count: int) -> bool:
        """Whether so many tokens are covered. Those that are stand before those that are not."""
        return len(self._waiting) >= count and self._is_whole(count - 1)

    def _is_whole(self, place: int) -> bool:
        """Whether a waiting token's text is all released, and an end could not add to it."""
        waiting = self._waiting
        if not waiting[place].is_covered(self._released_chars):
            return False
        return place < len(waiting) - 1 or not self._detokenizer.is_pending

    def _deliver(self, at_end: bool = False) -> list[Event]:
        """One delta of the released text and the tokens it covers; all tokens at the end."""
        token_ids: list[int] = []
        scored: list[ScoredToken] = []
        while self._waiting and (at_end or self._is_whole(0)):
            token = self._waiting.popleft()
            token_ids.append(token.token_id)
            if token.logprobs is not None and token.start < self._released_chars:
                scored.append(self._scored(token, token.logprobs))
        text = "".join(self._text)
        self._text.clear()
        if self._parsed is None:
            if not (text or token_ids):
                return []
            self._delivered_any = True
            return [TextDelta(self._index, text, tuple(token_ids), tuple(scored))]
        further = self._parsed.take()
        if further and isinstance(first := further[0], TextDelta):
            text = first.text
            del further[0]
        if text or token_ids:
            further.insert(0, TextDelta(self._index, text, tuple(token_ids), tuple(scored)))
        self._delivered_any = self._delivered_any or bool(further)
        return further

    def _scored(self, token: _Waiting, logprobs: TokenLogprobs) -> ScoredToken:
        kept = self._released_chars - token.start
        text, cut = token.text[:kept], token.text[kept:]
        return scored_token(self._tokenizer, token.token_id, text, logprobs, self._options.skip_special, cut)


def scored_token(
    tokenizer: Tokenizer, token_id: int, text: str, logprobs: TokenLogprobs, skip_special: bool, cut: str = ""
) -> ScoredToken:
    """A token with its logprobs; ``text`` is its part of the answer, ``cut`` what a stop string took off it."""
    data = b"" if skip_special and tokenizer.is_special(token_id) else token_bytes(tokenizer, token_id)
    if cut and (end := data.rfind(cut.encode())) >= 0:
        data = data[:end]
    top = tuple(
        ScoredToken(other, text, data, finite(logprob)) if other == token_id else _alone(tokenizer, other, logprob)
        for other, logprob in logprobs.top
    )
    return ScoredToken(token_id, text, data, finite(logprobs.logprob), top)


def score_prompt(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[TokenLogprobs | None]
) -> tuple[ScoredToken, ...]:
    """A prompt's tokens with their logprobs; their texts joined are the prompt's text."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False, at_start=True)
    scored: list[ScoredToken] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        text = detokenizer.push(token_id)
        if entry is None:
            scored.append(ScoredToken(token_id, text, tokenizer.token_bytes(token_id), None))
        else:
            scored.append(scored_token(tokenizer, token_id, text, entry, skip_special=False))
    return tuple(scored)


def finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible is shown as ``MIN_LOGPROB``."""
    return logprob if logprob >= MIN_LOGPROB else MIN_LOGPROB


def _alone(tokenizer: Tokenizer, token_id: int, logprob: float) -> ScoredToken:
    text = tokenizer.token_text(token_id) if token_id < tokenizer.vocab_size else ""
    return ScoredToken(token_id, text, token_bytes(tokenizer, token_id), finite(logprob))


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """A token's own bytes; b"" for ids that pad the logits."""
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.vocab_size else b""
