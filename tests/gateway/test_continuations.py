"""Requests that go on behind tokens they have: they were let in before, so no queue and no drain stops them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from test_worker_client import READY, Link, request, say

from headrace.errors import NotReady
from headrace.gateway.worker_client import WorkerClient
from headrace.request import EngineRequest
from headrace.worker.protocol import Rejected

CONTINUED = {0: [7, 8, 9]}


def continuation(name: str) -> EngineRequest:
    return msgspec.structs.replace(request(name), emitted=CONTINUED)


def test_it_is_sent_with_its_tokens_and_is_accepted() -> None:
    client, link = WorkerClient(max_held=0), Link()
    client.worker_ready(link, READY)
    stream = client.submit(continuation("a~1"))
    assert stream.is_accepted
    (sent,) = link.take()
    assert sent.emitted == CONTINUED
    say(client, "a~1", 5)
    assert client.prompt_tokens_total == 0, "the prompt was counted with the first request"


def test_a_drain_lets_it_go_on() -> None:
    client, link = WorkerClient(max_held=4), Link()
    client.worker_ready(link, READY)
    client.submit(request("a"))
    client.start_draining("bye")
    with pytest.raises(NotReady):
        client.submit(request("b"))
    client.abort("a")
    client.submit(continuation("a~1"))
    assert [sent.id for sent in link.take()] == ["a", "a~1"]


async def _full_queue() -> None:
    client, link = WorkerClient(max_held=0), Link()
    client.worker_ready(link, READY)
    stream = client.submit(continuation("a~1"))
    client.worker_message(Rejected(request_id="a~1", status=429, code="queue_full", message="full"))
    await stream.accepted()  # not refused: it waits and is offered again
    assert client.held == 1


def test_a_full_queue_makes_it_wait() -> None:
    asyncio.run(_full_queue())
