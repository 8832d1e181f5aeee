"""What does not fit is told so at once, and whoever leaves takes nothing along: a real server, few blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from support.client import HANG_S, chat_body
from support.scripted import expected_text
from support.server import Serve, Server, wait_until

pytestmark = pytest.mark.slow

BLOCKS, BLOCK_SIZE = 20, 16
FITS = BLOCKS * BLOCK_SIZE


def content(prompt_tokens: int, script: str = "s05") -> str:
    """A chat's content that makes a prompt of so many tokens."""
    return f"<|{script}|>" + "." * (prompt_tokens - 4)


# -- what can never fit --------------------------------------------------------------------------------


@pytest.fixture
def small(serve: Serve) -> Server:
    return serve("plain", "--max-cache-blocks", str(BLOCKS))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [FITS, FITS + 1, 8 * FITS])
def test_a_prompt_that_can_never_fit_is_told_how_many_tokens_do(small: Server, tokens: int, stream: bool) -> None:
    with occupied(small):  # at once, also while others hold the pool
        answer = small.client.chat(content(tokens), stream=stream)
    assert answer.status == 400 and "retry-after" not in answer.headers
    assert answer.error is not None and answer.error["code"] == "context_length_exceeded"
    assert str(tokens) in answer.message and str(FITS) in answer.message


def test_the_longest_prompt_that_fits_is_answered(small: Server) -> None:
    for room in (1, 2, 8, 9):
        answer = small.client.chat(content(FITS - room), max_tokens=40)
        assert answer.text() == expected_text("s05", room)
        assert answer.finish_reason() == ("stop" if room == 9 else "length")
    assert small.wait_idle().blocks_held == 0


@contextmanager
def occupied(server: Server) -> Iterator[None]:
    """An endless stream runs."""
    with server.client.streaming("<|s01|>", max_tokens=250) as chunks:
        next(chunks)
        yield


# -- the queue -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_refuses_before_the_streaming_200(serve: Serve, stream: bool) -> None:
    server = serve("plain", "--max-num-seqs", "1", "--max-queue", "2")
    with ExitStack() as open_streams:
        for _ in range(3):
            open_streams.enter_context(server.client.streaming())
        wait_until(lambda: server.metrics().waiting == 2, 30, "two requests to wait")
        before = server.metrics().rejected("queue_full")
        for _ in range(3):
            refused = server.client.chat(stream=stream)
            assert refused.status == 429 and refused.error is not None
            assert refused.error["code"] == "queue_full" and refused.error["type"] == "rate_limit_error"
            assert 1 <= int(refused.headers["retry-after"]) <= 600
            assert "2" in refused.message
        assert server.metrics().rejected("queue_full") == before + 3
    server.wait_idle()
    server.client.check_control()


def test_the_queue_timeout_runs_until_the_first_step_and_no_further(serve: Serve) -> None:
    server = serve("plain", "--max-num-seqs", "1", "--queue-timeout", "1.5")
    with server.client.streaming() as chunks:
        next(chunks)
        whole = server.client.chat()
        streamed = server.client.chat(stream=True)
        for answer in (whole, streamed):
            assert answer.error is not None and answer.error["code"] == "queue_timeout"
            assert "1.5" in answer.message
        assert (whole.status, streamed.status) == (504, 200)
        for _ in range(100):  # who has been scheduled is not in the queue any more, however long it runs
            assert "error" not in next(chunks)
        wait_until(lambda: (server.metrics().running, server.metrics().waiting) == (1, 0), 30, "one to run alone")
    server.wait_idle()
    server.client.check_control()


# -- leaving -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["cancel", "disconnect"])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
def test_whoever_leaves_frees_everything_and_disturbs_nobody(serve: Serve, phase: str, way: str) -> None:
    seats = "1" if phase == "queue" else "2"
    server = serve("plain", "--max-num-seqs", seats, "--prefill-step-size", "32", "--disable-prefix-cache")
    server.wait_idle()
    with server.client.streaming("<|s01|>") as neighbour:
        next(neighbour)
        with open_stream(server, content(8000 if phase == "prefill" else 100, "s01")) as response:
            wait_until(lambda: is_in(server, phase), 60, f"the request to be in its {phase}")
            if way == "cancel":
                request_id = "chatcmpl-" + response.headers["x-request-id"]
                assert server.client.post(f"/v1/requests/{request_id}/cancel").status_code == 200
                assert '"finish_reason":"abort"' in response.read().decode()
        wait_until(lambda: is_alone(server), 30, "the request's blocks to be free")
        text = "".join(next(neighbour)["choices"][0]["delta"].get("content") or "" for _ in range(12))
        assert text.strip() and text in expected_text("s01", 8000)
    assert server.wait_idle().blocks_held == 0


@contextmanager
def open_stream(server: Server, text: str) -> Iterator[httpx.Response]:
    body = chat_body(server.model, text, stream=True, max_tokens=8000)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=HANG_S) as response:
        assert response.status_code == 200
        yield response


def is_in(server: Server, phase: str) -> bool:
    """Whether one request runs and the other is where it should be; both share no blocks."""
    metrics = server.metrics()
    if phase == "queue":
        return (metrics.running, metrics.waiting) == (1, 1)
    # blocks for the whole prompt are taken at the start: a decoding stream of 100 tokens has few
    long_prompt = metrics.blocks_held * BLOCK_SIZE > 4000
    return (metrics.running, metrics.waiting) == (2, 0) and long_prompt is (phase == "prefill")


def is_alone(server: Server) -> bool:
    stats = server.status()["stats"]
    # one stream: its own tokens, and never those of a prompt of 100
    return (stats["running"], stats["waiting"]) == (1, 0)
