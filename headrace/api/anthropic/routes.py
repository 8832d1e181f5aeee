"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.answering import receive, streamed, whole
from headrace.api.anthropic.chat import chat_fields, omits_thinking
from headrace.api.anthropic.render import MessageRenderer, MessageShape
from headrace.api.anthropic.schema import MessagesFields, PromptFields, count_unknown, refuse_unsupported
from headrace.api.fields import convert
from headrace.api.models import json_response
from headrace.api.openai.constraints import content_demand
from headrace.api.openai.prompts import chat_request, render_chat
from headrace.api.renaming import renamed
from headrace.api.request_scope import shown_id
from headrace.api.services import Services

# Names of chat fields that errors may carry -> their names here.
_NAMES = {"response_format": "output_config.format", "thinking_token_budget": "thinking.budget_tokens"}

F = TypeVar("F", bound=PromptFields)


async def create_message(request: Request) -> Response:
    """Answer a conversation."""
    house, body, arrival = await receive(request)
    fields = _checked(house, body, MessagesFields)
    chat = chat_fields(fields, house.text.chat_template.source, house.parsers.reasoning is not None)
    with renamed(_NAMES):
        limits = house.model_limits()
        generation = await chat_request(house, chat, arrival, limits, prefix="msg_", whole_calls=True)
    shape = MessageShape(
        id=generation.id,
        model=fields.model,
        prompt_tokens=len(generation.prompts[0].token_ids),
        request_id=shown_id(request.scope),
        omits_thinking=omits_thinking(fields),
    )
    renderer = MessageRenderer(shape)
    if fields.stream:
        return await streamed(request, house, generation, renderer)
    await whole(request, house, generation, renderer.take)
    return json_response(renderer.message())


async def count_tokens(request: Request) -> Response:
    """Prompt tokens that the same body would have as a message; nothing is generated."""
    house, body, arrival = await receive(request)
    fields = _checked(house, body, PromptFields)
    chat = chat_fields(fields, house.text.chat_template.source, house.parsers.reasoning is not None)
    with renamed(_NAMES):
        content_demand(chat)
        prompt = await arrival.call(render_chat(house, chat))
    return json_response({"input_tokens": len(prompt.token_ids)})


def _checked(house: Services, body: dict[str, Any], schema: type[F]) -> F:
    fields = convert(body, schema)
    refuse_unsupported(body)
    house.served_name(fields.model)
    if unknown := count_unknown(body):
        house.metrics.unknown_field(unknown)
    return fields
