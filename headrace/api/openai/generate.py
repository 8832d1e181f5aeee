"""``POST /v1/chat/completions`` and ``POST /v1/completions``: body in, events out, one way for both modes."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.body import decode_object, read_body
from headrace.api.errors import openai_error_bytes
from headrace.api.fields import convert
from headrace.api.openai.prompts import Arrival, chat_request, completion_request
from headrace.api.openai.render import DONE, Shape, StreamRenderer, render_body
from headrace.api.openai.schema import (
    ChatFields,
    CompletionFields,
    SamplingFields,
    count_unknown,
    refuse_unsupported,
)
from headrace.api.request_scope import key_name, note_accepted, request_id
from headrace.api.services import Services, services
from headrace.api.sse import EventStream, until_disconnect
from headrace.errors import InternalFault, RequestError
from headrace.gateway.events import Folded
from headrace.gateway.pipeline import Generation, GenerationRequest

log = logging.getLogger("headrace.api")

F = TypeVar("F", bound=SamplingFields)


async def create_chat_completion(request: Request) -> Response:
    """Answer a chat."""
    house, body, arrival = await _receive(request)
    fields = _checked(house, body, ChatFields)
    model = house.served_name(fields.model)
    generation = await chat_request(house, fields, arrival, house.model_limits())
    shows = generation.text.answer is not None and generation.text.answer.reasoning is not None
    shows = shows and fields.include_reasoning is not False
    shape = _shape(fields, generation, model, chat=True, logprobs=bool(fields.logprobs), reasoning=shows)
    return await _answer(request, house, generation, shape, bool(fields.stream))


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    house, body, arrival = await _receive(request)
    fields = _checked(house, body, CompletionFields)
    model = house.served_name(fields.model)
    generation, texts = await completion_request(house, fields, arrival, house.model_limits())
    echo = texts if fields.echo else ()
    shape = _shape(fields, generation, model, chat=False, logprobs=fields.logprobs is not None, echo=echo)
    return await _answer(request, house, generation, shape, bool(fields.stream))


async def _receive(request: Request) -> tuple[Services, dict[str, Any], Arrival]:
    received_at = time.monotonic()
    house = services(request)
    raw = await read_body(request, house.config.max_body_bytes)
    arrival = Arrival(request_id(request), key_name(request), received_at, len(raw))
    return house, await arrival.call(lambda: decode_object(raw)), arrival


def _checked(house: Services, body: dict[str, Any], schema: type[F]) -> F:
    fields = convert(body, schema)
    refuse_unsupported(body, schema)
    if unknown := count_unknown(body, schema):
        house.metrics.unknown_field(unknown)
    return fields


def _shape(
    fields: SamplingFields,
    generation: GenerationRequest,
    model: str,
    *,
    chat: bool,
    logprobs: bool,
    reasoning: bool = False,
    echo: Sequence[str] = (),
) -> Shape:
    options = fields.stream_options
    continuous = bool(options and options.continuous_usage_stats)
    return Shape(
        chat=chat,
        id=generation.id,
        created=int(time.time()),
        model=model,
        prompts=[prompt.token_ids for prompt in generation.prompts],
        n=generation.n,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs is not None,
        as_ids=bool(fields.return_tokens_as_token_ids),
        token_ids=bool(fields.return_token_ids),
        reasoning=reasoning,
        echo=echo,
        usage=continuous or bool(options and options.include_usage),
        continuous_usage=continuous,
    )


async def _answer(
    request: Request, house: Services, generation: GenerationRequest, shape: Shape, stream: bool
) -> Response:
    """Submit; then one body, or a stream that begins only after the engine took the request in."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(house.pipeline.generate(generation))
        note_accepted(request)
        if not stream:
            folded = await until_disconnect(request.receive, _fold(running, shape.num_sequences))
            return Response(render_body(shape, folded), media_type="application/json")
        held = stack.pop_all()
    return EventStream(
        _chunks(running, StreamRenderer(shape)), close=held.aclose, send_timeout_s=house.config.progress_timeout_s
    )


async def _fold(running: Generation, num_sequences: int) -> Folded:
    folded = Folded(num_sequences)
    async with aclosing(running.events()) as batches:
        async for batch in batches:
            folded.add(batch)
    return folded


async def _chunks(running: Generation, renderer: StreamRenderer) -> AsyncGenerator[bytes, None]:
    """SSE bytes; a failure is an error event, and then the stream ends without ``[DONE]``."""
    try:
        async with aclosing(running.events()) as batches:
            async for batch in batches:
                yield renderer.render(batch)
        yield DONE
    except RequestError as error:
        yield b"data: %b\n\n" % openai_error_bytes(error)
    except Exception:
        log.exception("a stream failed")
        yield b"data: %b\n\n" % openai_error_bytes(InternalFault("internal error"))
