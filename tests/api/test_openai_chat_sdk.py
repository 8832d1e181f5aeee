"""The official OpenAI client's own helpers on chat answers with thinking and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from http_harness import MODEL, Api
from sdk_clients import openai_async, openai_sync, tool_names

TOOLS: Any = tool_names()["chat"]


@pytest.fixture
def parsing(make_api: Callable[..., Api]) -> Api:
    return make_api(tool_call_parser="hermes", reasoning_parser="qwen3")


def ask(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 40, **fields}


def test_a_tool_loop(parsing: Api) -> None:
    client = openai_sync(parsing)
    first = client.chat.completions.create(**ask("<|s09|>", tools=TOOLS))
    message = first.choices[0].message
    assert message.content is None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "<|s05|>"} for call in message.tool_calls]
    body = ask("<|s09|>", tools=TOOLS)
    body["messages"] += [message.model_dump(exclude_none=True), *results]
    assert client.chat.completions.create(**body).choices[0].message.content == "ABCDEFGH"


def test_streaming_helper(parsing: Api) -> None:
    client = openai_sync(parsing)
    with client.chat.completions.stream(**ask("<|s04|>", tools=TOOLS)) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Sure. ", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1, "s": "é\\n"}'
    done = next(event for event in events if event.type == "tool_calls.function.arguments.done")
    assert (done.name, done.index) == ("add", 0)


def test_thinking_async(parsing: Api) -> None:
    async def scene() -> list[Any]:
        async with openai_async(parsing) as client:
            stream = await client.chat.completions.create(**ask("<|s03|>", stream=True))
            return [chunk.choices[0].delta async for chunk in stream if chunk.choices]

    deltas = parsing.run(scene())
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "plan it"
    assert "".join(delta.content or "" for delta in deltas) == "42"
