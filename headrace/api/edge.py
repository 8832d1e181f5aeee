"""The outermost layers: a request id on every answer, and every failure as JSON.

``RequestIds`` wraps everything but ``BelowRoot``, which is there with ``--root-path`` only. ``ErrorBoundary`` sits
inside CORS (so that browsers may read errors) and outside authentication: whatever is raised in there becomes an
answer in the dialect's error shape, or a log line when the answer has already begun. No traceback, path or class
name leaves the process.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.dialects import error_response, is_anthropic
from headrace.api.errors import (
    ClientGone,
    MethodNotAllowed,
    RateLimited,
    RouteNotFound,
)
from headrace.api.request_scope import REQUEST_ID, SHOWN_ID, is_accepted
from headrace.errors import InternalFault, InvalidRequest, RequestError
from headrace.gateway.service import RequestMetrics

log = logging.getLogger("headrace.api")

HEADER = "x-request-id"
ANTHROPIC_HEADER = "request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})
CLIENT_CLOSED = 499
"""Status in the log (never sent) of requests whose client left."""


class BelowRoot:
    """Takes ``root_path`` off the paths that have it, so that a proxy may strip it or not."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path.startswith(self._root_path + "/"):
                path = path.removeprefix(self._root_path)
            scope = {**scope, "path": path, "root_path": self._root_path}
        await self._app(scope, receive, send)


class RequestIds:
    """Gives each request an id, sends it back (the client's own when that is sane), writes the access log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[REQUEST_ID] = uuid.uuid4().hex
        offered = Headers(scope=scope).get(HEADER, "")
        shown_id = offered if _SANE_ID.fullmatch(offered) else scope[REQUEST_ID]
        scope[SHOWN_ID] = shown_id
        began_at = time.monotonic()
        status, is_noted = CLIENT_CLOSED, False

        def note() -> None:
            """One line per request; it is there before the client has the whole answer."""
            nonlocal is_noted
            if is_noted:
                return
            is_noted = True
            log.log(
                logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO,
                "%s %s %d",
                scope["method"],
                ascii(scope["path"][:200])[1:-1],
                status,
                extra={
                    "request_id": shown_id,
                    "id": scope[REQUEST_ID],
                    "duration_s": round(time.monotonic() - began_at, 3),
                },
            )

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[HEADER] = shown_id
                if is_anthropic(scope):
                    headers[ANTHROPIC_HEADER] = shown_id
            elif not message.get("more_body"):
                note()
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            note()


class ErrorBoundary:
    """Turns what is raised inside into answers, and counts refusals."""

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched_send(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            return
        except RequestError as error:
            failure = without_frames(error)
        except Exception:
            log.exception("a request failed", extra={"id": scope[REQUEST_ID]})
            failure = InternalFault("internal error")
        else:
            return
        if not is_accepted(scope):
            self._metrics.rejected(rejection_reason(failure))
        if not begun:
            await error_response(failure, scope)(scope, receive, send)


def without_frames(error: RequestError) -> RequestError:
    """The error, without what it remembers of where it was raised.

    Its frames hold the request's body and refer back to it, and the collector that would find such a circle comes
    rarely (``headrace.core.collector``).
    """
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def rejection_reason(error: RequestError) -> str:
    """Label of the rejection counter: a code from a closed set."""
    if isinstance(error, RateLimited):
        return "rate_limit"
    return error.code or error.kind


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Routing's own errors: unknown paths and methods. ``OPTIONS`` on a known path says what is allowed."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = {"allow": ", ".join(_allowed_methods(request))} if status == 405 else {}
    path = ascii(request.url.path[:200])[1:-1]
    if status == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    refusal: RequestError = InvalidRequest("the request cannot be understood")
    if status == 404:
        refusal = RouteNotFound(f"there is no route {request.method} {path}")
    elif status == 405:
        refusal = MethodNotAllowed(f"{request.method} is not allowed on {path}")
    request.app.state.services.metrics.rejected(rejection_reason(refusal))
    answer = error_response(refusal, request.scope)
    answer.headers.update(headers)
    return answer


def _allowed_methods(request: Request) -> list[str]:
    """All methods of the path: each may be a route of its own, and the router names those of one."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return sorted(methods)
