"""Items: what goes into a response and what comes out of it, in one form, and as chat messages.

    reasoning, message (assistant), function_call …   -> one assistant message of the chat
    function_call_output                              -> a tool message
    message (user, system, developer)                 -> itself

Every item gets an id, so that stored ones can be listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headrace.api.fields import shown
from headrace.api.responses.namespaces import joined_name
from headrace.errors import InvalidRequest

Item = dict[str, Any]

_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def item_id(kind: str, response: str, position: int) -> str:
    """Id of an item; unique through the hexadecimal part of its response's id."""
    return f"{_PREFIXES[kind]}{response}{position:04x}"


def text_part(text: str) -> Item:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# -- input ---------------------------------------------------------------------------------------------


def input_items(given: str | list[dict[str, Any]], response: str) -> list[Item]:
    """A request's ``input`` as complete items. ``response``: hexadecimal part of the new response's id."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise _invalid("input must not be empty")
    return [_item(item, f"input[{i}]", item_id_or_none(item), response, i) for i, item in enumerate(given)]


def item_id_or_none(item: Item) -> str | None:
    given = item.get("id")
    return given if isinstance(given, str) and given else None


def _item(item: Item, where: str, given_id: str | None, response: str, position: int) -> Item:
    kind = "message" if item.get("type") is None else item["type"]
    if not isinstance(kind, str) or kind not in _PREFIXES:
        hint = "send the item itself" if kind == "item_reference" else "known are " + ", ".join(_PREFIXES)
        raise _invalid(f"{where}.type {shown(kind)} is not supported; {hint}")
    head = {"id": given_id or f"{item_id(kind, response, position)}i", "type": kind}
    match kind:
        case "message":
            return {**head, **_message(item, where)}
        case "function_call":
            fields = {name: _string(item, name, where) for name in ("call_id", "name", "arguments")}
            if item.get("namespace") is not None:
                fields["namespace"] = _string(item, "namespace", where)
            return {**head, **fields, "status": "completed"}
        case "function_call_output":
            output = _text(item.get("output"), f"{where}.output")
            return {**head, "call_id": _string(item, "call_id", where), "output": output, "status": "completed"}
    summary, content = _parts(item, "summary", where), _parts(item, "content", where)
    return {**head, "summary": summary, "content": _thoughts(content, where), "status": "completed"}


def _message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise _invalid(f"{where}.role must be user, assistant, system or developer, not {shown(role)}")
    text = _text(item.get("content"), f"{where}.content")
    part = text_part(text) if role == "assistant" else {"type": "input_text", "text": text}
    return {"role": role, "status": "completed", "content": [part]}


def _text(content: object, where: str) -> str:
    """Text of a string or of text parts, joined without a separator."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(f"{where} must be a string or a list of parts")
    texts: list[str] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise _invalid(f"{where}[{i}]: this model takes text only, not a part of type {shown(kind)}")
        texts.append(_string(part, "refusal" if kind == "refusal" else "text", f"{where}[{i}]"))
    return "".join(texts)


def _parts(item: Item, field: str, where: str) -> list[Item]:
    parts = item.get(field)
    if parts is None:
        return []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _invalid(f"{where}.{field} must be a list of parts, not {shown(parts)}")
    return parts


def _thoughts(content: list[Item], where: str) -> list[Item]:
    return [
        {"type": "reasoning_text", "text": _string(part, "text", f"{where}.content[{i}]")}
        for i, part in enumerate(content)
    ]


def _string(item: Item, field: str, where: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise _invalid(f"{where}.{field} must be a string, not {shown(value)}")
    return value


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="input")


# -- chat ----------------------------------------------------------------------------------------------


def chat_messages(items: Iterable[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Complete items, oldest first, as chat messages."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None  # the assistant's, as long as it goes on
    before = ""
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": _joined(item)})
        else:
            if turn is None or (kind == before == "message"):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add(turn, item)
            before = kind
            continue
        turn = None
    return messages


def _add(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = (turn["content"] or "") + _joined(item)
    elif item["type"] == "reasoning":
        if text := _joined(item):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    else:
        name = joined_name(item.get("namespace"), item["name"])
        function = {"name": name, "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _joined(item: Item) -> str:
    return "".join(part.get("text", "") for part in item.get("content") or ())
