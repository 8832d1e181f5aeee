"""Traces of a real server, as a collector gets them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from support.client import completion_body
from support.server import Serve, Server, ServerRoom, wait_until

from headrace.cli.flags import UsageError
from headrace.cli.serve import parse

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra headrace[otel] is not installed")

from otlp_collector import Collector, Span, collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
PHASES = ("tokenize", "queue", "prefill", "decode")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def traced(server_room: ServerRoom, collector: Collector) -> Iterator[Server]:
    server = server_room.start("plain", "--otlp-traces-endpoint", collector.url)
    yield server
    assert server.end() == 0, server.log()[-3000:]


def parent_of(number: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE[:-2]}{number:02x}-{PARENT}-{flags}"}


def trace_of(number: int) -> str:
    return f"{TRACE[:-2]}{number:02x}"


def await_root(collector: Collector, name: str, trace: str) -> Span:
    """The request's span; its phases came before or with it."""
    wait_until(lambda: collector.named(name, trace), 30, f"the span {name}")
    (root,) = collector.named(name, trace)
    return root


def phases(collector: Collector, root: Span) -> dict[str, Span]:
    below = [span for span in collector.spans if span.parent == root.id]
    found = {span.name: span for span in below}
    assert len(found) == len(below)
    assert all(span.trace == root.trace for span in below)
    return found


def check_order(root: Span, found: dict[str, Span]) -> None:
    assert tuple(found) == PHASES
    times = [found[name] for name in PHASES]
    assert all(span.start <= span.end for span in times)
    for before, after in pairwise(times):
        assert before.end <= after.start + 1_000_000  # two clock readings lie between the mappings
    assert root.start - 1_000_000 <= times[0].start and times[-1].end <= root.end + 1_000_000


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_its_phases_continue_the_clients_trace(
    stream: bool, traced: Server, collector: Collector
) -> None:
    number = 1 + stream
    began = time.time_ns()
    body = {"model": "m", "messages": [{"role": "user", "content": "SECRET<|s05|>"}], "temperature": 0, "seed": 3}
    answer = traced.client.post(
        "/v1/chat/completions", {**body, "max_tokens": 20, "stream": stream}, headers=parent_of(number)
    )
    assert answer.status_code == 200
    root = await_root(collector, "POST /v1/chat/completions", trace_of(number))
    assert root.parent == PARENT and root.service == "headrace" and not root.failed
    assert began <= root.start <= root.end <= time.time_ns()
    found = phases(collector, root)
    check_order(root, found)
    assert {name: span.scope for name, span in found.items()} == {
        "tokenize": "headrace.gateway",
        "queue": "headrace.worker",
        "prefill": "headrace.worker",
        "decode": "headrace.worker",
    }
    assert found["decode"].attributes["headrace.steps"] == 9
    assert found["decode"].attributes["headrace.preemptions"] == 0
    assert found["prefill"].attributes["headrace.prefill_steps"] >= 1
    usage = {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.model": "m",
        "gen_ai.request.max_tokens": 20, "gen_ai.request.temperature": 0.0, "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 9, "gen_ai.response.finish_reasons": ["stop"], "headrace.replays": 0,
    }  # fmt: skip
    assert usage.items() <= root.attributes.items()
    assert root.attributes["headrace.request.id"] == answer.headers["x-request-id"]
    assert 0 < root.attributes["gen_ai.server.time_to_first_token"] < (root.end - root.start) / 1e9
    assert collector.paths == {"/v1/traces"}
    assert b"SECRET" not in collector.raw and b"ABCDEF" not in collector.raw


