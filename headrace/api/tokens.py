"""``POST /tokenize`` and ``/detokenize``: the model's tokenizer, as vLLM offers it. No generation, no queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.answering import receive
from headrace.api.fields import convert, unknown_fields
from headrace.api.models import json_response
from headrace.api.openai.params import check_token_ids
from headrace.api.openai.prompts import render_chat
from headrace.api.openai.schema import ChatFields
from headrace.api.services import Services
from headrace.errors import InvalidRequest


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either ``prompt``, or ``messages`` with the fields behind them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


class Detokenize(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0)]]


async def tokenize(request: Request) -> Response:
    """Token ids of a ``prompt``, or of ``messages`` through the chat template."""
    house, body, arrival = await receive(request)
    fields = convert(body, TokenizeRequest)
    house.served_name(fields.model)
    _count_unknown(house, body, TokenizeRequest)
    token_ids = await arrival.call(_encoder(house, fields))
    texts = (
        [house.text.tokenizer.token_text(token_id) for token_id in token_ids] if fields.return_token_strs else None
    )
    ready = house.engine.state().ready
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": ready.max_model_len if ready else house.config.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": texts,
        }
    )


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    house, body, arrival = await receive(request)
    fields = convert(body, Detokenize)
    house.served_name(fields.model)
    _count_unknown(house, body, Detokenize)
    tokenizer = house.text.tokenizer
    check_token_ids(fields.tokens, "tokens", tokenizer.vocab_size)
    return json_response({"prompt": await arrival.call(lambda: tokenizer.decode(fields.tokens))})


def _encoder(house: Services, fields: TokenizeRequest) -> Callable[[], list[int]]:
    prompt, messages = fields.prompt, fields.messages
    if prompt is not None and messages is None:
        return lambda: house.text.tokenizer.encode(prompt, parse_special=True, add_bos=fields.add_special_tokens)
    if messages is None or prompt is not None:
        raise InvalidRequest("exactly one of prompt and messages is needed", param="prompt")
    render = render_chat(
        house,
        ChatFields(
            messages=messages,
            tools=fields.tools,
            add_special_tokens=fields.add_special_tokens,
            add_generation_prompt=fields.add_generation_prompt,
            continue_final_message=fields.continue_final_message,
            chat_template_kwargs=fields.chat_template_kwargs,
            tool_choice=fields.tool_choice,
            reasoning_effort=fields.reasoning_effort,
        ),
    )
    return lambda: render().token_ids


def _count_unknown(house: Services, body: dict[str, Any], schema: type[msgspec.Struct]) -> None:
    if unknown := unknown_fields(body, schema):
        house.metrics.unknown_field(len(unknown))
