"""From checked fields to a ``GenerationRequest``: template or tokenizer, parameters, room.

Tokenizing a long prompt takes a while; it then happens in a thread, so that other streams go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.api.arrival import Arrival
from headrace.api.fields import shown
from headrace.api.limits import ModelLimits
from headrace.api.openai.constraints import chat_grammar, completion_grammar, content_demand
from headrace.api.openai.params import check_token_ids, for_prompt, sampling_params
from headrace.api.openai.schema import ChatFields, CompletionFields, SamplingFields
from headrace.api.openai.thinking import effort_variables
from headrace.api.openai.tools import tools_for_template
from headrace.api.parsers import kept_token_ids
from headrace.api.services import Services
from headrace.config import EngineConfig
from headrace.errors import InvalidRequest
from headrace.gateway.parsed_text import AnswerOptions
from headrace.gateway.pipeline import GenerationRequest, Prompt
from headrace.gateway.sequence_text import TextOptions, ThinkingLimit
from headrace.params import Grammar
from headrace.text.chat_messages import content_text
from headrace.text.reasoning import ending_of
from headrace.text.stop_strings import validate_stops

MAX_SEQUENCES = 1024


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat's prompt.

    Attributes:
        token_ids: of the prompt.
        opened: what the prompt already holds of the answer: an opened thinking block, or the continued message.
        tools: those that the template has shown.
    """

    token_ids: list[int]
    opened: str
    tools: list[dict[str, Any]] | None


def render_chat(services: Services, fields: ChatFields) -> Callable[[], RenderedChat]:
    """A function that renders the messages and tokenizes the result; tools are checked at once."""
    tools = tools_for_template(fields)
    template = services.text.chat_template
    variables = {**services.config.chat_template_kwargs, **(fields.chat_template_kwargs or {})}
    if fields.reasoning_effort is not None:
        variables = {**effort_variables(template.source(bool(tools)), fields.reasoning_effort), **variables}
    continues = bool(fields.continue_final_message)
    opens_turn = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt

    def render() -> RenderedChat:
        prompt = template.render(
            fields.messages,
            tools=tools,
            add_generation_prompt=opens_turn,
            continue_final_message=continues,
            kwargs=variables,
        )
        opened = (
            content_text(fields.messages[-1].get("content"), "the last message")
            if continues
            else services.parsers.opening(prompt.text)
        )
        token_ids, bos = prompt.token_ids, services.text.tokenizer.bos_id
        if fields.add_special_tokens and bos is not None and token_ids[:1] != [bos]:
            token_ids = [bos, *token_ids]
        return RenderedChat(token_ids, opened, tools)

    return render


async def chat_request(
    services: Services,
    fields: ChatFields,
    arrival: Arrival,
    limits: ModelLimits,
    *,
    prefix: str = "chatcmpl-",
    whole_calls: bool = False,
) -> GenerationRequest:
    """The request of a chat, its id beginning with ``prefix``.

    ``whole_calls``: the dialect can only show calls whose arguments are a JSON object.
    """
    content_demand(fields)  # what is no demand is refused before the work of rendering
    prompt = await arrival.call(render_chat(services, fields))
    grammar = await chat_grammar(services, fields, prompt.tools or (), opened=bool(prompt.opened))
    answer = services.parsers.options(
        prompt.tools,
        opened=prompt.opened,
        whole_calls=whole_calls,
        parallel=fields.parallel_tool_calls is not False,
        hides_reasoning=fields.include_reasoning is False,
    )
    request = _generation_request(
        services, fields, [prompt.token_ids], arrival, limits, f"{prefix}{arrival.id}", answer, grammar
    )
    return _with_thinking_limit(services, fields, request)


def _with_thinking_limit(services: Services, fields: ChatFields, request: GenerationRequest) -> GenerationRequest:
    """The request with its thinking budget, or the server's; the latter only where it can apply."""
    asked = fields.thinking_token_budget
    budget = asked if asked is not None else services.config.thinking_token_budget
    answer = request.text.answer
    if budget is None:
        return request
    can_apply = answer is not None and answer.reasoning is not None and request.n == 1
    if not can_apply and asked is not None:
        why = "needs n = 1" if request.n > 1 else "needs a reasoning parser, and this model has none"
        raise InvalidRequest(f"thinking_token_budget {why}", param="thinking_token_budget")
    if not can_apply or answer is None or answer.reasoning is None:
        return request
    ending = services.text.tokenizer.encode(ending_of(answer.reasoning), parse_special=True, add_bos=False)
    limit = ThinkingLimit(budget, tuple(ending), request.prompts[0].params.max_tokens)
    return msgspec.structs.replace(request, text=msgspec.structs.replace(request.text, thinking=limit))


