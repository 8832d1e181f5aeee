"""Answers that end when the client goes: event streams and long single answers.

A disconnect is awaited beside the work (two tasks, the first one wins), not polled. The stream's generator is
closed before the response returns, so whatever it holds is given back at once. Sending waits for the socket: a
client that does not read stops its own stream, and is dropped when one write takes longer than the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.errors import ClientGone

T = TypeVar("T")

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(Response):
    """A server-sent event stream of ready-made bytes.

    Args:
        chunks: yields bytes (empty ones are not sent); closed when the client goes or does not read.
        close: called at the end, whatever happens; gives back what the stream holds.
        send_timeout_s: how long one write may wait for a client that does not read.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], Awaitable[None]],
        send_timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._chunks = chunks
        self._close = close
        self._send_timeout_s = send_timeout_s
        self.status_code = 200
        self.background = None
        self.init_headers({**STREAM_HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await self._chunks.aclose()
            await self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watch = _WriteWatch(self._send_timeout_s)
        try:
            async for chunk in self._chunks:
                if chunk:
                    watch.begin()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    watch.end()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (OSError, asyncio.CancelledError):
            if watch.expired:
                raise ClientGone from None
            raise
        finally:
            watch.close()


class _WriteWatch:
    """Cancels the task whose write waits too long. One timer per stream, not per write."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._began_at: float | None = None
        self._timer = self._loop.call_later(timeout_s, self._check)
        self.expired = False

    def begin(self) -> None:
        self._began_at = self._loop.time()

    def end(self) -> None:
        self._began_at = None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now = self._loop.time()
        if self._began_at is not None and now - self._began_at >= self._timeout_s and self._task is not None:
            self.expired = True
            self._task.cancel()
            return
        due = (now if self._began_at is None else self._began_at) + self._timeout_s
        self._timer = self._loop.call_at(due, self._check)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; ``ClientGone`` (and ``work`` cancelled) when the client leaves first."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
