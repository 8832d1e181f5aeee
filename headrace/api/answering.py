"""From a validated request to an HTTP answer, the same way for every dialect.

    body ─► receive ─► (the dialect makes a GenerationRequest and a renderer) ─► streamed | whole

A streamed answer begins only after the engine took the request in, so a refusal is an ordinary error answer. A
renderer turns events into bytes; a whole answer feeds the same events to whatever folds them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.arrival import Arrival
from headrace.api.body import decode_object, read_body
from headrace.api.request_scope import key_name, note_accepted, request_id
from headrace.api.services import Services, services
from headrace.api.sse import EventStream, until_disconnect
from headrace.errors import InternalFault, RequestError
from headrace.gateway.events import Event
from headrace.gateway.pipeline import Generation, GenerationRequest

log = logging.getLogger("headrace.api")


class Renderer(Protocol):
    """Server-sent events of one answer."""

    def begin(self) -> bytes:
        """Before the first event; may be empty."""
        ...

    def render(self, events: Iterable[Event]) -> bytes:
        """Bytes of a batch of events, in order; may be empty."""
        ...

    async def end(self) -> bytes:
        """All events were rendered: what closes the stream."""
        ...

    async def fail(self, error: RequestError) -> bytes:
        """The request failed after the stream had begun: the last bytes of it."""
        ...


async def receive(request: Request) -> tuple[Services, dict[str, Any], Arrival]:
    """Read and decode a JSON body."""
    received_at = time.monotonic()
    house = services(request)
    raw = await read_body(request, house.config.max_body_bytes)
    arrival = Arrival(request_id(request), key_name(request), received_at, len(raw))
    return house, await arrival.call(lambda: decode_object(raw)), arrival


async def streamed(
    request: Request,
    house: Services,
    generation: GenerationRequest,
    renderer: Renderer,
    close: Callable[[], Awaitable[None]] | None = None,
) -> Response:
    """Submit, then stream. ``close`` is called when the stream is over, however it ended, if it has begun."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(house.pipeline.generate(generation))
        note_accepted(request)
        if close is not None:
            stack.push_async_callback(close)
        held = stack.pop_all()
    return EventStream(
        _chunks(running, renderer), close=held.aclose, send_timeout_s=house.config.progress_timeout_s
    )


async def whole(
    request: Request, house: Services, generation: GenerationRequest, take: Callable[[list[Event]], object]
) -> None:
    """Submit, and give all events to ``take``. Raises the request's ``RequestError``, or ``ClientGone``."""

    async def run(running: Generation) -> None:
        async with aclosing(running.events()) as batches:
            async for batch in batches:
                take(batch)

    async with house.pipeline.generate(generation) as running:
        note_accepted(request)
        await until_disconnect(request.receive, run(running))


async def _chunks(running: Generation, renderer: Renderer) -> AsyncGenerator[bytes, None]:
    yield renderer.begin()
    try:
        async with aclosing(running.events()) as batches:
            async for batch in batches:
                yield renderer.render(batch)
        last = await renderer.end()
    except RequestError as error:
        last = await renderer.fail(error)
    except Exception:
        log.exception("a stream failed")
        last = await renderer.fail(InternalFault("internal error"))
    yield last
