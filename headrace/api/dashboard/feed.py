"""``GET /v1/status/events``: what the dashboard shows, once a second, as server-sent events.

    event: history    once, first: the points of the last minutes, as far as somebody watched
    event: status     one engine's state, memory, models and newest point; the same bytes for every watcher
    event: requests   the requests in flight of the watcher's own key (of everybody, without keys)

A stream ends by itself when the server drains and nothing runs any more, and once a reload is over (the new
configuration may have other keys); watchers then ask again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.api.request_scope import key_name
from headrace.api.services import Services, services
from headrace.api.sse import STREAM_HEADERS, EventStream
from headrace.errors import NotReady
from headrace.gateway.live import Point
from headrace.gateway.memory_report import block_counts, memory_report, prefix_cache_report
from headrace.gateway.pipeline import OpenRequest
from headrace.gateway.service import EngineState

MAX_WATCHERS = 64
MAX_LISTED = 100
SEND_TIMEOUT_S = 30.0
ROUTE_BY_PREFIX = {
    "chatcmpl-": "/v1/chat/completions",
    "cmpl-": "/v1/completions",
    "resp_": "/v1/responses",
    "msg_": "/v1/messages",
    "embd-": "/v1/embeddings",
    "rerank-": "/v1/rerank",
}


async def status_events(request: Request) -> Response:
    """Live figures for a dashboard, as an event stream."""
    house = services(request)
    watchers = house.watchers
    if request.method == "HEAD":
        return Response(media_type=EventStream.media_type, headers=STREAM_HEADERS)
    if watchers.count >= MAX_WATCHERS:
        raise NotReady(f"{MAX_WATCHERS} dashboards watch already, the limit here; close one", retry_after_s=30.0)
    watchers.count += 1

    async def close() -> None:
        watchers.count -= 1

    return EventStream(_events(house, key_name(request)), close=close, send_timeout_s=SEND_TIMEOUT_S)


async def _events(house: Services, key: str) -> AsyncGenerator[bytes, None]:
    point = house.live.newest()
    reloads = house.engine.state().reloads
    yield _event("history", {"points": house.live.history})
    while True:
        yield _status(house, point) + _event("requests", requests_body(house, key))
        state = house.engine.state()
        is_reloaded = state.reloads != reloads and state.status == "ready"
        if is_reloaded or (state.status == "draining" and not house.num_in_flight):
            return
        point = await house.live.next()


def _status(house: Services, point: Point) -> bytes:
    return house.watchers.event(point.at, lambda: _event("status", status_body(house, point)))


def status_body(house: Services, point: Point) -> dict[str, object]:
    state = house.engine.state()
    stats, ready = state.stats, state.ready
    return {
        "version": headrace.__version__,
        "uptime_s": round(time.time() - house.started_at, 1),
        "point": point,
        "engine": {
            "status": state.status,
            "message": state.message,
            "detail": state.detail,
            "loading": state.load,
            "pid": None if ready is None else ready.pid,
            "device": None if ready is None else ready.device,
            "attention": None if ready is None else ready.attention,
            "restarts": state.restarts,
            "reloads": state.reloads,
            "quarantined": state.quarantined,
            "preemptions": stats.preemptions_total,
            "steps": stats.steps_total,
        },
        "models": models_body(house),
        "memory": memory_report(state),
        "kv": {"block_size": None if ready is None else ready.block_size, **block_counts(stats)},
        "prefix_cache": prefix_cache_report(stats, enabled=house.config.engine.enable_prefix_cache),
        "in_flight": house.num_in_flight,
    }


def models_body(house: Services) -> list[dict[str, object]]:
    """The main model and those beside it; only the main one can be reloaded."""
    main = _model("generation", house.config.served_model_names, house.engine.state(), can_reload=True)
    sides = house.text_models.sides
    return [
        main,
        *(_model(side.role, (side.name,), side.model.engine.state(), can_reload=False) for side in sides),
    ]


def _model(role: str, names: tuple[str, ...], state: EngineState, *, can_reload: bool) -> dict[str, object]:
    ready = state.ready
    return {
        "names": names,
        "role": role,
        "status": state.status,
        "message": state.message,
        "loading": state.load,
        "restarts": state.restarts,
        "device": None if ready is None else ready.device,
        "max_model_len": None if ready is None else ready.max_model_len,
        "process_bytes": state.stats.process_bytes or None,
        "can_reload": can_reload,
    }


def requests_body(house: Services, key: str) -> dict[str, object]:
    """Requests of ``key``, oldest first, ``MAX_LISTED`` at most; ``total`` counts them all.

    ``own_only``: there are keys, so others may have requests that are not listed.
    """
    found: list[tuple[OpenRequest, str]] = []
    for model, pipeline in house.pipelines():
        found += [(shown, model) for shown in pipeline.open_requests(key)]
    found.sort(key=lambda entry: -entry[0].age_s)
    listed = [_listed(*entry) for entry in found[:MAX_LISTED]]
    return {"total": len(found), "own_only": bool(house.config.api_keys), "requests": listed}


def _listed(shown: OpenRequest, model: str) -> dict[str, object]:
    route = next((route for prefix, route in ROUTE_BY_PREFIX.items() if shown.id.startswith(prefix)), "")
    fields = msgspec.structs.asdict(shown)
    return {**fields, "age_s": round(shown.age_s, 1), "model": model, "route": route}


def _event(name: str, body: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(body))