async def completion_request(
    services: Services, fields: CompletionFields, arrival: Arrival, limits: ModelLimits
) -> tuple[GenerationRequest, list[str]]:
    """The request, and the prompts' texts (for echo)."""
    prompts = split_prompts(fields.prompt, limits)
    _check_number(len(prompts), fields.n or 1, services.config.engine)
    tokenizer = services.text.tokenizer

    def tokenize() -> list[list[int]]:
        return [
            tokenizer.encode(prompt, parse_special=True, add_bos=fields.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    token_ids = await arrival.call(tokenize)
    grammar = await completion_grammar(services, fields)
    request = _generation_request(
        services, fields, token_ids, arrival, limits, f"cmpl-{arrival.id}", grammar=grammar
    )
    if not fields.echo:
        return request, [""] * len(prompts)
    texts = [
        prompt if isinstance(prompt, str) and cut.token_ids is ids else tokenizer.decode(cut.token_ids)
        for prompt, ids, cut in zip(prompts, token_ids, request.prompts, strict=True)
    ]
    return request, texts


def split_prompts(prompt: object, limits: ModelLimits, param: str = "prompt") -> list[str | list[int]]:
    """The four forms of the field ``param`` as a list of texts or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"{param} must not be an empty list", param=param)
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if not any(isinstance(item, str | list) for item in prompt):
        return [_token_ids(prompt, param, param, limits)]
    if all(isinstance(item, list) for item in prompt):
        return [_token_ids(item, f"{param}[{i}]", param, limits) for i, item in enumerate(prompt)]
    raise InvalidRequest(
        f"{param} must be a string, a list of strings, a list of token ids or a list of such lists", param=param
    )


def _token_ids(items: list[object], where: str, param: str, limits: ModelLimits) -> list[int]:
    token_ids: list[int] = []
    for item in items:
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise InvalidRequest(f"{where} has {shown(item)}, which is no token id", param=param)
        token_ids.append(item)
    check_token_ids(token_ids, where, limits.vocab_size)
    return token_ids


def _generation_request(
    services: Services,
    fields: SamplingFields,
    prompts: list[list[int]],
    arrival: Arrival,
    limits: ModelLimits,
    request_id: str,
    answer: AnswerOptions | None = None,
    grammar: Grammar | None = None,
) -> GenerationRequest:
    n = fields.n or 1
    params = sampling_params(fields, services.defaults, services.text.end_token_ids, limits)
    if grammar is not None:
        params = msgspec.structs.replace(params, grammar=grammar)
    end_token_ids = services.text.end_token_ids - set(fields.stop_token_ids or ())
    options = TextOptions(
        stop=validate_stops(fields.stop),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special=fields.skip_special_tokens is not False,
        end_token_ids=end_token_ids,
        min_tokens=params.min_tokens,
        interval=services.config.stream_interval if fields.stream else None,
        kept_token_ids=kept_token_ids(answer, services.text.tokenizer),
        answer=answer,
    )
    return GenerationRequest(
        id=request_id,
        prompts=tuple(
            Prompt(cut, for_prompt(params, fields, len(cut), limits, services.config))
            for cut in (
                truncated(token_ids, fields, limits, where) for token_ids, where in _named(prompts, fields)
            )
        ),
        n=n,
        text=options,
        priority=fields.priority or 0,
        key=arrival.key,
        cache_salt=fields.cache_salt or "",
        received_at=arrival.received_at,
    )


def _check_number(num_prompts: int, n: int, engine: EngineConfig) -> None:
    """More prompts than the engine ever takes are no matter of coming back later."""
    if n * num_prompts > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{num_prompts} prompts with n = {n} are more than {MAX_SEQUENCES} sequences", param="n"
        )
    seats = engine.max_num_seqs if engine.continuous_batching else 1
    if num_prompts > seats + engine.max_queue:
        raise InvalidRequest(
            f"{num_prompts} prompts are more than this server takes at once: {seats} may run and"
            f" {engine.max_queue} wait; send fewer, or start it with a larger --max-queue",
            param="prompt",
        )


def _named(prompts: list[list[int]], fields: SamplingFields) -> list[tuple[list[int], str]]:
    if isinstance(fields, ChatFields):
        return [(prompts[0], "messages")]
    if len(prompts) == 1:
        return [(prompts[0], "prompt")]
    return [(token_ids, f"prompt[{position}]") for position, token_ids in enumerate(prompts)]


def truncated(token_ids: list[int], fields: SamplingFields, limits: ModelLimits, where: str) -> list[int]:
    """The last ``truncate_prompt_tokens`` tokens; -1 keeps what leaves room for one token of output."""
    if not token_ids:
        raise InvalidRequest(f"{where} has no tokens; at least one is needed", param=where)
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1, not 0", param="truncate_prompt_tokens"
        )
    return token_ids[-(limits.max_model_len - 1 if keep == -1 else keep) :]
