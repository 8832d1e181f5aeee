"""Schema of ``POST /v1/responses``, and its fields in the chat form.

Fields are honoured (typed here), hints, refused or unknown, as ``headrace.api.openai.schema`` explains;
docs/responses-api.md lists them. null means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.api.fields import shown
from headrace.api.openai import schema
from headrace.api.openai.schema import ChatFields, Count, Penalty, Positive, Share
from headrace.api.openai.tools import check_function
from headrace.api.responses.namespaces import flat_tools, joined_name
from headrace.errors import InvalidRequest


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    max_tool_calls: Positive | None = None
    top_logprobs: Count | None = None
    background: bool | None = None
    # Fields of the chat route that clients send here, too.
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: Positive | None = None


_SAME_AS_CHAT = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop", "priority", "cache_salt", "chat_template_kwargs",
    "thinking_token_budget",
)  # fmt: skip
HINTS = frozenset({
    "service_tier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier",
    "context_management",
})  # fmt: skip
REFUSED = frozenset({
    "conversation", "prompt", "moderation", "image", "access_programs", "background_options",
})  # fmt: skip
_KNOWN = frozenset({*ResponseFields.__struct_fields__, *HINTS, *REFUSED})
# The model's template sees the reasoning items of all turns, and there is one way to run a model.
_REASONING = {"context": ("all_turns", "auto"), "mode": ("standard",)}
_LOGPROBS = "message.output_text.logprobs"
# Of built-in tools and images, which no answer here has; thinking is shown in plain text.
_EMPTY_INCLUDES = frozenset({
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
})  # fmt: skip


def refuse_unsupported(body: dict[str, Any], fields: ResponseFields) -> None:
    """400 for what is known and not built, or makes no sense."""
    for name in sorted(REFUSED):
        if body.get(name) not in (None, [], "", {}):
            raise InvalidRequest(f"{name} is not supported here; leave it out", param=name)
    schema.refuse_unsupported(body, _KNOWN)
    if fields.background:
        raise InvalidRequest(
            "background is not supported yet; leave it out or set it to false", param="background"
        )
    if fields.top_logprobs:
        raise InvalidRequest("top_logprobs is not supported here yet; leave it out", param="top_logprobs")
    for name in fields.include or ():
        if name == _LOGPROBS:
            raise InvalidRequest(f"include {shown(name)} is not supported yet; leave it out", param="include")
        if name not in _EMPTY_INCLUDES:
            raise InvalidRequest(f"include has {shown(name)}, which is not known", param="include")
    for name, passing in _REASONING.items():
        value = (fields.reasoning or {}).get(name)
        if value is not None and value not in passing:
            raise InvalidRequest(
                f"reasoning.{name} {shown(value)} is not supported; leave it out or use {shown(passing[-1])}",
                param="reasoning",
            )
    if fields.stream_options is not None:
        if not fields.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if fields.stream_options.get("include_obfuscation"):
            raise InvalidRequest("stream_options.include_obfuscation is not supported", param="stream_options")
    if (fields.text or {}).get("verbosity") not in (None, "medium"):
        raise InvalidRequest('text.verbosity is not supported; leave it out or use "medium"', param="text")


def count_unknown(body: dict[str, Any]) -> int:
    return schema.count_unknown(body, _KNOWN)


def chat_fields(fields: ResponseFields, messages: list[dict[str, Any]]) -> ChatFields:
    """The same request in the chat form."""
    same = {name: getattr(fields, name) for name in _SAME_AS_CHAT}
    effort = (fields.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequest(f"reasoning.effort must be a string, not {shown(effort)}", param="reasoning")
    return ChatFields(
        messages=messages,
        max_completion_tokens=fields.max_output_tokens,
        tools=[_tool(*placed) for placed in flat_tools(fields.tools or ())] or None,
        tool_choice=_tool_choice(fields.tool_choice),
        response_format=_response_format((fields.text or {}).get("format")),
        reasoning_effort=effort,
        **same,
    )


def _tool(where: str, namespace: str | None, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f'{where}.type must be "function", not {shown(tool.get("type"))}', param="tools")
    check_function(tool, where)
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    function["name"] = joined_name(namespace, function["name"])
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice in (None, "none", "auto", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)  # the chat form is understood, too
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return {"type": "function", "function": {"name": name}}
    raise InvalidRequest(
        'tool_choice must be "none", "auto", "required" or {"type": "function", "name": …},'
        f" not {shown(choice)}",
        param="tool_choice",
    )


def _response_format(found: object) -> dict[str, Any] | None:
    if found is None:
        return None
    kind = found.get("type") if isinstance(found, dict) else found
    if not isinstance(found, dict) or kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            f"text.format.type must be text, json_object or json_schema, not {shown(kind)}", param="text"
        )
    if found["type"] != "json_schema":
        return {"type": found["type"]}
    if found.get("schema") is None:
        raise InvalidRequest("text.format.schema is required", param="text.format")
    return {"type": "json_schema", "json_schema": {name: found[name] for name in found if name != "type"}}
