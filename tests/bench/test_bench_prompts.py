"""Prompts: exact lengths under any tokenizer that counts sanely, and estimates that say so."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.cells import Cell, Load, all_cells, arrivals_s
from headrace.bench.compose import Composer, Shape
from headrace.bench.load import LoadRequest
from headrace.bench.prompts import Message, PromptSet, draft, fit
from headrace.bench.server import BenchFault
from headrace.bench.workload_file import read_workload


def tokenizer(piece: int, template: int) -> object:
    """Words cost a token per ``piece`` letters; a message costs ``template`` more."""
    calls: list[int] = []

    async def count(messages: list[Message]) -> int:
        calls.append(1)
        words = [word for message in messages for word in message["content"].split()]
        return template * len(messages) + sum(-(-len(word) // piece) for word in words)

    return count, calls


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(200, 1500), st.sampled_from(["medium", "777"]))
def test_fitted_lengths_are_exact(piece: int, template: int, target: int, name: str) -> None:
    count, calls = tokenizer(piece, template)  # type: ignore[misc]
    kind = PromptSet(name, target)
    fitted = asyncio.run(fit(draft(kind, "", "seed"), target, count))
    assert fitted.tokens == target == asyncio.run(count(fitted.messages))
    assert len(calls) <= 20
    again = asyncio.run(fit(draft(kind, "", "other"), target, count, fitted.num_words))
    assert again.tokens == target and again.messages != fitted.messages


def test_a_head_that_is_too_long_comes_alone() -> None:
    count, _ = tokenizer(1, 0)  # type: ignore[misc]
    fitted = asyncio.run(fit(draft(PromptSet("short", 64), "", "s"), 5, count))
    assert fitted.num_words == 0 and fitted.tokens > 5


def test_estimates_are_marked_and_near() -> None:
    composer = Composer(Shape("m"), seed=1)
    composed = asyncio.run(composer.compose(Cell("1000", 8, Load("concurrency", 1)), 0, 2))
    assert composed.exact is False and composed.tokens == 1000
    for request in composed.work:
        assert isinstance(request, LoadRequest)
        (message,) = request.body["messages"]  # type: ignore[misc]
        assert 600 < len(message["content"].split()) < 1100


def test_prompts_of_cells_and_repetitions_share_no_beginning() -> None:
    composer = Composer(Shape("m"), seed=1)
    beginnings = []
    for cell in all_cells(["short", "200"], [8], [Load("concurrency", 1), Load("rate", 2.0)], ["cold", "warm"]):
        for repetition in range(2):
            for request in asyncio.run(composer.compose(cell, repetition, 3)).work:
                assert isinstance(request, LoadRequest)
                beginnings.append(request.body["messages"][0]["content"][:20])  # type: ignore[index]
    assert len(set(beginnings)) == len(beginnings) == 48


@given(st.integers(2, 300), st.floats(0.1, 100), st.text(max_size=5))
def test_arrivals_have_their_rate(count: int, rate: float, seed: str) -> None:
    times = arrivals_s(count, rate, seed)
    assert times == sorted(times) == arrivals_s(count, rate, seed)
    assert times[0] == 0 and times[-1] == pytest.approx((count - 1) / rate)


def test_arrivals_spread_like_a_poisson_process() -> None:
    times = arrivals_s(4001, 10.0, "x")
    gaps = sorted(b - a for a, b in pairwise(times))
    assert gaps[2000] == pytest.approx(0.0693, rel=0.1)  # median of an exponential: ln 2 / rate
    assert arrivals_s(3, float("inf"), "x") == [0.0] * 3


# -- workload files --------------------------------------------------------------------------------------

SHAREGPT = [
    {"id": "a", "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"},
                                  {"from": "human", "value": "two"}]},
    {"conversations": [{"from": "gpt", "value": "nothing asked"}]},
]  # fmt: skip


def test_workloads(tmp_path: Path) -> None:
    lines = tmp_path / "w.jsonl"
    entries = [
        {"prompt": "p", "max_tokens": 5},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"turns": ["a", "b", "c"]},
    ]
    lines.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    first, second, third = read_workload(str(lines), turns=2)
    assert first.turns == ([{"role": "user", "content": "p"}],) and first.max_tokens == 5
    assert second.turns == (entries[1]["messages"],)
    assert [turn[0]["content"] for turn in third.turns] == ["a", "b"]
    listed = tmp_path / "sharegpt.json"
    listed.write_text(json.dumps(SHAREGPT))
    (talk,) = read_workload(str(listed), turns=9)
    assert [turn[0]["content"] for turn in talk.turns] == ["one", "two"]
    assert len(read_workload(str(listed))[0].turns) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [("{oops", "line 1: not JSON"), ('{"a": 1}', "line 1: needs one of"), ("", "no entry"),
     ("[1]", "not an object"),
     ('{"prompt": "p", "max_tokens": 0}', "at least 1")],
)  # fmt: skip
def test_wrong_workloads_name_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(BenchFault, match=says):
        read_workload(str(path))


def test_a_workload_is_sent_word_for_word_and_again_when_it_is_short(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt": "first"}\n{"prompt": "second", "max_tokens": 3}\n')
    composer = Composer(Shape("m"), seed=3, workload=read_workload(str(path)))
    composed = asyncio.run(composer.compose(Cell("workload", 50, Load("concurrency", 1)), 0, 4))
    bodies = [request.body for request in composed.work if isinstance(request, LoadRequest)]
    sent = sorted((body["messages"][0]["content"], body["max_tokens"]) for body in bodies)  # type: ignore[index]
    assert sent == [("first", 50), ("first", 50), ("second", 3), ("second", 3)]
    assert composed.tokens is None and composed.exact is None


def test_lines_end_where_json_says(tmp_path: Path) -> None:
    """Other separators may stand in a string as they are; editors write marks and carriage returns."""
    texts = ["a\u2028b", "c\u0085d", "e\u2029f\x7f"]
    path = tmp_path / "w.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    path.write_bytes("\r\n".join(["\ufeff" + lines[0], *lines[1:], ""]).encode())
    assert [entry.turns[0][0]["content"] for entry in read_workload(str(path))] == texts


@pytest.mark.parametrize("content", ["[" * 100_000, '{"prompt":' + "[" * 100_000])
def test_nesting_without_end_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(content)
    with pytest.raises(BenchFault, match=r"not (a )?JSON"):
        read_workload(str(path))
