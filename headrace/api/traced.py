"""The outermost layer when tracing is on: one span per HTTP request (``headrace.gateway.tracing``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.api.edge import CLIENT_CLOSED, QUIET_PATHS
from headrace.api.request_scope import SHOWN_ID

if TYPE_CHECKING:
    from headrace.gateway.tracing import Tracing


class TracedRequests:
    """Probes and scrapes are left out."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        status = CLIENT_CLOSED

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        method = scope["method"]
        with self._tracing.request(method, scope["path"], Headers(scope=scope)) as span:
            try:
                await self._app(scope, receive, watched_send)
            finally:
                route = getattr(scope.get("route"), "path", None)
                self._tracing.answered(span, method, route, status, str(scope.get(SHOWN_ID, "")))
