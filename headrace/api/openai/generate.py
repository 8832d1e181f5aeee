"""``POST /v1/chat/completions`` and ``POST /v1/completions``: body in, events out, one way for both modes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.answering import receive, streamed, whole
from headrace.api.fields import convert
from headrace.api.openai.prompts import chat_request, completion_request
from headrace.api.openai.render import Shape, StreamRenderer, render_body
from headrace.api.openai.schema import (
    HINTS,
    ChatFields,
    CompletionFields,
    SamplingFields,
    count_unknown,
    refuse_unsupported,
)
from headrace.api.services import Services
from headrace.gateway.events import Folded
from headrace.gateway.pipeline import GenerationRequest

F = TypeVar("F", bound=SamplingFields)


async def create_chat_completion(request: Request) -> Response:
    """Answer a chat."""
    house, body, arrival = await receive(request)
    fields = _checked(house, body, ChatFields)
    model = house.served_name(fields.model)
    generation = await chat_request(house, fields, arrival, house.model_limits())
    answer = generation.text.answer
    shows = answer is not None and answer.reasoning is not None and not answer.hides_reasoning
    shape = _shape(fields, generation, model, chat=True, logprobs=bool(fields.logprobs), reasoning=shows)
    return await _answer(request, house, generation, shape, bool(fields.stream))


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    house, body, arrival = await receive(request)
    fields = _checked(house, body, CompletionFields)
    model = house.served_name(fields.model)
    generation, texts = await completion_request(house, fields, arrival, house.model_limits())
    echo = texts if fields.echo else ()
    shape = _shape(fields, generation, model, chat=False, logprobs=fields.logprobs is not None, echo=echo)
    return await _answer(request, house, generation, shape, bool(fields.stream))


def _checked(house: Services, body: dict[str, Any], schema: type[F]) -> F:
    fields = convert(body, schema)
    refuse_unsupported(body, schema.__struct_fields__)
    if unknown := count_unknown(body, {*schema.__struct_fields__, *HINTS}):
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
    if stream:
        return await streamed(request, house, generation, StreamRenderer(shape))
    folded = Folded(shape.num_sequences)
    await whole(request, house, generation, folded.add)
    return Response(render_body(shape, folded), media_type="application/json")
