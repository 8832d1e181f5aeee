"""Probes, status, metrics, cache and cancellation."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.api.errors import ReloadFailed, RouteNotFound
from headrace.api.models import json_response
from headrace.api.request_scope import key_name
from headrace.api.services import services
from headrace.errors import NotReady
from headrace.gateway.memory_report import block_counts, memory_report, prefix_cache_report
from headrace.gateway.service import EngineState

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def health(request: Request) -> Response:
    """200 while the server can be expected to answer, also while a dead worker is being replaced."""
    state = services(request).engine.state()
    alive = state.status not in ("starting", "failed")
    content: dict[str, object] = {"status": state.status}
    if not alive and state.message:
        content["reason"] = state.message
    return _probe(alive, content)


async def ready(request: Request) -> Response:
    """200 while a worker steps and new requests are taken."""
    state = services(request).engine.state()
    content: dict[str, object] = {"status": state.status}
    if state.load is not None:
        content["loading"] = {"stage": state.load.stage, "fraction": state.load.fraction}
    if state.message:
        content["reason"] = state.message
    return _probe(state.status == "ready", content)


def _probe(good: bool, content: dict[str, object]) -> Response:
    answer = json_response(content, 200 if good else 503)
    if not good:
        answer.headers["retry-after"] = "5"
    return answer


async def status(request: Request) -> Response:
    """What runs, on what, with how much memory."""
    house = services(request)
    return json_response(
        {
            "version": headrace.__version__,
            "models": house.config.served_model_names,
            "uptime_s": round(time.time() - house.started_at, 1),
            "parsers": {"tool_calls": house.parsers.tools, "reasoning": house.parsers.reasoning},
            "requests_in_flight": house.num_in_flight,
            **_engine_report(house.engine.state()),
            "side_engines": [
                {
                    "role": side.role,
                    "model": side.name,
                    "requests_in_flight": side.model.pipeline.num_running,
                    **_engine_report(side.model.engine.state()),
                }
                for side in house.text_models.sides
            ],
        }
    )


def _engine_report(state: EngineState) -> dict[str, object]:
    return {
        "status": state.status,
        "message": state.message,
        "detail": state.detail,
        "worker_restarts": state.restarts,
        "worker_reloads": state.reloads,
        "engine": None if state.ready is None else msgspec.structs.asdict(state.ready),
        "stats": msgspec.to_builtins(state.stats),
        "memory": memory_report(state),
    }


async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(services(request).metrics.render(), headers={"content-type": METRICS_TYPE})


async def cancel(request: Request) -> Response:
    """End a running request of the same key; its client gets what there is, with ``finish_reason`` "abort"."""
    request_id, key = str(request.path_params["request_id"]), key_name(request)
    if not any(pipeline.cancel(request_id, key) for _, pipeline in services(request).pipelines()):
        raise RouteNotFound(
            "there is no running request with this id", param="request_id", code="request_not_found"
        )
    return json_response({"id": request_id, "object": "request.cancelled", "cancelled": True})


async def cache_stats(request: Request) -> Response:
    """Blocks of the KV pool and hits of the prefix cache."""
    house = services(request)
    state = house.engine.state()
    stats = state.stats
    return json_response(
        {
            "block_size": state.ready.block_size if state.ready else None,
            "blocks": block_counts(stats),
            "prefix_cache": prefix_cache_report(stats, enabled=house.config.engine.enable_prefix_cache),
            "preemptions": stats.preemptions_total,
        }
    )


async def reload(request: Request) -> Response:
    """Replace the worker, its configuration read anew; open requests go on in the new one."""
    reason = await services(request).engine.reload()
    if reason:
        raise ReloadFailed(f"the worker was not replaced: {reason}")
    return json_response({"object": "model.reloaded", "reloaded": True})


async def clear_cache(request: Request) -> Response:
    """Forget all cached prefixes that no running request uses."""
    house = services(request)
    if house.engine.state().status != "ready":
        raise NotReady("no worker is running; its cache is gone with it")
    house.engine.clear_prefix_cache()
    return json_response({"object": "cache.cleared", "cleared": True})
