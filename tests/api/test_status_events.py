"""``/v1/status/events``: what an event holds, whose requests it lists, and when a stream ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from http_harness import Api, chat_body
from scripted_engine import ScriptedEngine

from headrace.api.dashboard.feed import MAX_LISTED, MAX_WATCHERS
from headrace.config import ApiKey

KEYS = (ApiKey("ada", "secret-a"), ApiKey("bob", "secret-b"))
ADA, BOB = ({"x-api-key": key.secret} for key in KEYS)
PATH = "/v1/status/events"
Event = tuple[str, dict[str, Any]]


class Watcher:
    """One open stream, as bare ASGI messages."""

    def __init__(self, api: Api, headers: dict[str, str] | None = None) -> None:
        self.start: dict[str, Any] = {}
        self.body = b""
        self.ended = False
        self._left = asyncio.Event()
        self._changed = asyncio.Event()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": PATH,
            "raw_path": PATH.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": ("127.0.0.1", 1), "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        self.body += message.get("body", b"")
        self.ended = message["type"] == "http.response.body" and not message.get("more_body")
        self._changed.set()

    @property
    def status(self) -> int:
        return int(self.start["status"])

    def events(self, name: str = "") -> list[Event]:
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            event, data = block.split("\n")
            found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return [event for event in found if name in ("", event[0])]

    def last(self, name: str) -> dict[str, Any]:
        return self.events(name)[-1][1]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def first(self) -> None:
        await self.until(lambda: self.events("requests"))

    async def next(self) -> None:
        seen = len(self.events("requests"))
        await self.until(lambda: len(self.events("requests")) > seen)

    async def leave(self) -> None:
        self._left.set()
        await self.task


def run(api: Api, scene: Callable[[], Awaitable[None]]) -> None:
    api.app.state.services.live.interval_s = 0.01

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scene()

    api.run(bounded())


async def start_chats(
    api: Api, count: int, headers: dict[str, str] | None = None, **fields: Any
) -> list[asyncio.Task[Any]]:
    before = api.engine.running
    body = chat_body("tell nobody <|s05|>", **fields)
    tasks = [
        asyncio.create_task(api.client.post("/v1/chat/completions", json=body, headers=headers))
        for _ in range(count)
    ]
    while api.engine.running < before + count:
        await asyncio.sleep(0.002)
    return tasks


def test_shape(api: Api) -> None:
    async def scene() -> None:
        watcher = Watcher(api)
        await watcher.first()
        await watcher.next()
        headers = dict(watcher.start["headers"])
        assert watcher.status == 200
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert headers[b"cache-control"] == b"no-cache"
        assert [name for name, _ in watcher.events()[:5]] == [
            "history",
            "status",
            "requests",
            "status",
            "requests",
        ]
        point = {
            "at", "generation_tps", "prompt_tps", "ttft_s", "itl_s", "hit_rate", "running", "waiting", "kv_held",
        }  # fmt: skip
        assert [set(entry) for entry in watcher.last("history")["points"]] == [point]
        status = watcher.last("status")
        assert set(status) == {
            "version", "uptime_s", "point", "engine", "models", "memory", "kv", "prefix_cache", "in_flight",
        }  # fmt: skip
        assert set(status["point"]) == point
        assert (status["engine"]["status"], status["engine"]["restarts"], status["engine"]["pid"]) == (
            "ready",
            0,
            1,
        )
        (model,) = status["models"]
        assert (model["names"], model["role"], model["status"]) == (["scripted", "alias"], "generation", "ready")
        assert (model["max_model_len"], model["can_reload"]) == (512, True)
        assert set(status["memory"]) >= {
            "planned_bytes",
            "actual_bytes",
            "headroom_bytes",
            "pressure",
            "kv_blocks",
        }
        assert watcher.last("requests") == {"total": 0, "own_only": False, "requests": []}
        await watcher.leave()

    run(api, scene)


def test_requests_in_flight(api: Api) -> None:
    api.engine.paused = True

    async def scene() -> None:
        tasks = await start_chats(api, 2, n=2)
        watcher = Watcher(api)
        await watcher.first()
        await watcher.next()
        listed = watcher.last("requests")
        assert (listed["total"], watcher.last("status")["in_flight"]) == (2, 2)
        first = listed["requests"][0]
        assert first.pop("age_s") >= 0
        prompt = len(api.engine.requests[0].prompt_token_ids)
        assert first == {
            "id": api.engine.requests[0].id, "phase": "prefill", "prompt_tokens": prompt, "cached_tokens": 0,
            "output_tokens": 0, "max_output_tokens": 80, "sequences": 2, "model": "scripted",
            "route": "/v1/chat/completions",
        }  # fmt: skip
        assert b"tell nobody" not in watcher.body
        answer = await api.client.post(f"/v1/requests/{first['id']}/cancel")
        assert answer.status_code == 200
        await watcher.until(lambda: watcher.last("requests")["total"] == 1)
        api.engine.paused = False
        await watcher.until(lambda: watcher.last("requests")["total"] == 0)
        assert watcher.last("status")["point"]["ttft_s"] is not None
        await asyncio.gather(*tasks)
        await watcher.leave()

    run(api, scene)


def test_the_list_is_bounded_oldest_first(api: Api) -> None:
    api.engine.paused = True

    async def scene() -> None:
        tasks = await start_chats(api, MAX_LISTED + 5)
        watcher = Watcher(api)
        await watcher.first()
        listed = watcher.last("requests")
        assert (listed["total"], len(listed["requests"])) == (MAX_LISTED + 5, MAX_LISTED)
        assert listed["requests"][0]["id"] == api.engine.requests[0].id
        api.engine.paused = False
        await asyncio.gather(*tasks)
        await watcher.leave()

    run(api, scene)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank"]
)
def test_requests_of_every_route_are_listed_and_can_be_cancelled(api: Api, path: str) -> None:
    api.engine.paused = True
    text = {"messages": [{"role": "user", "content": "<|s05|>"}], "max_tokens": 5}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "<|s05|>"},
        "/v1/responses": {"input": "<|s05|>"},
        "/v1/messages": text,
        "/v1/embeddings": {"input": "a"},
        "/v1/rerank": {"query": "a", "documents": ["b"]},
    }

    async def scene() -> None:
        task = asyncio.create_task(api.client.post(path, json={"model": "scripted", **bodies[path]}))
        watcher = Watcher(api)
        await watcher.first()
        await watcher.until(lambda: watcher.last("requests")["total"])
        listed = watcher.last("requests")["requests"][0]
        assert listed["route"] == path
        assert (await api.client.post(f"/v1/requests/{listed['id']}/cancel")).status_code == 200
        answer = await task
        if path in ("/v1/embeddings", "/v1/rerank"):  # half of their answers would be of no use
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_cancelled")
        else:
            assert answer.status_code == 200
        await watcher.leave()

    run(api, scene)


def test_a_key_sees_its_own_requests(make_api: Any) -> None:
    api: Api = make_api(api_keys=KEYS)
    api.engine.paused = True

    async def scene() -> None:
        assert (await api.client.get(PATH)).status_code == 401
        assert (await api.client.get(PATH, headers={"authorization": "Bearer no"})).status_code == 401
        tasks = await start_chats(api, 1, ADA) + await start_chats(api, 2, BOB)
        ids = [request.id for request in api.engine.requests]
        for headers, own in ((ADA, ids[:1]), (BOB, ids[1:])):
            watcher = Watcher(api, headers)
            await watcher.first()
            listed = watcher.last("requests")
            assert [entry["id"] for entry in listed["requests"]] == own
            assert (listed["total"], listed["own_only"]) == (len(own), True)
            assert watcher.last("status")["in_flight"] == 3
            others = set(ids) - set(own)
            assert not any(other.encode() in watcher.body for other in others)
            await watcher.leave()
        api.engine.paused = False
        await asyncio.gather(*tasks)

    run(api, scene)


def test_watchers_are_bounded_and_counted(api: Api) -> None:
    async def scene() -> None:
        watchers = [Watcher(api) for _ in range(MAX_WATCHERS)]
        for watcher in watchers:
            await watcher.first()
        refused = await api.client.get(PATH)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert str(MAX_WATCHERS) in refused.json()["error"]["message"]
        for watcher in watchers:
            await watcher.leave()
        assert api.app.state.services.watchers.count == 0
        again = Watcher(api)
        await again.first()
        await again.leave()

    run(api, scene)


def test_nothing_is_sampled_while_nobody_watches(make_api: Any) -> None:
    class Counting(ScriptedEngine):
        asked = 0

        def state(self) -> Any:
            self.asked += 1
            return super().state()

    engine = Counting()
    api: Api = make_api(engine=engine)

    async def scene() -> None:
        engine.asked = 0
        await asyncio.sleep(0.1)
        assert engine.asked == 0
        watcher = Watcher(api)
        await watcher.first()
        await watcher.next()
        await watcher.leave()
        before, history = engine.asked, api.app.state.services.live.history
        await asyncio.sleep(0.1)
        assert engine.asked == before
        assert api.app.state.services.live.history == history

    run(api, scene)


def test_a_second_watcher_gets_the_history(api: Api) -> None:
    async def scene() -> None:
        one = Watcher(api)
        await one.until(lambda: len(one.events("status")) >= 5)
        two = Watcher(api)
        await two.first()
        seen = {event[1]["point"]["at"] for event in one.events("status")}
        assert {point["at"] for point in two.last("history")["points"]} >= seen
        await one.leave()
        await two.leave()

    run(api, scene)


def test_a_stream_ends_when_the_server_drains_and_nothing_runs(api: Api) -> None:
    api.engine.paused = True

    async def scene() -> None:
        tasks = await start_chats(api, 1)
        watcher = Watcher(api)
        await watcher.first()
        api.engine.set_status("draining")
        await watcher.until(lambda: watcher.last("status")["engine"]["status"] == "draining")
        await watcher.next()
        assert not watcher.ended
        api.engine.paused = False
        await watcher.until(lambda: watcher.ended)
        await watcher.task
        await asyncio.gather(*tasks)

    run(api, scene)


def test_a_stream_ends_when_a_reload_is_over(api: Api) -> None:
    async def scene() -> None:
        watcher = Watcher(api)
        await watcher.first()
        api.engine.state_now = msgspec.structs.replace(api.engine.state_now, reloads=1, status="restarting")
        await watcher.until(lambda: watcher.last("status")["engine"]["status"] == "restarting")
        await watcher.next()
        assert not watcher.ended
        api.engine.set_status("ready")
        await watcher.until(lambda: watcher.ended)
        again = Watcher(api)
        await again.first()
        await again.next()
        assert not again.ended
        await again.leave()

    run(api, scene)


def test_head(api: Api) -> None:
    answer = api.send("HEAD", PATH)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
