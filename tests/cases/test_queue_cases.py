"""Overload: quick honest refusals, a kept running limit, a bounded wait, order, probes that always answer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from support.client import Answer, at_once
from support.scripted import expected_text
from support.server import Serve, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_full_queue_refuses_at_once_and_serves_the_rest(serve: Serve) -> None:
    """One runs, four wait, the others are told when to come back."""
    server = serve("plain", "--max-num-seqs", "1", "--max-queue", "4")
    server.wait_idle()
    before = server.metrics().rejected("queue_full")
    with ThreadPoolExecutor(20) as pool:
        with server.client.streaming("<|s01|>") as chunks:
            next(chunks)
            futures = [pool.submit(server.client.chat, "<|s05|>") for _ in range(20)]
            wait_until(lambda: sum(future.done() for future in futures) >= 15, 30, "the refusals")
        answers = [future.result() for future in futures]
    refused = [answer for answer in answers if answer.status != 200]
    assert 15 <= len(refused) <= 16
    for answer in refused:
        assert answer.status in (429, 503) and answer.message
        assert int(answer.headers["retry-after"]) >= 1
    assert {answer.text() for answer in answers if answer.status == 200} == {"ABCDEFGH"}
    assert server.metrics().rejected("queue_full") == before + len(refused)
    server.client.check_control()


def test_probes_answer_during_prefill_and_decoding(serve: Serve) -> None:
    server = serve("plain")
    with ThreadPoolExecutor(4) as pool:
        prompts = [f"{number}<|s05|>" + "h" * 5000 for number in range(4)]
        futures = [pool.submit(server.client.chat, prompt) for prompt in prompts]
        num_polls, slowest = 0, 0.0
        while not all(future.done() for future in futures):
            for path in ("/health", "/ready", "/metrics", "/v1/models", "/v1/status"):
                began = time.monotonic()
                assert server.client.get(path).status_code == 200
                slowest = max(slowest, time.monotonic() - began)
                num_polls += 1
            time.sleep(0.05)
        assert {future.result().text() for future in futures} == {"ABCDEFGH"}
    assert num_polls >= 5 and slowest < 10  # a step or a prompt is never waited for


def test_the_running_limit_and_the_queue_limit_are_kept(serve: Serve) -> None:
    server = serve("plain", "--max-num-seqs", "2", "--queue-timeout", "2")
    most, over = 0.0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            most = max(most, server.metrics().running)
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ExitStack() as stack:
            streams = [stack.enter_context(server.client.streaming("<|s01|>")) for _ in range(2)]
            for chunks in streams:
                next(chunks)
            late = at_once(server.client.chat, ["<|s05|>"] * 3, 3)
    finally:
        over.set()
        watcher.join()
    for answer in late:
        assert answer.status in (503, 504) and answer.message
    assert most == 2
    server.wait_idle()
    server.client.check_control()


def test_first_come_first_served(serve: Serve) -> None:
    server = serve("plain", "--max-num-seqs", "1", "--max-queue", "4")
    ends: list[int] = []

    def ask(number: int) -> Answer:
        # long enough that threads of a busy machine do not mix up the order
        answer = server.client.chat("<|s01|>", max_tokens=600)
        ends.append(number)
        return answer

    with ThreadPoolExecutor(4) as pool:
        with server.client.streaming("<|s01|>") as chunks:
            next(chunks)
            futures = []
            for number in range(4):
                futures.append(pool.submit(ask, number))
                wait_until(lambda: server.metrics().waiting == len(futures), 10, "it to wait")
        assert {future.result().text() for future in futures} == {expected_text("s01", 600)}
    assert ends == [0, 1, 2, 3]
