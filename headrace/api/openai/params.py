"""From request fields to ``SamplingParams``: defaults, limits, and what must agree with what.

Defaults, first one wins: the request's field, the server's ``--default-*`` flag, the model's
generation_config.json, OpenAI's default. Output length: ``max_tokens`` is a wish, clipped to the room that the
prompt leaves in the context and to ``--max-request-tokens``; without a wish generation runs to ``--max-tokens`` or
the context's end.
"""

from __future__ import annotations

import secrets

import msgspec

from headrace.api.fields import shown
from headrace.api.limits import ModelLimits
from headrace.api.openai.schema import ChatFields, CompletionFields, SamplingFields
from headrace.config import GenerationDefaults, ServerConfig
from headrace.errors import ContextLengthExceeded, InvalidRequest
from headrace.params import SamplingParams

GREEDY_BELOW = 1e-4
"""Temperatures up to this are greedy: dividing by them would overflow, and decides nothing else."""

_SEED_MASK = 2**64 - 1


def sampling_params(
    fields: SamplingFields, defaults: GenerationDefaults, end_token_ids: frozenset[int], limits: ModelLimits
) -> SamplingParams:
    """Everything but ``max_tokens`` and ``seed``, which belong to a prompt (``for_prompt``)."""
    check_agreement(fields)
    temperature = _first(fields.temperature, defaults.temperature)
    top_p = _first(fields.top_p, defaults.top_p)
    top_k = max(0, fields.top_k if fields.top_k is not None else defaults.top_k)
    top_k = 0 if top_k >= limits.vocab_size else top_k  # keeping all tokens is keeping no limit
    if top_p == 0:  # the smallest set that has any mass at all: one token
        top_p, top_k = 1.0, 1
    ends = frozenset() if fields.ignore_eos else end_token_ids
    asked = check_token_ids(fields.stop_token_ids or [], "stop_token_ids", limits.vocab_size)
    allowed = check_token_ids(fields.allowed_token_ids or [], "allowed_token_ids", limits.vocab_size)
    if fields.min_tokens:
        _check_some_token_goes_on(allowed, ends | set(asked), limits.vocab_size)
    return SamplingParams(
        max_tokens=0,
        min_tokens=fields.min_tokens or 0,
        temperature=0.0 if temperature <= GREEDY_BELOW else temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=_first(fields.min_p, defaults.min_p),
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_first(fields.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_first(fields.frequency_penalty, 0.0),
        logit_bias=_logit_bias(fields.logit_bias or {}, limits.vocab_size),
        allowed_token_ids=allowed,
        stop_token_ids=tuple(sorted(ends | set(asked))),
        logprobs=_num_logprobs(fields),
        prompt_logprobs=_num_prompt_logprobs(fields),
    )


def for_prompt(
    params: SamplingParams,
    fields: SamplingFields,
    num_prompt_tokens: int,
    limits: ModelLimits,
    config: ServerConfig,
) -> SamplingParams:
    """``params`` with the room this prompt leaves, and a seed; ``ContextLengthExceeded`` when there is no room."""
    if config.max_prompt_tokens is not None and num_prompt_tokens > config.max_prompt_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; this server takes at most {config.max_prompt_tokens}",
            param=prompt_field(fields),
        )
    wanted, name = wanted_tokens(fields)
    room = limits.max_model_len - num_prompt_tokens
    if room < (0 if wanted == 0 else 1):
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and leaves no room for output: this model's context is"
            f" {limits.max_model_len} tokens, prompt and output together",
            param=prompt_field(fields),
        )
    max_tokens = min(config.max_tokens if wanted is None else wanted, config.max_request_tokens, room)
    if wanted is not None and params.min_tokens > wanted:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, more than {name}, which is {wanted}", param="min_tokens"
        )
    seed = secrets.randbits(64) if fields.seed is None else fields.seed & _SEED_MASK
    return msgspec.structs.replace(
        params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens), seed=seed
    )


def prompt_field(fields: SamplingFields) -> str:
    return "messages" if isinstance(fields, ChatFields) else "prompt"


def wanted_tokens(fields: SamplingFields) -> tuple[int | None, str]:
    """The output length asked for and the field that says it; ``max_completion_tokens`` is the stronger one."""
    if isinstance(fields, ChatFields) and fields.max_completion_tokens is not None:
        return fields.max_completion_tokens, "max_completion_tokens"
    return fields.max_tokens, "max_tokens"


def check_agreement(fields: SamplingFields) -> None:
    """Fields that only make sense together."""
    n = fields.n or 1
    if fields.best_of is not None and fields.best_of != n:
        raise InvalidRequest(
            f"best_of is {fields.best_of}; only the value of n, {n}, is supported: use n", param="best_of"
        )
    echo = isinstance(fields, CompletionFields) and fields.echo
    if fields.max_tokens == 0 and not echo and fields.prompt_logprobs is None:
        where = "" if isinstance(fields, ChatFields) else " (0 is for echo)"
        raise InvalidRequest(f"max_tokens must be at least 1, not 0{where}", param="max_tokens")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if fields.stream_options is not None and fields.stream_options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported; leave it out or set it to false",
            param="stream_options",
        )
    if fields.stream and fields.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    if isinstance(fields, ChatFields) and fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if isinstance(fields, CompletionFields) and echo and fields.logprobs is not None and fields.stream and n > 1:
        raise InvalidRequest("echo with logprobs can be streamed for n = 1 only", param="n")
    if fields.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty", param="cache_salt")


def check_token_ids(token_ids: list[int], param: str, vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"{param} has token id {token_id}; this model's vocabulary ends at {vocab_size - 1}", param=param
            )
    return tuple(dict.fromkeys(token_ids))


def _check_some_token_goes_on(allowed: tuple[int, ...], stops: frozenset[int], vocab_size: int) -> None:
    """``min_tokens`` bans the tokens that end an answer; where nothing else is allowed, nothing can be sampled."""
    if allowed and stops.issuperset(allowed):
        raise InvalidRequest(
            "allowed_token_ids has only tokens that end the answer, which min_tokens keeps from coming",
            param="allowed_token_ids",
        )
    if len(stops) >= vocab_size:
        raise InvalidRequest(
            f"stop_token_ids has all {vocab_size} tokens of the vocabulary, which min_tokens keeps from coming",
            param="stop_token_ids",
        )


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 20):
            raise InvalidRequest(f"logit_bias has the key {shown(key)}, which is no token id", param="logit_bias")
        result[check_token_ids([int(key)], "logit_bias", vocab_size)[0]] = value
    return result


def _num_logprobs(fields: SamplingFields) -> int | None:
    if isinstance(fields, ChatFields):
        return (fields.top_logprobs or 0) if fields.logprobs else None
    return fields.logprobs if isinstance(fields, CompletionFields) else None


def _num_prompt_logprobs(fields: SamplingFields) -> int | None:
    """Asked for directly, or by echo together with logprobs; the larger of both."""
    asked = fields.prompt_logprobs
    if isinstance(fields, CompletionFields) and fields.echo and fields.logprobs is not None:
        return max(fields.logprobs, asked or 0)
    return asked
