"""``GET /v1/models`` and ``/version``: what is served here."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.api.dialects import is_anthropic
from headrace.api.services import Services, services


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def list_models(request: Request) -> Response:
    """All names that ``model`` may have."""
    house = services(request)
    if is_anthropic(request.scope):
        names = house.config.served_model_names
        cards = [_anthropic_card(house, name) for name in names]
        return json_response({"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]})
    return json_response({"object": "list", "data": [_card(house, name) for name in house.text_models.names]})


async def get_model(request: Request) -> Response:
    """One of them; names may contain slashes."""
    house = services(request)
    name = str(request.path_params["model_id"])
    if is_anthropic(request.scope) or all(side.name != name for side in house.text_models.sides):
        name = house.served_name(name)
    return json_response(_anthropic_card(house, name) if is_anthropic(request.scope) else _card(house, name))


async def get_version(request: Request) -> Response:
    """Version of the server."""
    return json_response({"version": headrace.__version__})


def _anthropic_card(house: Services, name: str) -> dict[str, object]:
    created = datetime.fromtimestamp(int(house.started_at), UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": _max_length(house),
        "max_tokens": house.config.max_request_tokens,
    }


def _max_length(house: Services) -> int | None:
    ready = house.engine.state().ready
    return ready.max_model_len if ready else house.config.engine.max_model_len


def _card(house: Services, name: str) -> dict[str, object]:
    beside = next((side.model.engine for side in house.text_models.sides if side.name == name), None)
    ready = None if beside is None else beside.state().ready
    length = _max_length(house) if beside is None else ready and ready.max_model_len
    main = name in house.config.served_model_names
    return {
        "id": name,
        "object": "model",
        "created": int(house.started_at),
        "owned_by": "headrace",
        "root": house.config.served_model_names[0] if main else name,
        "parent": None,
        "max_model_len": length,
    }
