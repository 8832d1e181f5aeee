"""Percentiles, prompts, event parsing: the parts of the load generator that need no server."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.http_stream import Server
from headrace.bench.sse import Event, EventParser
from headrace.bench.stats import percentile
from headrace.bench.workload import chat_requests, make_prompt

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(numbers, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_are_ordered_and_within_range(values: list[float], low: float, high: float) -> None:
    low, high = sorted((low, high))
    at_low, at_high = percentile(values, low), percentile(values, high)
    assert at_low is not None and at_high is not None
    assert min(values) <= at_low <= at_high + 1e-6 <= max(values) + 2e-6


@given(numbers)
def test_the_50th_percentile_is_the_median(values: list[float]) -> None:
    assert percentile(values, 50) == pytest.approx(statistics.median(values))


def test_percentile_of_nothing_is_none() -> None:
    assert percentile([], 50) is None


@given(st.integers(0, 5), st.integers(14, 200))
def test_prompts_have_so_many_words_and_differ_at_once(seed: int, words: int) -> None:
    prompts = [make_prompt(words + 2, seed, index) for index in range(20)]
    assert {len(prompt.split()) for prompt in prompts} == {words + 2}
    assert prompts == [make_prompt(words + 2, seed, index) for index in range(20)]
    assert len({" ".join(prompt.split()[:2]) for prompt in prompts}) > 15


def test_requests_ask_for_equal_lengths() -> None:
    (request,) = chat_requests("m", 1, words=40, output_tokens=32, seed=1, extra={"user": "u"})
    assert request.body["max_tokens"] == 32 and request.body["ignore_eos"] is True and request.body["user"] == "u"


STREAM = (
    b": hello\r\n\r\nevent: ping\ndata: {}\n\nid: 4\ndata:one\ndata:  two\r\n\r\ndata: \xf0\x9f\x98\x80\n\n\n\n"
)
EVENTS = [Event("ping", "{}"), Event("", "one\n two"), Event("", "😀")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_packets_end(cuts: list[int]) -> None:
    parser = EventParser()
    borders = [0, *sorted(cuts), len(STREAM)]
    seen = [event for a, b in pairwise(borders) for event in parser.feed(STREAM[a:b])]
    assert seen == EVENTS


def test_urls() -> None:
    assert Server.of("http://[::1]:8000/") == Server("::1", 8000, "", False)
    assert Server.of("https://example.com/llm/") == Server("example.com", 443, "/llm", True)
    for wrong in ("localhost:8000", "ftp://x", "http://"):
        with pytest.raises(ValueError, match="not an http"):
            Server.of(wrong)
