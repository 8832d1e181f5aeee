"""Schemas of ``/v1/chat/completions`` and ``/v1/completions``: every field that is known, its type and bounds.

A field is in one of four classes; docs/openai-api.md lists them for users:

    honoured    typed here, read by ``params``, ``prompts`` or the renderers
    hint        accepted, changes nothing in the output (``HINTS``)
    refused     known and not built (``REFUSED``), or a field of another route that changes the output there: a 400
                that names it, unless its value asks for nothing
    unknown     accepted and counted in a metric

null means absent, everywhere.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.errors import InvalidRequest
from headrace.params import MAX_LOGPROBS

Penalty = Annotated[float, Meta(ge=-2, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``include_obfuscation`` pads events against traffic analysis at OpenAI; true is refused here."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both routes share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    allowed_token_ids: Annotated[list[Count], Meta(min_length=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None


class ChatFields(SamplingFields, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Positive | None = None


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: NumLogprobs | None = None


HINTS = frozenset({
    "metadata", "user", "store", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "safety_identifier", "request_id",
})  # fmt: skip

# Known and not built.
REFUSED = frozenset({
    "guided_decoding_backend", "guided_whitespace_pattern", "structural_tag",
    "reasoning", "thinking", "enable_thinking", "verbosity", "functions", "function_call",
    "audio", "modalities", "web_search_options", "suffix", "bad_words", "use_beam_search", "length_penalty",
    "early_stopping", "spaces_between_special_tokens", "documents", "chat_template", "media_io_kwargs",
    "mm_processor_kwargs", "logits_processors", "kv_transfer_params", "vllm_xargs", "prompt_embeds", "moderation",
})  # fmt: skip
_WITHOUT_EFFECT = frozenset({"model", "stream", "stream_options"})
_EFFECTIVE = {*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__, *REFUSED} - _WITHOUT_EFFECT
# Field -> the values that ask for nothing; so do False (unless True does), empty lists, objects and strings.
_ASKS_NOTHING: dict[str, tuple[object, ...]] = {
    "function_call": ("none",), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True,),
    "modalities": (["text"],), "response_format": ({"type": "text"},), "verbosity": ("medium",),
    "n": (1,), "best_of": (1,), "length_penalty": (1,), "repetition_penalty": (1,),
    "min_tokens": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "min_p": (0,), "priority": (0,),
    "top_k": (0, -1), "top_logprobs": (0,),
    "spaces_between_special_tokens": (True,), "skip_special_tokens": (True,), "add_generation_prompt": (True,),
    "include_reasoning": (True,),
}  # fmt: skip
_ACTS_WHEN_EMPTY = frozenset({"audio", "web_search_options"})


def refuse_unsupported(body: dict[str, Any], known: Collection[str]) -> None:
    """400 for a field that changes answers where it is known, on a route whose ``known`` fields do not include it.

    A value that asks for nothing passes.
    """
    for name in body:
        if name in _EFFECTIVE and name not in known and not _asks_nothing(name, body[name]):
            reason = "not supported yet" if name in REFUSED else "not a field of this route"
            raise InvalidRequest(f"{name} is {reason}; leave it out", param=name)


def _asks_nothing(name: str, value: object) -> bool:
    neutral = _ASKS_NOTHING.get(name, ())
    if value is None or value in ([], ""):
        return True
    if value is False:
        return True not in neutral
    return value in neutral or (value == {} and name not in _ACTS_WHEN_EMPTY)


def count_unknown(body: dict[str, Any], known: Collection[str]) -> int:
    """Fields that no documented API has; ``known`` has the route's own ones, hints included."""
    return sum(1 for name in body if name not in known and name not in _EFFECTIVE and name not in _WITHOUT_EFFECT)
