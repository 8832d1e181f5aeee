"""Every answer and every stream event is what the official SDKs' models demand, at every cut, in every dialect.

The SDKs themselves construct their objects without validation; here the same models validate.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from http_harness import MODEL, Api
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from sdk_clients import tool_names
from support import scripted

SCRIPTS = ("s00", "s02", "s03", "s04", "s08", "s09", "s10", "s12")
TOOLS = tool_names()


@pytest.fixture(scope="module")
def types() -> dict[str, TypeAdapter[Any]]:
    found = {
        "chat": ChatCompletion, "chat event": ChatCompletionChunk, "completion": Completion,
        "anthropic": Message, "anthropic event": RawMessageStreamEvent,
        "responses": Response, "responses event": ResponseStreamEvent,
    }  # fmt: skip
    return {name: TypeAdapter(kind) for name, kind in found.items()}


@pytest.fixture
def parsing(make_api: Callable[..., Api]) -> Api:
    return make_api(tool_call_parser="hermes", reasoning_parser="qwen3")


def cuts(script: str) -> range:
    return range(1, len(scripted.SCRIPTS[script].pieces) + 2)


def data_of(response: httpx.Response) -> list[dict[str, Any]]:
    """JSON of all events; the event name, where there is one, is the type in the data."""
    found: list[dict[str, Any]] = []
    for event in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.split("\n") if line and not line.startswith(":"))
        if lines and lines["data"] != "[DONE]":
            found.append(json.loads(lines["data"]))
            assert "event" not in lines or lines["event"] == found[-1]["type"]
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_chat(parsing: Api, types: dict[str, TypeAdapter[Any]], script: str) -> None:
    for max_tokens in cuts(script):
        fields = {"tools": TOOLS["chat"], "max_tokens": max_tokens, "logprobs": True}
        types["chat"].validate_python(parsing.chat(f"<|{script}|>", **fields).json())
        options = {"include_usage": True}
        for chunk in data_of(parsing.chat(f"<|{script}|>", stream=True, stream_options=options, **fields)):
            types["chat event"].validate_python(chunk)


def test_completions(parsing: Api, types: dict[str, TypeAdapter[Any]]) -> None:
    types["completion"].validate_python(parsing.complete(logprobs=2).json())
    for chunk in data_of(parsing.complete(stream=True)):
        for choice in chunk["choices"]:  # the SDK has one model for both, where null is not foreseen
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        types["completion"].validate_python(chunk)


@pytest.mark.parametrize("script", SCRIPTS)
def test_messages(parsing: Api, types: dict[str, TypeAdapter[Any]], script: str) -> None:
    for max_tokens in cuts(script):
        body = {
            "model": MODEL, "max_tokens": max_tokens, "tools": TOOLS["anthropic"],
            "messages": [{"role": "user", "content": f"<|{script}|>"}],
        }  # fmt: skip
        whole = parsing.post("/v1/messages", body).json()
        types["anthropic"].validate_python(whole)
        events = data_of(parsing.post("/v1/messages", {**body, "stream": True}))
        for event in events:
            types["anthropic event"].validate_python(event)
        assert without_ids(message_of(events)) == without_ids(whole)


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """A streamed message put together, with the stream's grammar checked on the way."""
    assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    is_open = False
    for event in events[1:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(message["content"])
                is_open = True
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert is_open and event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], event["delta"]
                field = {
                    "text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature",
                    "input_json_delta": "json",
                }[delta["type"]]  # fmt: skip
                block[field] += delta.get(field, delta.get("partial_json"))
            case "content_block_stop":
                is_open = False
                arguments = message["content"][-1].pop("json")
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments)
            case "message_delta":
                assert not is_open
                message |= {**event["delta"], "usage": event["usage"]}
            case other:
                raise AssertionError(other)
    return message


@pytest.mark.parametrize("script", SCRIPTS)
def test_responses(parsing: Api, types: dict[str, TypeAdapter[Any]], script: str) -> None:
    for max_tokens in cuts(script):
        body = {
            "model": MODEL, "max_output_tokens": max_tokens, "tools": TOOLS["responses"],
            "input": f"<|{script}|>",
        }  # fmt: skip
        whole = parsing.post("/v1/responses", body).json()
        types["responses"].validate_python(whole)
        events = data_of(parsing.post("/v1/responses", {**body, "stream": True}))
        for event in events:
            types["responses event"].validate_python(event)
        streamed = events[-1]["response"]
        assert items_of(events) == streamed["output"]
        assert without_ids(streamed) == without_ids(whole)
        assert events[-1]["type"] == f"response.{whole['status']}"
        reached_end = max_tokens == cuts(script)[-1]
        assert whole["status"] == ("completed" if reached_end else "incomplete")


def items_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output of a streamed response put together from deltas, with the stream's grammar checked on the way."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    text, begun = "", False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) and not begun
            items.append(event["item"])
            text, begun = "", True
            continue
        assert begun and event["output_index"] == len(items) - 1
        item = items[-1]
        if kind == "output_item.done":
            assert {**event["item"], "status": ""} == {**item, "status": ""}
            items[-1] = event["item"]
            begun = False
            continue
        assert event["item_id"] == item["id"]
        assert event.get("content_index", 0) == 0
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
            item["content"] = [event["part"]]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
            item["arguments"] = text
        else:
            assert event["text"] == text
    return items


def without_ids(value: Any) -> Any:
    """Without what differs between two answers to one request."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        own = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(item) for name, item in value.items() if name not in own}
    return value