def test_no_traceparent_begins_a_trace_and_an_unsampled_one_makes_none(
    traced: Server, collector: Collector
) -> None:
    traced.client.post("/tokenize", {"prompt": "x"})
    traced.client.post("/v1/completions", completion_body("m", "<|s05|>"), headers=parent_of(3, "00"))
    traced.client.get("/health")
    traced.client.post("/v1/completions", completion_body("m", ["<|s05|>", "<|s00|>"]), headers=parent_of(4))
    root = await_root(collector, "POST /v1/completions", trace_of(4))
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    (tokenize,) = collector.named("POST /tokenize")
    assert tokenize.parent == "" and tokenize.trace != root.trace
    assert not [span for span in collector.spans if span.trace == trace_of(3) or "health" in span.name]
    # two prompts: the phases of both, the sums of both
    below = [span.name for span in collector.spans if span.parent == root.id]
    assert sorted(below) == sorted(PHASES * 2)
    inputs = [span.attributes["gen_ai.usage.input_tokens"] for span in collector.named("tokenize", trace_of(4))]
    assert sum(inputs) == root.attributes["gen_ai.usage.input_tokens"]
    assert len(root.attributes["gen_ai.response.finish_reasons"]) == 2


def test_refusals_stops_and_clients_that_leave(traced: Server, collector: Collector) -> None:
    client = traced.client
    client.post("/v1/chat/completions", {"model": "m", "messages": "x"}, headers=parent_of(5))
    root = await_root(collector, "POST /v1/chat/completions", trace_of(5))
    assert root.attributes["http.response.status_code"] == 400 and not phases(collector, root) and not root.failed
    client.get("/nowhere", headers=parent_of(6))
    assert await_root(collector, "GET", trace_of(6)).attributes["http.response.status_code"] == 404
    # a stop string ends the sequence in the gateway: it has its times
    body = completion_body("m", "<|s05|><|assistant|>", stop="D")
    assert client.post("/v1/completions", body, headers=parent_of(7)).json()["choices"][0]["text"] == "ABC"
    root = await_root(collector, "POST /v1/completions", trace_of(7))
    check_order(root, phases(collector, root))
    with client.streaming("<|s01|>") as chunks:
        next(chunks)
    reasons = "gen_ai.response.finish_reasons"
    wait_until(
        lambda: any(span.attributes.get(reasons) == ["abort"] for span in list(collector.spans)),
        30,
        "the span of the client that left",
    )


def test_a_replay_is_an_event(traced: Server, collector: Collector) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "<|s01|>"}], "stream": True, "max_tokens": 600}
    with traced.client.http.stream("POST", "/v1/chat/completions", json=body, headers=parent_of(8)) as response:
        lines = response.iter_lines()
        for _ in range(20):
            next(lines)
        os.kill(traced.worker_pid, signal.SIGKILL)
        for _ in lines:
            pass
    root = await_root(collector, "POST /v1/chat/completions", trace_of(8))
    assert root.attributes["headrace.replays"] == 1 and not root.failed
    found = phases(collector, root)
    check_order(root, found)
    decode = found["decode"]
    assert [name for name, _ in decode.events] == ["worker lost", "replayed"]
    assert (
        found["decode"].start
        <= found["decode"].events[0][1]
        <= found["decode"].events[1][1]
        <= found["decode"].end
    )
    assert {span.scope for span in found.values()} == {"headrace.gateway"}


def test_a_collector_that_is_not_there_costs_one_line(start_server: Serve) -> None:
    server = start_server("plain", "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces")
    server.client.check_control()
    wait_until(lambda: "traces cannot be sent" in server.log(), 30, "the line")
    server.client.check_control()
    assert server.end() == 0
    assert server.log().count("traces cannot be sent") == 1 and "Traceback" not in server.log()


def test_nothing_is_imported_without_the_flag() -> None:
    program = "import sys, headrace.cli.serve, headrace.api.app, headrace.gateway.server; print(*sys.modules)"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "opentelemetry.sdk" not in child.stdout and "opentelemetry.exporter" not in child.stdout


def test_without_the_extra_the_flag_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["x", "--otlp-traces-endpoint", "http://127.0.0.1:4318"]
    parse(words)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(UsageError, match=r"pip install 'headrace\[otel\]'"):
        parse(words)
    with pytest.raises(UsageError, match="http or https URL"):
        parse(["x", "--otlp-traces-endpoint", "localhost:4317"])
