"""Bad requests and floods: the process lives on, gives back what it took, and answers the next request rightly."""

from __future__ import annotations

import json
import time

import pytest
from support.client import RawConnection, at_once, chat_body, completion_body
from support.scripted import expected_text
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 2**20


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


def test_bad_requests_kill_nothing(server: Server) -> None:
    chat, completions = "/v1/chat/completions", "/v1/completions"
    bad = [
        (chat, chat_body("m", "<|s05|>", stop=5)),
        (completions, completion_body("m", "")),
        (chat, chat_body("m", "<|s05|>", logit_bias={"99999999": 5})),
        (chat, {"messages": []}),
        (chat, {"messages": "hi"}),
        (chat, chat_body("m", "<|s05|>", tools="x")),
    ]
    pids = (server.pid, server.worker_pid)
    for path, body in bad:
        answer = server.client.send(path, body)
        assert 400 <= answer.status < 500 and answer.message, body
        assert server.client.get("/health").status_code == 200
        server.client.check_control()
    answer = server.client.complete(["<|s05|><|assistant|>", "<|s00|><|assistant|>"])
    assert [answer.text(index) for index in (0, 1)] == ["ABCDEFGH", expected_text("s00")]
    assert (server.pid, server.worker_pid) == pids


def test_finished_and_aborted_requests_leave_nothing_behind(serve: Serve) -> None:
    server = serve("plain", "--disable-prefix-cache")

    def load() -> None:
        contents = ["<|s05|>" + "a" * (i % 50) for i in range(60)]
        answers = at_once(server.client.chat, contents, 4)
        assert {answer.text() for answer in answers} == {"ABCDEFGH"}
        for _ in range(20):
            with server.client.streaming("<|s01|>") as chunks:
                for _ in range(5):
                    next(chunks)

    at_once(lambda _: server.client.check_control(), range(20), 4)
    server.wait_idle()
    load()
    server.wait_idle()
    after_first = server.rss_bytes()
    load()
    metrics = server.wait_idle()
    assert metrics("headrace:kv_blocks", state="cached") == 0
    assert server.rss_bytes() <= after_first + max(after_first * 0.05, 20 * MIB)


def test_the_prefix_cache_keeps_its_budget_whatever_the_lengths(serve: Serve) -> None:
    server = serve("plain", "--cache-memory-mb", "16")
    lengths = [50 + i * 83 for i in range(30)]  # 38,000 tokens, 190 MB of KV
    contents = [f"{i:03d}" + "x" * length + "<|s05|>" for i, length in enumerate(lengths)]

    def cached_in_a_pass() -> list[int]:
        cached = []
        for content in contents:
            answer = server.client.chat(content)
            assert answer.text() == "ABCDEFGH"
            assert server.metrics()("headrace:prefix_cache_bytes") <= 16 * MIB
            cached.append(answer.cached_tokens)
        return cached

    assert max(cached_in_a_pass()) <= 16  # what the template opens with, and no more
    server.wait_idle()
    after_first = server.rss_bytes()
    assert all(server.client.chat(contents[-1]).cached_tokens > 0 for _ in range(2))
    cached_in_a_pass()
    server.wait_idle()
    assert server.rss_bytes() <= after_first + 20 * MIB


def test_a_burst_over_the_memory_is_queued_or_refused_and_leaves_no_lock(serve: Serve) -> None:
    """Room for one such prompt at a time."""
    server = serve("plain", "--max-cache-blocks", "80", "--max-queue", "4")
    prompts = [f"{i:02d}<|s05|>" + "y" * 1000 for i in range(12)]
    answers = at_once(server.client.chat, prompts, 12)
    refused = [answer for answer in answers if answer.status != 200]
    for answer in refused:
        assert answer.status in (429, 503), answer.error
        assert int(answer.headers["retry-after"]) >= 1
    assert {answer.text() for answer in answers if answer.status == 200} == {"ABCDEFGH"}
    assert len(refused) <= 7
    server.wait_idle()
    assert server.client.chat(prompts[0]).text() == "ABCDEFGH"
    server.client.check_control()


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_deep_large_and_broken_bodies_are_refused_in_words(server: Server) -> None:
    server.client.check_control()
    before = server.rss_bytes()
    message = json.dumps(chat_body("m", "<|s05|>"))[:-1].encode()
    bodies = {
        "nested": b'{"x":' + nested(20_000) + b"}",
        "nested tools": message + b',"tools":' + nested(20_000) + b"}",
        "huge": message + b',"user":"' + b"u" * (64 * MIB) + b'"}',
        "not UTF-8": message + b',"user":"\xff\xfe"}',
    }
    with server.client.streaming("<|s01|>", max_tokens=3000) as chunks:
        texts = [next(chunks) for _ in range(5)]
        for name, body in bodies.items():
            headers = {"content-type": "application/json"}
            answer = server.client.http.post("/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code in (400, 413), name
            assert answer.json()["error"]["message"], name
        with RawConnection(server.port) as short:
            short.request("POST", "/v1/chat/completions", headers=[("Content-Length", "1000")])
            short.socket.sendall(b'{"messages"')
        server.client.check_control()
        texts += chunks
    joined = "".join(choice["delta"].get("content") or "" for chunk in texts for choice in chunk["choices"])
    assert joined == expected_text("s01", 3000)
    server.wait_idle()
    assert server.rss_bytes() <= before + 50 * MIB


def test_an_idle_server_rests(server: Server) -> None:
    for _ in range(3):
        server.client.check_control()
    time.sleep(2)
    before = server.cpu_s()
    time.sleep(6)
    assert server.cpu_s() - before < 0.3
