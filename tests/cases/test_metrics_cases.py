"""Metrics: back to idle after mass aborts, every end counted, a bounded and strict exposition."""

from __future__ import annotations

from collections import Counter

import pytest
from support.client import RawConnection, at_once, chat_body
from support.server import Serve, is_idle, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_gauges_return_and_aborts_are_counted_without_further_traffic(serve: Serve) -> None:
    server = serve("plain")
    before = server.wait_idle()
    connections = [RawConnection(server.port) for _ in range(30)]
    for connection in connections:
        body = chat_body("m", "<|s01|>", max_tokens=100_000, stream=True)
        connection.request("POST", "/v1/chat/completions", body)
    for connection in connections:
        connection.read_until(b"data: ", 3)
    assert server.metrics().running == 30
    for connection in connections:
        connection.socket.close()
    wait_until(lambda: is_idle(server.metrics()), 20, "the gauges to return")
    wait_until(
        lambda: server.metrics().finished("abort") == before.finished("abort") + 30, 20, "the aborts to be counted"
    )
    for _ in range(5):
        server.client.check_control()
    assert server.metrics().finished("stop") == before.finished("stop") + 5
    assert server.metrics()("vllm:kv_cache_usage_perc") == 0


def test_the_exposition_is_strict_complete_and_bounded(start_server: Serve) -> None:
    server = start_server("plain")
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    first = server.metrics()
    check_strict(first.text)
    blocks = {state: first("headrace:kv_blocks", state=state) for state in ("held", "cached", "free")}
    assert blocks["held"] == blocks["cached"] == 0 and blocks["free"] > 0

    def ask(number: int) -> None:
        server.client.chat("<|s05|>", user=f"user{number}", max_tokens=1)
        server.client.chat("<|s05|>", model=f"alias{number}")
        server.client.get(f"/nowhere{number}")

    at_once(ask, range(60), 4)
    last = server.metrics()
    check_strict(last.text)
    assert last.families.keys() == first.families.keys()
    assert last.num_series < first.num_series + 20
    for word in ("user1", "alias1", "nowhere1"):
        assert word not in last.text
    assert last.finished("length") == 60
    assert last.rejected("model_not_found") == 60


def check_strict(text: str) -> None:
    """HELP and TYPE once per family and before its samples; no series twice."""
    declared, typed, series = Counter[str](), Counter[str](), Counter[str]()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            declared[line.split(" ")[2]] += 1
        elif line.startswith("# TYPE "):
            typed[line.split(" ")[2]] += 1
        elif line:
            series[line.rpartition(" ")[0]] += 1
            float(line.rpartition(" ")[2])
            name = line.partition("{")[0].split(" ")[0]
            assert any(name.startswith(family) for family in typed), line
    assert declared == typed and set(declared.values()) == {1}
    assert set(series.values()) == {1}
