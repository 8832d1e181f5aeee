"""Tools for chat templates that know none, written as Hermes models write them:

tools                       described at the end of the system message; where the template takes none, in front
                            of the first user message
assistant with tool_calls   its content, and a <tool_call> block for each
tool                        a user message with a <tool_response> block; results in a row share one message with
                            each other and with what the user says next (some templates want turns)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

Message = dict[str, object]

_DESCRIPTION = """You can call functions. Here they are, one JSON object per line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON, in a block of this form and nothing behind it:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>"""


def as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None, *, takes_system: bool
) -> list[Message]:
    """Messages in a template's form (``chat_messages``), without anything that it would not show."""
    result: list[Message] = []
    before: object = None
    for message in messages:
        role, shown = message["role"], _without_calls(message)
        if role == "tool":
            block = f"<tool_response>\n{_text(message)}\n</tool_response>"
            shown = _with_text({"role": "user", "content": message["content"]}, block)
        if before == "tool" and role in ("tool", "user"):
            result[-1] = _with_text(result[-1], f"{_text(result[-1])}\n{_text(shown)}")
        else:
            result.append(shown)
        before = role
    return _described(result, tools, takes_system) if tools else result


def _without_calls(message: Message) -> Message:
    rest = dict(message)
    calls = cast("list[dict[str, dict[str, object]]]", rest.pop("tool_calls", []))
    if not calls:
        return rest
    blocks = [
        f"<tool_call>\n{_json({key: call['function'][key] for key in ('name', 'arguments')})}\n</tool_call>"
        for call in calls
    ]
    return _with_text(rest, "\n".join([*filter(None, [_text(rest)]), *blocks]))


def _described(
    messages: list[Message], tools: Sequence[Mapping[str, object]], takes_system: bool
) -> list[Message]:
    text = _DESCRIPTION.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    first = messages[0]
    if takes_system and first["role"] == "system":
        joined = f"{_text(first)}\n\n{text}" if _text(first) else text
        return [_with_text(first, joined), *messages[1:]]
    if takes_system:
        form = [{"type": "text", "text": ""}] if isinstance(first["content"], list) else ""
        return [_with_text({"role": "system", "content": form}, text), *messages]
    place = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    asked = messages[place]
    return [*messages[:place], _with_text(asked, f"{text}\n\n{_text(asked)}"), *messages[place + 1 :]]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(message: Message) -> str:
    content = message["content"]
    return str(content[0]["text"]) if isinstance(content, list) else str(content or "")


def _with_text(message: Message, text: str) -> Message:
    """The message with this text in the form that its content has."""
    is_list = isinstance(message["content"], list)
    return {**message, "content": [{"type": "text", "text": text}] if is_list else text}
