"""``/v1/responses``: create, read, list the input, cancel, delete."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.answering import receive, streamed, whole
from headrace.api.errors import RouteNotFound
from headrace.api.fields import convert, shown
from headrace.api.models import json_response
from headrace.api.openai.prompts import chat_request
from headrace.api.renaming import renamed
from headrace.api.request_scope import key_name
from headrace.api.responses.items import Item, chat_messages, input_items
from headrace.api.responses.namespaces import namespaces
from headrace.api.responses.render import ResponseRenderer
from headrace.api.responses.schema import ResponseFields, chat_fields, count_unknown, refuse_unsupported
from headrace.api.services import Services, services
from headrace.errors import InternalFault, InvalidRequest, StartupError
from headrace.gateway.pipeline import GenerationRequest

T = TypeVar("T")

log = logging.getLogger("headrace.api")

CANCEL_WAIT_S = 5.0
MAX_PAGE = 100
# Names of chat fields that errors may carry -> their names here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


async def create_response(request: Request) -> Response:
    """Answer, with or without the conversation of an earlier response."""
    house, body, arrival = await receive(request)
    fields = convert(body, ResponseFields)
    refuse_unsupported(body, fields)
    if unknown := count_unknown(body):
        house.metrics.unknown_field(unknown)
    model = house.served_name(fields.model)
    stores = _stores(house, fields)
    items = input_items(fields.input, arrival.id)
    before = await _conversation(house, fields.previous_response_id, arrival.key)
    with renamed(_NAMES):
        chat = chat_fields(fields, chat_messages([*before, *items], fields.instructions))
        generation = await chat_request(house, chat, arrival, house.model_limits(), prefix="resp_")

    running = house.running_responses.enter(generation.id, arrival)

    async def keep(response: dict[str, Any]) -> None:
        running.final = response
        if stores and not await _put(house, response, items, fields.previous_response_id, arrival.key):
            response["store"] = False

    echo = _echo(house, fields, generation, model, stores)
    renderer = ResponseRenderer(echo, namespaces(fields.tools or ()), keep)
    if fields.stream:
        try:
            return await streamed(request, house, generation, renderer, close=running.leave)
        except BaseException:
            await running.leave()
            raise
    try:
        await whole(request, house, generation, renderer.take)
        return json_response(await renderer.response())
    finally:
        await running.leave()


async def get_response(request: Request) -> Response:
    """A stored response."""
    if request.query_params.get("stream", "false").lower() == "true":
        raise InvalidRequest("stream is not supported for stored responses; leave it out", param="stream")
    stored = await _from_store(services(request).responses.get, _id(request), key_name(request))
    if stored is None:
        raise _not_found(request)
    return Response(stored.response, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Forget a stored response and its input."""
    if not await _from_store(services(request).responses.delete, _id(request), key_name(request)):
        raise _not_found(request)
    return json_response({"id": _id(request), "object": "response", "deleted": True})


async def cancel_response(request: Request) -> Response:
    """End a running response; its client gets what there is. Answers with the response as it is then."""
    house = services(request)
    running = house.running_responses.find(_id(request), key_name(request))
    if running is None:
        if await _from_store(house.responses.get, _id(request), key_name(request)) is None:
            raise _not_found(request)
        raise InvalidRequest("this response is over; only a running one can be cancelled", param="response_id")
    house.pipeline.cancel(_id(request), key_name(request))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(running.over.wait(), CANCEL_WAIT_S)
    if running.final is None:
        raise _not_found(request)
    return json_response(running.final)


async def list_input_items(request: Request) -> Response:
    """The items that were a stored response's own input, in pages."""
    stored = await _from_store(services(request).responses.get, _id(request), key_name(request))
    if stored is None:
        raise _not_found(request)
    query = request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f'order must be "asc" or "desc", not {shown(order)}', param="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise InvalidRequest(f"limit must be an integer from 1 to {MAX_PAGE}, not {shown(limit)}", param="limit")
    items = stored.input if order == "asc" else stored.input[::-1]
    if after := query.get("after"):
        position = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if position is None:
            raise InvalidRequest(f"after names {shown(after)}, which is not in the list", param="after")
        items = items[position + 1 :]
    page = items[: int(limit)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": len(items) > len(page),
        }
    )


# -- inside --------------------------------------------------------------------------------------------


def _id(request: Request) -> str:
    return str(request.path_params["response_id"])


def _not_found(request: Request) -> RouteNotFound:
    return RouteNotFound(
        f"there is no response {shown(_id(request))} here", param="response_id", code="response_not_found"
    )


def _stores(house: Services, fields: ResponseFields) -> bool:
    if fields.store and not house.responses.is_on:
        raise InvalidRequest("responses are not stored by this server; leave store out", param="store")
    return house.responses.is_on and fields.store is not False


async def _conversation(house: Services, previous: str | None, key: str) -> list[Item]:
    if previous is None:
        return []
    found = await _from_store(house.responses.conversation, previous, key)
    if found is None:
        raise InvalidRequest(
            f"the response {shown(previous)}, or one before it, is not stored here; send the whole conversation",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


async def _from_store(work: Callable[[str, str], T], response_id: str, key: str) -> T:
    """``work`` of the store, in a thread. InternalFault in words where its file cannot be used."""
    try:
        return await asyncio.to_thread(work, response_id, key)
    except (sqlite3.Error, OSError, StartupError) as error:
        log.warning("stored responses cannot be used: %s", error, extra={"id": response_id[:64]})
        raise InternalFault("the server's stored responses cannot be used; its log says why") from None


async def _put(
    house: Services, response: dict[str, Any], items: list[Item], previous: str | None, key: str
) -> bool:
    """False when it cannot be stored: the answer is worth more than its copy."""
    try:
        return await asyncio.to_thread(house.responses.put, response, items, previous, key)
    except (sqlite3.Error, OSError, StartupError) as error:
        log.warning("a response was not stored: %s", error, extra={"id": response["id"]})
        return False


def _echo(
    house: Services, fields: ResponseFields, generation: GenerationRequest, model: str, stores: bool
) -> dict[str, Any]:
    """What the answer repeats of the request, with the values that were used."""
    params = generation.prompts[0].params
    reasoning = fields.reasoning or {}
    return {
        "id": generation.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "service_tier": "default",
        "store": stores,
        "temperature": params.temperature,
        "text": {"format": (fields.text or {}).get("format") or {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in fields.tools or ()],
        "top_logprobs": 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        **({} if fields.user is None else {"user": fields.user}),
    }


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "namespace":
        return {**tool, "tools": [_shown_tool(inner) for inner in tool["tools"]]}
    return {
        "type": "function",
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": bool(tool.get("strict")),
    }
