"""The official OpenAI client on ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from http_harness import MODEL, Api
from sdk_clients import openai_async, openai_sync, tool_names

TOOLS: Any = tool_names()["responses"]


@pytest.fixture
def store_file(tmp_path: Path) -> str:
    return str(tmp_path / "responses.sqlite3")


@pytest.fixture
def parsing(make_api: Callable[..., Api], store_file: str) -> Api:
    return make_api(
        tool_call_parser="hermes", reasoning_parser="qwen3", response_store_mb=1, response_store_file=store_file
    )


def ask(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": 40, "input": content, **fields}


def test_whole_answers(parsing: Api) -> None:
    client = openai_sync(parsing)
    response = client.responses.create(**ask("<|s00|>"))
    assert (response.output_text, response.status) == ("Alpha beta gamma delta.", "completed")
    assert response.usage.output_tokens == 9
    response = client.responses.create(**ask("<|s03|>"))
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "plan it"
    assert response.usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(("script", "limit"), [("s00", 3), ("s03", 4)])
def test_incomplete(parsing: Api, script: str, limit: int) -> None:
    client = openai_sync(parsing)
    response = client.responses.create(**ask(f"<|{script}|>", max_output_tokens=limit))
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == limit
    stream = client.responses.create(**ask(f"<|{script}|>", max_output_tokens=limit, stream=True))
    events = list(stream)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.usage == response.usage


def test_streaming_helper(parsing: Api) -> None:
    client = openai_sync(parsing)
    with client.responses.stream(**ask("<|s04|>", tools=TOOLS)) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert response.output_text == "Sure. "
    assert response.output[1].arguments == '{"a": 1, "s": "é\\n"}'
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == response.output[1].arguments


def test_streaming_helper_async(parsing: Api) -> None:
    async def scene() -> Any:
        async with openai_async(parsing) as client, client.responses.stream(**ask("<|s03|>")) as stream:
            return await stream.get_final_response()

    assert parsing.run(scene()).output_text == "42"


def test_a_tool_loop_by_hand_and_by_id(parsing: Api) -> None:
    client = openai_sync(parsing)
    first = client.responses.create(**ask("<|s04|>", tools=TOOLS))
    call = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "<|s05|>"}
    by_id = client.responses.create(**ask([result], tools=TOOLS, previous_response_id=first.id))
    assert by_id.output_text == "ABCDEFGH"
    whole: Any = [{"role": "user", "content": "<|s04|>"}, *first.output, result]
    by_hand = client.responses.create(**ask(whole, tools=TOOLS, store=False))
    assert by_hand.output_text == "ABCDEFGH"
    assert by_hand.usage.input_tokens == by_id.usage.input_tokens


def test_stored_responses(parsing: Api, make_api: Callable[..., Api], store_file: str) -> None:
    client = openai_sync(parsing)
    first = client.responses.create(**ask("one <|s00|>", instructions="be brief"))
    second = client.responses.create(**ask("two", previous_response_id=first.id))
    assert second.output_text == "Alpha beta gamma delta.", "the trigger of the first turn is in the prompt"
    again = openai_sync(make_api(response_store_mb=1, response_store_file=store_file))  # a restarted server
    assert again.responses.retrieve(second.id).output_text == second.output_text
    items = again.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items] == ["two"]
    again.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        again.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        again.responses.create(**ask("three", previous_response_id=second.id))
    assert caught.value.code == "previous_response_not_found"


def test_not_stored(parsing: Api) -> None:
    client = openai_sync(parsing)
    response = client.responses.create(**ask("<|s00|>", store=False))
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_cancel(parsing: Api) -> None:
    async def scene() -> tuple[Any, Any, list[Any]]:
        async with openai_async(parsing) as client:
            parsing.engine.paused = True
            import asyncio

            task = asyncio.create_task(client.responses.create(**ask("<|s01|>", max_output_tokens=400)))
            while not parsing.engine.running:
                await asyncio.sleep(0.002)
            cancelled = await client.responses.cancel(parsing.engine.requests[-1].id)
            return cancelled, await task, []

    cancelled, answer, _ = parsing.run(scene())
    assert cancelled.status == answer.status == "cancelled"
    client = openai_sync(parsing)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")


def test_failed_stream(parsing: Api) -> None:
    from headrace.request import FinishReason

    parsing.engine.failure = FinishReason.ERROR
    client = openai_sync(parsing)
    events = list(client.responses.create(**ask("<|s00|>", stream=True)))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "the row failed"
    assert client.responses.retrieve(events[-1].response.id).status == "failed"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(**ask("<|s00|>"))
