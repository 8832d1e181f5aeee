"""Parsed answers depend on the tokens alone: not on outputs, intervals, or whether they are streamed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import scripted

from headrace.gateway.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Event,
    Folded,
    ReasoningDelta,
    SequenceFinished,
    TextDelta,
)
from headrace.gateway.parsed_text import AnswerOptions
from headrace.gateway.sequence_text import SequenceText, TextOptions, ThinkingLimit
from headrace.request import FinishReason, SequenceOutput
from headrace.text import model_text
from headrace.text.reasoning.events import ToolDefinition
from headrace.text.tokenizer import Tokenizer

IDS = scripted.vocabulary().ids
PIECES = [
    b"<think>", b"</think>", b"<thi", b"nk>", b"</th", b"ink>", b"<tool", b"_call>", b"</tool", b"_cal", b"l>",
    b'\n{"name": "add", "arguments": {"a": 1}}', b'\n{"na', b'me": "add", ', b'"arguments": {"a": 1, ', b"}}\n",
    b"\n", b" ", b"x", b"Sure. ", *(bytes([byte]) for byte in "é".encode()),
]  # fmt: skip
ANSWERS = [
    AnswerOptions(reasoning="think"),
    AnswerOptions(tools="hermes", definitions=(ToolDefinition("add"),)),
    AnswerOptions(reasoning="think", tools="hermes", definitions=(ToolDefinition("add"),)),
    AnswerOptions(reasoning="think", tools="hermes", opened="<think>", whole_calls=True),
    AnswerOptions(reasoning="think", tools="hermes", parallel=False),
    AnswerOptions(reasoning="think", opened="<think>", hides_reasoning=True),
]


@pytest.fixture(scope="module")
def tokenizer(scripted_folder: Callable[[str], Path]) -> Tokenizer:
    return model_text.load(scripted_folder("plain")).tokenizer


def run(tokenizer: Tokenizer, options: TextOptions, token_ids: list[int], cuts: list[int]) -> list[Event]:
    """All events of one sequence; the engine obeys where thinking is cut short."""
    sequence = SequenceText(0, tokenizer, options)
    events: list[Event] = []
    borders = [0, *sorted({cut for cut in cuts if 0 < cut < len(token_ids)}), len(token_ids)]
    for begin, end in pairwise(borders):
        position = begin
        while position < end and not sequence.finished:
            before = sequence.completion_tokens
            reason = FinishReason.LENGTH if end == len(token_ids) else None
            events += sequence.push(
                SequenceOutput(request_id="r", token_ids=token_ids[position:end], finish_reason=reason)
            )
            if sequence.taken is None:
                break
            # What lies behind the token at which thinking was cut was never generated; the rest comes anew.
            assert options.thinking is not None
            position += sequence.completion_tokens - before - len(options.thinking.ending)
    if not sequence.finished:
        events += sequence.end(FinishReason.LENGTH)
    return events


def summary(events: list[Event]) -> dict[str, Any]:
    folded = Folded(1)
    folded.add(events)
    sequence = folded.sequences[0]
    assert sequence.finished is not None
    finished = sequence.finished
    return {
        "text": sequence.text,
        "reasoning": sequence.reasoning,
        "calls": [(call.name, call.arguments, call.complete) for call in sequence.calls],
        "tokens": sequence.token_ids,
        "finish": (finished.reason, finished.stop, finished.completion_tokens, finished.reasoning_tokens),
    }


def check_grammar(events: list[Event]) -> None:
    """Calls count up, do not overlap, and nothing follows the finish."""
    is_open, calls = False, 0
    for event in events:
        match event:
            case CallStarted():
                assert not is_open and event.call == calls
                is_open = True
            case CallArguments():
                assert is_open and event.call == calls and event.text
            case CallEnded():
                assert is_open and event.call == calls
                is_open, calls = False, calls + 1
            case ReasoningDelta():
                assert not is_open and event.text
            case TextDelta():
                assert not (is_open and event.text)
    assert isinstance(events[-1], SequenceFinished)
    assert events[-1].num_calls == calls and not is_open
    assert events[-1].reasoning_tokens <= events[-1].completion_tokens


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, 23), max_size=8),
    interval=st.sampled_from([None, 1, 3]),
    answer=st.sampled_from(ANSWERS),
    stop=st.sampled_from([(), ("x",), ("ink",)]),
    budget=st.sampled_from([None, 1, 3]),
)
def test_only_tokens_decide(
    tokenizer: Tokenizer,
    pieces: list[bytes],
    cuts: list[int],
    interval: int | None,
    answer: AnswerOptions,
    stop: tuple[str, ...],
    budget: int | None,
) -> None:
    token_ids = [IDS.get(piece, piece[0]) for piece in pieces]
    ending = tuple(tokenizer.encode("\n</think>\n\n", parse_special=True))
    limit = ThinkingLimit(budget, ending, 60) if budget and answer.reasoning else None
    options = TextOptions(stop=stop, interval=interval, answer=answer, thinking=limit)
    whole = TextOptions(stop=stop, interval=None, answer=answer, thinking=limit)
    events = run(tokenizer, options, token_ids, cuts)
    check_grammar(events)
    assert summary(events) == summary(run(tokenizer, whole, token_ids, []))
    if answer.hides_reasoning:
        assert not any(isinstance(event, ReasoningDelta) for event in events)


def test_tokens_are_all_delivered(tokenizer: Tokenizer) -> None:
    token_ids = [IDS[piece] for piece in scripted.SCRIPTS["s04"].pieces]
    events = run(tokenizer, TextOptions(answer=ANSWERS[2]), token_ids, list(range(1, 20)))
    delivered = [token for event in events if isinstance(event, TextDelta) for token in event.token_ids]
    assert delivered == token_ids
