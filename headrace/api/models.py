"""``GET /v1/models`` and ``/version``: what is served here."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.api.services import Services, services


def json_response(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def list_models(request: Request) -> Response:
    """All names that ``model`` may have."""
    house = services(request)
    return json_response(
        {"object": "list", "data": [_card(house, name) for name in house.config.served_model_names]}
    )


async def get_model(request: Request) -> Response:
    """One of them; names may contain slashes."""
    house = services(request)
    return json_response(_card(house, house.served_name(str(request.path_params["model_id"]))))


async def get_version(request: Request) -> Response:
    """Version of the server."""
    return json_response({"version": headrace.__version__})


def _card(house: Services, name: str) -> dict[str, object]:
    ready = house.engine.state().ready
    return {
        "id": name,
        "object": "model",
        "created": int(house.started_at),
        "owned_by": "headrace",
        "root": house.config.served_model_names[0],
        "parent": None,
        "max_model_len": ready.max_model_len if ready else house.config.engine.max_model_len,
    }
