"""Clients that leave, and clients that stay and do not read."""

from __future__ import annotations

import time

import pytest
from support.client import RawConnection, at_once, chat_body
from support.scripted import expected_text
from support.server import MIB, Serve, is_idle, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_work_of_clients_that_left_ends(serve: Serve) -> None:
    """Two slots; every round fills both, half of the clients close with FIN, half with RST."""
    server = serve("plain", "--max-num-seqs", "2")
    server.wait_idle()
    aborted = server.metrics().finished("abort")
    rounds = 10
    body = chat_body("m", "<|s01|>", max_tokens=100_000, stream=True)
    for _ in range(rounds):
        connections = [RawConnection(server.port) for _ in range(2)]
        for connection in connections:
            connection.request("POST", "/v1/chat/completions", body)
        for connection in connections:
            connection.read_until(b"data: ", 5)
        connections[0].reset()
        connections[1].socket.close()
        server.client.check_control()
    metrics = server.wait_idle()
    wait_until(lambda: server.metrics().finished("abort") == aborted + 2 * rounds, 10, "aborts to be counted")
    time.sleep(1)
    assert server.metrics().generated == metrics.generated


def test_a_whole_answer_is_given_up_with_its_client(serve: Serve) -> None:
    server = serve("plain", "--max-num-seqs", "2")
    with RawConnection(server.port) as connection:
        connection.request("POST", "/v1/chat/completions", chat_body("m", "<|s01|>", max_tokens=100_000))
        wait_until(lambda: server.metrics().running == 1, 10, "the request to run")
    server.wait_idle(10)
    server.client.check_control()


def test_a_client_that_does_not_read_holds_up_nobody(serve: Serve) -> None:
    server = serve("plain")
    server.wait_idle()
    gateway = server.tree()[0]
    before = gateway.memory_info().rss
    with RawConnection(server.port, receive_buffer=4096) as silent:
        body = chat_body("m", "<|s01|>", max_tokens=4000, stream=True)
        silent.request("POST", "/v1/chat/completions", body)
        answers = at_once(lambda _: server.client.chat("<|s01|>", max_tokens=300, stream=True), range(2), 2)
        assert [answer.text() for answer in answers] == [expected_text("s01", 300)] * 2
        for _ in range(20):
            server.client.check_control()
        wait_until(lambda: server.metrics().running == 0, 60, "the silent client's tokens")
    wait_until(lambda: is_idle(server.metrics()), 10, "the silent client's work to end")
    assert gateway.memory_info().rss < before + 20 * MIB  # the worker's memory is planned, this would pile up


def test_a_request_can_be_cancelled_by_its_id(serve: Serve) -> None:
    server = serve("plain")
    with server.client.streaming("<|s01|>") as chunks:
        first = next(chunks)
        next(chunks)
        assert server.client.post(f"/v1/requests/{first['id']}/cancel").status_code == 200
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["abort"]
    server.wait_idle()
