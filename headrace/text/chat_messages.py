"""Chat messages as clients send them, brought into the one form that templates read.

Templates know: ``role``, ``content`` (a string; for some a list of parts), ``tool_calls`` (with arguments as an
object; for some as JSON text), ``tool_call_id``, ``name``, and per family ``reasoning_content``. What tool calls
were called before (``function_call``, the role ``function``) becomes what they are called now. Null fields are
dropped, absent content becomes "" (null beside tool calls, for templates that tell the two apart), text parts are
joined without a separator.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.errors import InvalidRequest
from headrace.text.unicode import check_text

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

Message = dict[str, object]


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What a template wants.

    Attributes:
        content_parts: content as ``[{"type": "text", "text": …}]`` rather than a string.
        arguments_text: tool-call arguments as JSON text rather than an object.
        null_content: an assistant message that has tool calls and no content keeps null as its content.
        developer: the template knows the role "developer"; otherwise such messages become "system".
        plain_tools: the template knows neither tools nor calls; ``plain_calls`` writes them for it.
        system: it shows system messages.
    """

    content_parts: bool = False
    arguments_text: bool = False
    null_content: bool = False
    developer: bool = False
    plain_tools: bool = False
    system: bool = True


def normalise(messages: Sequence[Mapping[str, object]], form: MessageForm) -> list[Message]:
    """Messages in the template's form. Raises InvalidRequest (param ``messages``) for what cannot be rendered."""
    if not messages:
        raise _invalid("'messages' is empty")
    names: dict[str, str] = {}
    return [_message(index, message, form, names) for index, message in enumerate(messages)]


def _message(index: int, message: Mapping[str, object], form: MessageForm, names: dict[str, str]) -> Message:
    """``names`` collects the function name of each tool call, for results that carry only the call's id."""
    if not isinstance(message, Mapping):
        raise _invalid(f"message {index} is not an object")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"message {index} has an unknown role, {role!r}; known are {', '.join(sorted(ROLES))}")
    result: Message = {key: value for key, value in message.items() if value is not None}
    if "audio" in result:
        raise _invalid(f"message {index} has audio; this model takes text only")
    role = "tool" if role == "function" else role
    result["role"] = "system" if role == "developer" and not form.developer else role
    refusal = result.pop("refusal", None)  # what an assistant said instead of content
    content = refusal if message.get("content") is None else message["content"]
    text = content_text(content, f"message {index}")
    result["content"] = [{"type": "text", "text": text}] if form.content_parts else text
    legacy = result.pop("function_call", None)
    calls = result.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list):
        raise _invalid(f"message {index}: tool_calls must be a list")
    calls = calls or ([{"type": "function", "function": legacy}] if legacy else None)
    if calls:
        result["tool_calls"] = _tool_calls(calls, index, form, names)
        if form.null_content and message.get("content") is None:
            result["content"] = None
    call_id = result.get("tool_call_id")
    if role == "tool" and "name" not in result and isinstance(call_id, str) and call_id in names:
        result["name"] = names[call_id]
    check_strings(result, "messages")
    return result


def content_text(content: object, where: str) -> str:
    """Text of a message's content: null, a string, or a list of text parts. ``where`` opens the error message."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{where}: content must be a string, a list of parts or null")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise _invalid(f"{where}: a content part must be an object")
        kind = "text" if part.get("type") is None else part["type"]
        key = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "refusal"):
            raise _invalid(f"{where}: this model takes text only, not a content part of type {kind!r}")
        text = part.get(key)
        if not isinstance(text, str):
            raise _invalid(f"{where}: a content part of type '{kind}' needs a string '{key}'")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Sequence[Any], index: int, form: MessageForm, names: dict[str, str]) -> list[Message]:
    result: list[Message] = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid(f"message {index}: a tool call needs a function with a name")
        if isinstance(call.get("id"), str):
            names[call["id"]] = function["name"]
        entry: Message = {key: value for key, value in call.items() if value is not None}
        arguments = _arguments(function.get("arguments"), form.arguments_text)
        entry["function"] = {**function, "arguments": arguments}
        result.append(entry)
    return result


def _arguments(arguments: object, as_text: bool) -> object:
    """Arguments in the wanted form; text that is no JSON object stays text, the model wrote it so."""
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def check_strings(value: object, param: str) -> None:
    """Refuse unpaired surrogates anywhere in JSON-like data; the error names ``param``."""
    if isinstance(value, str):
        check_text(value, param)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_strings(key, param)
            check_strings(item, param)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_strings(item, param)


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="messages")
