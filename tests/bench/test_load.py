"""The load generator against a stub with scripted delays and faults: it must report what happened, no more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from scripted_http import (
    DONE,
    HEADERS,
    ROLE,
    Log,
    Script,
    chunked,
    event,
    good_stream,
    scripted_server,
    text_event,
    usage_event,
)

from headrace.bench.load import LoadOptions, LoadRequest, LoadResult, run_closed_loop
from headrace.bench.observe import Failure, Sample
from headrace.bench.stats import summarize


def run(
    script_of: Callable[[int], Script], count: int, streams: int, options: LoadOptions | None = None
) -> tuple[LoadResult, Log]:
    async def body() -> tuple[LoadResult, Log]:
        async with scripted_server(script_of) as (url, log):
            requests = [LoadRequest("/v1/chat/completions", {"n_th": index}) for index in range(count)]
            return await run_closed_loop(url, requests, streams, options), log

    return asyncio.run(body())


def one(
    pieces: Sequence[tuple[float, bytes]], *, abort: bool = False, options: LoadOptions | None = None
) -> Sample:
    result, _ = run(lambda index: Script(pieces, abort), 1, 1, options)
    return result.samples[0]


def until_close(*data: bytes) -> list[tuple[float, bytes]]:
    return [(0.0, HEADERS + b"\r\n"), *((0.0, piece) for piece in data)]


def test_a_good_stream_is_observed_whole() -> None:
    result, log = run(lambda index: good_stream(0.05, 0.02, 5), 1, 1, LoadOptions(keep_text=True))
    (sample,) = result.samples
    assert (sample.failure, sample.status, sample.finish_reason) == (None, 200, "length")
    assert (sample.prompt_tokens, sample.output_tokens, sample.estimated) == (7, 5, False)
    assert sample.text == "w0 w1 w2 w3 w4 "
    assert len(sample.text_times_s) == 5
    # the role alone is not a first token
    assert sample.first_text_s is not None and sample.first_text_s - sample.sent_s >= 0.05
    assert log.bodies == [{"stream": True, "stream_options": {"include_usage": True}, "n_th": 0}]


def test_every_kind_of_failure_is_named() -> None:
    cut = [(0.0, HEADERS + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(text_event("a")))]
    half_chunk = [(0.0, HEADERS + b"Transfer-Encoding: chunked\r\n\r\n" + b"40\r\ndata: ")]
    short = [(0.0, HEADERS + b"Content-Length: 500\r\n\r\n" + text_event("a", "stop"))]
    status = [(0.0, b"HTTP/1.1 503 x\r\nContent-Length: 4\r\n\r\nbusy")]
    error = {"error": {"message": "engine\ndied", "code": 500}}
    cases: list[tuple[Failure, Sample]] = [
        (Failure.STATUS, one(status)),
        (Failure.CUT, one(cut)),
        (Failure.CUT, one(cut, abort=True)),
        (Failure.CUT, one(half_chunk)),
        (Failure.CUT, one(short)),
        (Failure.CUT, one(until_close(text_event("a"), DONE))),
        (Failure.EMPTY, one(until_close())),
        (Failure.EMPTY, one(until_close(ROLE, DONE))),
        (Failure.EMPTY, one(until_close(text_event("", "stop"), usage_event(7, 0), DONE))),
        (Failure.ERROR_EVENT, one(until_close(text_event("a"), event(error), DONE))),
        (Failure.MALFORMED, one(until_close(b"data: {oops\n\n"))),
        (Failure.MALFORMED, one([(0.0, b"SSH-2.0 hello\r\n\r\n")])),
        (Failure.CONNECT, one([], abort=True)),
        (Failure.CONNECT, one([])),
        (Failure.TIMEOUT, one([(0.0, HEADERS + b"\r\n"), (5.0, b"")], options=LoadOptions(silence_timeout_s=0.1))),
    ]
    for kind, sample in cases:
        assert sample.failure == kind, sample
        assert sample.detail and "\n" not in sample.detail
    assert cases[0][1].detail == "503: busy"


def test_a_port_where_nobody_listens_is_a_failed_request() -> None:
    async def body() -> LoadResult:
        async with scripted_server(lambda index: Script([])) as (url, _):
            pass
        return await run_closed_loop(url, [LoadRequest("/", {})], 1)

    assert asyncio.run(body()).samples[0].failure == Failure.CONNECT


def test_silence_is_counted_from_the_last_byte() -> None:
    options = LoadOptions(silence_timeout_s=1.5)
    keep_alive = [(0.4, b": still here\n\n")] * 5
    sample = one([(0.0, HEADERS + b"\r\n"), *keep_alive, (0.0, text_event("a", "stop") + DONE)], options=options)
    assert sample.failure is None


def test_without_usage_tokens_are_an_estimate() -> None:
    sample = one(until_close(text_event("a b"), text_event("c", "stop"), DONE))
    assert (sample.failure, sample.output_tokens, sample.estimated) == (None, 2, True)
    assert sample.prompt_tokens is None


def test_events_cut_anywhere_between_packets() -> None:
    data = text_event("héllo") + text_event("!", "stop") + usage_event(1, 2) + DONE
    pieces = until_close(*(data[index : index + 1] for index in range(len(data))))
    sample = one(pieces, options=LoadOptions(keep_text=True))
    assert (sample.text, sample.output_tokens, sample.failure) == ("héllo!", 2, None)


@pytest.mark.parametrize(
    ("delta", "text"),
    [
        ({"reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm", "content": None}, "hm"),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}, "add{}"),
    ],
)
def test_reasoning_and_tool_calls_are_text(delta: dict[str, object], text: str) -> None:
    chunk = event({"choices": [{"delta": delta, "finish_reason": "stop"}]})
    assert one(until_close(chunk), options=LoadOptions(keep_text=True)).text == text


def test_legacy_completions_have_text() -> None:
    chunk = event({"choices": [{"text": "abc", "finish_reason": "stop"}]})
    assert one(until_close(chunk), options=LoadOptions(keep_text=True)).text == "abc"


@pytest.mark.parametrize("streams", [1, 4])
def test_never_more_streams_than_asked_and_always_that_many(streams: int) -> None:
    result, log = run(lambda index: good_stream(0.02, 0.001, 3), 12, streams)
    assert log.open_most == streams
    assert sorted(body["n_th"] for body in log.bodies) == list(range(12))  # type: ignore[type-var]
    assert [sample.index for sample in result.samples] == list(range(12))
    assert {sample.stream for sample in result.samples} == set(range(streams))


def test_failures_count_as_no_speed() -> None:
    """Of 100 requests 10 answer 500, 5 drop in mid-stream, 5 are empty, 5 send an error event."""
    faults = (
        [Script([(0.0, b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n")])] * 10
        + [Script([*until_close(text_event("a")), (0.01, b"")], abort=True)] * 5
        + [Script(until_close(DONE))] * 5
        + [Script(until_close(event({"error": {"message": "no"}})))] * 5
    )
    result, _ = run(lambda index: faults[index // 4] if index % 4 == 0 else good_stream(0.01, 0.0, 4), 100, 8)
    summary = summarize(result)
    assert summary.completed == 75
    assert summary.failed == {"cut": 5, "empty": 5, "error_event": 5, "status": 10}
    assert summary.output_tokens == 75 * 4
    assert summary.ttft_s.p50 is not None and summary.ttft_s.p50 >= 0.01
    assert Counter(sample.failure is None for sample in result.samples)[True] == 75


def test_figures_are_what_the_server_did() -> None:
    """20 requests, TTFT 100 … 290 ms in steps of 10, ten tokens 20 ms apart; compared with the stub's own log."""
    result, log = run(lambda index: good_stream(0.1 + 0.01 * index, 0.02, 10), 20, 20)
    summary = summarize(result)
    # never faster than scripted; the upper bounds are wide, since a busy machine delays both sides
    assert summary.ttft_s.p50 is not None and 0.195 <= summary.ttft_s.p50 < 0.5
    assert summary.ttft_s.p99 is not None and summary.ttft_s.p99 >= 0.28
    assert summary.itl_s.mean is not None and 0.019 <= summary.itl_s.mean < 0.1
    assert summary.tpot_s.mean == pytest.approx(summary.itl_s.mean, rel=0.1)
    served_s = max(log.ends_s) - min(log.arrivals_s)
    assert result.duration_s == pytest.approx(served_s, rel=0.25)
    assert summary.output_tokens_per_s == pytest.approx(200 / result.duration_s)


def test_nothing_measured_is_none() -> None:
    result, _ = run(lambda index: Script(until_close()), 2, 1)
    summary = summarize(result)
    assert (summary.completed, summary.output_tokens, summary.prompt_tokens) == (0, 0, None)
    assert summary.ttft_s.p50 is None and summary.itl_s.mean is None and summary.e2e_s.p99 is None


def test_headers_and_prefix_reach_the_server() -> None:
    async def body() -> Log:
        async with scripted_server(lambda index: good_stream(0.0, 0.0, 1)) as (url, log):
            options = LoadOptions(headers={"Authorization": "Bearer k"})
            await run_closed_loop(url + "/llm/", [LoadRequest("/v1/completions", {"stream": True})], 1, options)
            return log

    head = asyncio.run(body()).heads[0]
    assert head.startswith("POST /llm/v1/completions HTTP/1.1\r\n") and "Authorization: Bearer k\r\n" in head
