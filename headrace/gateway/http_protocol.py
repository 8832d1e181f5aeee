"""uvicorn's HTTP parser with limits on what a client may make the server hold before a request exists.

httptools bounds neither the size of a request head nor the time a client takes to send head and body; they are
bounded here, and so is the number of connections. Malformed requests get the API's JSON error, not plain text.
HTTP/1.0 knows no chunks: there, a body of unknown length ends where the connection does. The end of what a client
sends looks the same whether it left or waits; it is taken as gone a moment later. A client that is refused while
it sends is read for a moment, because closing at once would reset the connection and take the answer with it.
"""

from __future__ import annotations

import asyncio
import resource
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 1024
HEAD_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 300.0
HALF_CLOSED_S = 0.5
LINGER_S = 2.0
MAX_CONNECTIONS = 8192
# Descriptors that are no connections: sockets of workers, files, pipes.
SPARE_FILES = 128

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._num_turns = 0  # from head to body and back
        self._is_oversized = False
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None  # ``cycle`` is the newest, which may wait behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            self._refuse(503, "too many connections; close some, or try again later")
            return
        self._start_timer(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """The parent tells the newest request; one that is being answered while another waits has to know, too."""
        self._stop_timer()
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that sends no more has left, or waits for its answer: what comes soon it still gets."""
        cycle = self.cycle
        if (
            self._is_refused
            or self.scheme == "https"
            or cycle is None
            or cycle.more_body
            or cycle.response_complete
        ):
            return False
        self.loop.call_later(HALF_CLOSED_S, self.transport.close)
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._in_head and self._timer is None:
            self._start_timer(HEAD_TIMEOUT_S)
        turns = self._num_turns
        super().data_received(data)
        if self._in_head and self._num_turns == turns:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_size()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._num_turns += 1
        self._stop_timer()
        self._start_timer(BODY_TIMEOUT_S)
        self._is_oversized = len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES
        if self._is_oversized:  # it came in one piece
            raise ValueError("head too large")  # the parser stops, and send_400_response is called
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.send = _until_close(self.cycle)  # type: ignore[assignment]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._stop_timer()
        self._in_head = True
        self._num_turns += 1
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        if self._is_oversized:
            self._refuse_size()
        else:
            self._refuse(400, "the request is not valid HTTP")

    # -- inside

    def _start_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _timed_out(self) -> None:
        self._timer = None
        if not self._in_head:
            self._refuse(408, f"the request's body did not arrive within {BODY_TIMEOUT_S:.0f} s")
        elif not self._head_bytes:  # connected and said nothing
            self.transport.close()
        else:
            self._refuse(408, f"the request's head did not arrive within {HEAD_TIMEOUT_S:.0f} s")

    def _refuse_size(self) -> None:
        self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer and close; nothing is sent in the middle of another answer."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._stop_timer()
        if not self._is_quiet():
            self.transport.close()
            return
        if self.cycle is not None:
            self.cycle.disconnected = True  # its application, if it reads the body, has nobody to answer
        self.transport.write(_refusal(status, message))
        most = max_connections()
        if len(self.connections) > most + min(most, SPARE_FILES) // 4:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _is_quiet(self) -> bool:
        """Whether no answer is under way: none was begun, and no request stands before this one."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        return not self.cycle.response_started and not self.pipeline


def _refusal(status: int, message: str) -> bytes:
    """A whole answer behind which the connection ends."""
    kind = "invalid_request_error" if status < 500 else "service_unavailable_error"
    body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %s\r\n" % (
        status, _REASONS[status], len(body), uuid.uuid4().hex.encode(),
    )  # fmt: skip
    retry = b"retry-after: 1\r\n" if status == 503 else b""
    return head + retry + b"connection: close\r\n\r\n" + body


def _until_close(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """``cycle.send``, but without chunks; uvicorn closes HTTP/1.0 connections behind the body."""
    send = cycle.send
    is_open_ended = False

    async def send_plain(message: Any) -> None:
        nonlocal is_open_ended
        if message["type"] == "http.response.start":
            is_open_ended = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if is_open_ended:
                cycle.chunked_encoding = False
        elif is_open_ended:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_plain


def max_connections() -> int:
    """What the limit on open files leaves (half of it where it is low), up to ``MAX_CONNECTIONS``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, max(soft - SPARE_FILES, soft // 2)))
