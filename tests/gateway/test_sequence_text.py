"""Text of a sequence depends on its tokens alone, never on how they were cut into outputs or deltas."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import scripted

from headrace.gateway.events import Folded, SequenceFinished, TextDelta
from headrace.gateway.sequence_text import SequenceText, TextOptions
from headrace.request import FinishReason, SequenceOutput, TokenLogprobs
from headrace.text import model_text
from headrace.text.tokenizer import Tokenizer

WORDS = scripted.vocabulary()
END = WORDS.added["<|im_end|>"]
# Bytes, pieces, whole characters cut over tokens, and special tokens.
TOKENS = st.sampled_from([*range(0x61, 0x66), *"😀é".encode(), END, WORDS.ids[b" gam"], WORDS.ids[b"ma"]])
STOPS = st.lists(st.sampled_from(["ab", "abc", "ba", "gamma", "é", "�", "e😀", "d"]), max_size=3, unique=True)


@pytest.fixture(scope="module")
def tokenizer(scripted_folder: Callable[[str], Path]) -> Tokenizer:
    return model_text.load(scripted_folder("plain")).tokenizer


def outputs(token_ids: list[int], cuts: list[int], reason: FinishReason, scored: bool) -> list[SequenceOutput]:
    borders = [0, *sorted({cut for cut in cuts if 0 < cut < len(token_ids)}), len(token_ids)]
    pieces = [token_ids[a:b] for a, b in pairwise(borders)]
    return [
        SequenceOutput(
            request_id="r",
            token_ids=piece,
            logprobs=[TokenLogprobs(-0.5, [(t, -0.5)]) for t in piece] if scored else [],
            finish_reason=reason if last else None,
        )
        for piece, last in zip(pieces, [*[False] * (len(pieces) - 1), True], strict=True)
    ]


def folded(tokenizer: Tokenizer, options: TextOptions, pieces: list[SequenceOutput]) -> tuple[Folded, int]:
    sequence = SequenceText(0, tokenizer, options)
    result = Folded(1)
    num_deltas = 0
    for piece in pieces:
        events = sequence.push(piece)
        num_deltas += sum(isinstance(event, TextDelta) for event in events)
        result.add(events)
    assert sequence.finished
    return result, num_deltas


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(TOKENS, min_size=1, max_size=24),
    cuts=st.lists(st.integers(1, 23), max_size=10),
    stops=STOPS,
    include=st.booleans(),
    skip_special=st.booleans(),
    min_tokens=st.integers(0, 6),
    interval=st.sampled_from([1, 2, 5, 100]),
    reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
@example([97, 240, 240, 97], [3], [], False, False, 0, 1, FinishReason.STOP)  # a broken character before the end
def test_any_cut_gives_the_same_answer(
    tokenizer: Tokenizer,
    token_ids: list[int],
    cuts: list[int],
    stops: list[str],
    include: bool,
    skip_special: bool,
    min_tokens: int,
    interval: int,
    reason: FinishReason,
) -> None:
    def options(interval: int | None) -> TextOptions:
        return TextOptions(
            stop=tuple(stops), include_stop=include, skip_special=skip_special, min_tokens=min_tokens,
            end_token_ids=frozenset({END}), interval=interval,
        )  # fmt: skip

    whole, num_deltas = folded(tokenizer, options(None), outputs(token_ids, [], reason, True))
    cut, _ = folded(tokenizer, options(interval), outputs(token_ids, cuts, reason, True))
    first, second = whole.sequences[0], cut.sequences[0]
    assert num_deltas <= 1
    assert first.text == second.text
    assert first.token_ids == second.token_ids
    assert first.logprobs == second.logprobs
    assert first.finished == second.finished
    finished = first.finished
    assert isinstance(finished, SequenceFinished)
    assert len(first.token_ids) == finished.completion_tokens
    assert "".join(token.text for token in first.logprobs) == first.text
    if isinstance(finished.stop, str):
        assert first.text.endswith(finished.stop) == include or not include


def test_ids_beyond_the_vocabulary_are_tokens_without_text(tokenizer: Tokenizer) -> None:
    padded = tokenizer.vocab_size + 5
    pieces = outputs([0x61, padded, 0x62], [1, 2], FinishReason.LENGTH, True)
    answer, _ = folded(tokenizer, TextOptions(), pieces)
    assert answer.sequences[0].text == "ab"
    assert answer.sequences[0].token_ids == [0x61, padded, 0x62]
    assert [token.data for token in answer.sequences[0].logprobs] == [b"a", b"", b"b"]


def test_nothing_follows_the_end(tokenizer: Tokenizer) -> None:
    sequence = SequenceText(0, tokenizer, TextOptions(stop=("b",)))
    sequence.push(SequenceOutput(request_id="r", token_ids=[0x61, 0x62, 0x63]))
    assert sequence.finished
    assert sequence.push(SequenceOutput(request_id="r", token_ids=[0x64])) == []
    assert sequence.end(FinishReason.ABORT) == []
    assert sequence.completion_tokens == 2
