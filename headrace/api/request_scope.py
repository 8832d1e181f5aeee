"""Facts about a request that the middleware notes in its ASGI scope and the routes read."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

from headrace.config import ApiKey

REQUEST_ID = "headrace.request_id"
SHOWN_ID = "headrace.shown_id"
KEY = "headrace.key"
ACCEPTED = "headrace.accepted"


def request_id(request: Request) -> str:
    """Our own id of the request; answers' ids are made of it."""
    return str(request.scope[REQUEST_ID])


def shown_id(scope: Scope) -> str:
    """The id that the answer's header carries: the client's own, or ours."""
    return str(scope[SHOWN_ID])


def key_name(request: Request) -> str:
    """Name of the API key that the request was let in with; "" without keys."""
    key = request.scope.get(KEY)
    return key.name if isinstance(key, ApiKey) else ""


def note_accepted(request: Request) -> None:
    """The engine has the request: a later failure is no rejection."""
    request.scope[ACCEPTED] = True


def is_accepted(scope: Scope) -> bool:
    return bool(scope.get(ACCEPTED))
