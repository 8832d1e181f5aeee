"""Clients that leave, do not read or cancel; engines that refuse, stall or fail."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from http_harness import Api, RawClient, chat_body, completion_body, parse_stream
from support import scripted

from headrace.api import app as app_module
from headrace.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from headrace.gateway import pipeline as pipeline_module
from headrace.request import FinishReason

CHAT = "/v1/chat/completions"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


def endless(**fields: Any) -> dict[str, Any]:
    return chat_body("<|s01|>", **{"max_tokens": 400, **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("paused", [False, True])
def test_a_client_that_leaves_stops_its_request(api: Api, stream: bool, paused: bool) -> None:
    api.engine.paused = paused

    async def scene() -> RawClient:
        client = RawClient(api.app, CHAT, endless(stream=stream))
        task = asyncio.create_task(client.run())
        await until(lambda: api.engine.running == 1)
        if stream and not paused:
            await client.first_body.wait()
        client.leave()
        await task
        return client

    client = api.run(scene())
    assert api.engine.running == 0
    assert (api.engine.requests[0].id, None) in api.engine.aborted
    assert api.metrics.reasons == ["abort"]
    assert not any(message.get("status", 200) != 200 for message in client.messages)
    api.engine.paused = False
    assert api.chat().status_code == 200


def test_a_client_that_leaves_stops_all_its_prompts(api: Api) -> None:
    async def scene() -> None:
        body = completion_body(["<|s01|><|assistant|>"] * 3, max_tokens=400, stream=True)
        client = RawClient(api.app, "/v1/completions", body)
        task = asyncio.create_task(client.run())
        await client.first_body.wait()
        client.leave()
        await task

    api.run(scene())
    assert api.engine.running == 0
    assert api.metrics.reasons == ["abort"] * 3


def test_a_client_that_does_not_read_holds_up_nobody(api: Api) -> None:
    async def scene() -> tuple[RawClient, httpx.Response]:
        client = RawClient(api.app, CHAT, endless(stream=True))
        client.reading.clear()
        task = asyncio.create_task(client.run())
        await until(lambda: len(api.engine.requests) == 1)
        other = await api.client.post(CHAT, json=chat_body("<|s05|>"))
        await until(lambda: api.engine.running == 0)
        client.reading.set()
        await task
        return client, other

    client, other = api.run(scene())
    assert other.json()["choices"][0]["message"]["content"] == "ABCDEFGH"
    # All that came meanwhile was merged: a handful of writes for 400 tokens, and nothing is lost.
    bodies = [message["body"] for message in client.messages if message.get("body")]
    assert len(bodies) <= 5
    answer = parse_stream(
        httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"".join(bodies))
    )
    assert answer.text() == scripted.expected_text("s01", 400)


def test_a_client_that_never_reads_is_dropped(make_api: Any) -> None:
    api = make_api(progress_timeout_s=0.1)

    async def scene() -> None:
        client = RawClient(api.app, CHAT, endless(stream=True))
        task = asyncio.create_task(client.run())
        await client.first_body.wait()
        client.reading.clear()
        await asyncio.wait_for(task, 5)

    api.engine.chunk = 1
    api.run(scene())
    assert api.engine.running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_cancel_by_the_id_the_client_sees(api: Api, stream: bool) -> None:
    api.engine.paused = True

    async def scene() -> tuple[httpx.Response, httpx.Response]:
        task = asyncio.create_task(api.client.post(CHAT, json=endless(stream=stream)))
        await until(lambda: api.engine.running == 1)
        cancelled = await api.client.post(f"/v1/requests/{api.engine.requests[0].id}/cancel")
        return cancelled, await task

    cancelled, answer = api.run(scene())
    assert cancelled.json()["cancelled"] is True
    assert api.engine.running == 0
    if stream:
        assert parse_stream(answer).finish_reasons() == ["abort"]
    else:
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert api.metrics.reasons == ["abort"]
    missing = api.post("/v1/requests/chatcmpl-none/cancel", None)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "request_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_answered_before_a_stream_begins(api: Api, stream: bool) -> None:
    api.engine.refusal = QueueFull("64 requests wait, the limit", retry_after_s=2.3)
    response = api.chat(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert api.metrics.rejections == ["queue_full"]
    assert api.metrics.reasons == []


def test_one_refused_prompt_refuses_them_all(api: Api) -> None:
    engine = api.engine
    submit = engine.submit

    def refuse_second(request: Any) -> Any:
        engine.refusal = ContextLengthExceeded("too long for the pool") if request.id.endswith("-1") else None
        return submit(request)

    engine.submit = refuse_second  # type: ignore[method-assign]
    engine.paused = True
    response = api.complete(["<|s05|>", "<|s05|>", "<|s05|>"])
    assert response.status_code == 400
    assert engine.running == 0


@pytest.mark.parametrize("status", ["starting", "failed", "draining"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_engine_is_503(api: Api, status: str, stream: bool) -> None:
    api.engine.set_status(status)
    response = api.chat(stream=stream)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert api.metrics.rejections == ["not_ready"]


def late_refusal(api: Api) -> httpx.Response:
    async def scene() -> httpx.Response:
        from headrace.gateway.streams import SlotStream

        stream = SlotStream("late")
        api.engine.submit = lambda request: stream  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(api.client.post(CHAT, json=endless(stream=True)))
        await asyncio.sleep(0.05)
        stream.fail(QueueFull("the queue is full"))
        return await task

    return api.run(scene())


def test_a_busy_workers_refusal_is_a_429_before_the_stream(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "ACCEPTANCE_WAIT_S", 0.01)
    assert late_refusal(api).status_code == 429


def test_a_late_refusal_is_an_error_event(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "ACCEPTANCE_WAIT_S", 0.01)
    monkeypatch.setattr(pipeline_module, "BUSY_ACCEPTANCE_WAIT_S", 0.01)
    answer = parse_stream(late_refusal(api))
    assert answer.error is not None
    assert answer.error["code"] == "queue_full"
    assert not answer.done


async def _answer_of(api: Api, body: dict[str, Any]) -> httpx.Response:
    return await api.client.post(CHAT, json=body)


@pytest.mark.parametrize("code", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_progress_is_a_timeout(make_api: Any, code: str, stream: bool) -> None:
    queued = code == "queue_timeout"
    api = make_api(queue_timeout_s=0.08 if queued else None, progress_timeout_s=30.0 if queued else 0.08)
    if queued:
        from headrace.gateway.streams import SlotStream

        def silent(request: Any) -> SlotStream:
            stream = SlotStream(request.id)
            stream.accept()
            return stream

        api.engine.submit = silent
    api.engine.paused = True
    response = api.run(_answer_of(api, endless(stream=stream)))
    if stream:
        error = parse_stream(response).error
        assert error is not None
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["code"] == code
    assert "0.08" in error["message"]
    assert (api.engine.aborted[-1][1]) is None
    assert api.metrics.reasons == ["timeout"]
    assert api.metrics.rejections == []


def test_keep_alive_comments_while_nothing_is_sent(make_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "KEEP_ALIVE_S", 0.02)
    api = make_api()
    api.engine.paused = True

    async def scene() -> httpx.Response:
        task: Awaitable[httpx.Response] = asyncio.ensure_future(_answer_of(api, chat_body("<|s05|>", stream=True)))
        await until(lambda: api.engine.running == 1)
        await asyncio.sleep(0.2)
        api.engine.paused = False
        return await task

    answer = parse_stream(api.run(scene()))
    assert answer.comments >= 3
    assert answer.text() == "ABCDEFGH"
    assert answer.done


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.ERROR, 500), (FinishReason.TIMEOUT, 504)])
def test_a_failed_sequence_fails_its_request(api: Api, reason: FinishReason, status: int) -> None:
    api.engine.failure = reason
    assert api.chat("<|s01|>").status_code == status
    streamed = api.chat_stream("<|s01|>", n=2)
    assert streamed.error is not None
    assert streamed.finish_reasons() == []
    assert not streamed.done
    assert api.engine.running == 0
    assert api.metrics.rejections == []


def test_a_fault_of_ours_shows_nothing_inside(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.engine, "_answer", lambda request: [None])
    monkeypatch.setattr(api.engine, "state", lambda: 1 / 0)
    response = api.chat()
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error"


@pytest.mark.parametrize("together", [1, 4, 100])
def test_metrics_of_a_request(api: Api, together: int) -> None:
    """Every output token but the first is counted, however many arrive at once, the first among them."""
    api.engine.chunk = together
    api.chat("<|s00|>", n=2)
    api.chat_stream("<|s05|>")
    metrics = api.metrics
    assert metrics.reasons == ["stop"] * 3
    assert metrics.first_tokens == 2
    assert [(end["prompt_tokens"], end["completion_tokens"]) for end in metrics.ends] == [(4, 18), (4, 9)]
    assert metrics.later_tokens == 9 + 9 + 9 - 3
    assert len(metrics.queue_times) == 2


def count_refusals() -> int:
    return sum(isinstance(found, InvalidRequest) for found in gc.get_objects())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_a_refused_request_leaves_nothing_for_the_collector(api: Api, path: str) -> None:
    """Its body would be kept until then, and the collector comes rarely."""
    bodies: list[dict[str, Any]] = [
        {},
        {"messages": [{"role": "user", "content": "x" * 600}], "prompt": 5, "input": 5},
    ]
    api.post(path, {})
    gc.collect()
    gc.disable()
    try:
        before = count_refusals()
        for body in bodies:
            assert api.post(path, body).status_code == 400
        assert count_refusals() == before
    finally:
        gc.enable()
