"""The official Anthropic client against the application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from http_harness import MODEL, Api
from sdk_clients import anthropic_async, anthropic_sync, tool_names

TOOLS: Any = tool_names()["anthropic"]


@pytest.fixture
def parsing(make_api: Callable[..., Api]) -> Api:
    return make_api(tool_call_parser="hermes", reasoning_parser="qwen3")


def ask(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 40, "messages": [{"role": "user", "content": content}], **fields}


def test_whole_answers(parsing: Api) -> None:
    client = anthropic_sync(parsing)
    message = client.messages.create(**ask("<|s00|>"))
    assert message.content[0].text == "Alpha beta gamma delta."
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == 4
    assert message._request_id
    message = client.messages.create(**ask("<|s00|>", stop_sequences=["gamma"]))
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "Alpha beta ", "stop_sequence", "gamma",
    )  # fmt: skip
    assert client.messages.create(**ask("<|s00|>", max_tokens=3)).stop_reason == "max_tokens"
    message = client.messages.create(**ask("<|s04|>", tools=TOOLS))
    assert message.stop_reason == "tool_use"
    assert message.content[1].input == {"a": 1, "s": "é\n"}


@pytest.mark.parametrize("beta", [False, True])
def test_streaming_helper(parsing: Api, beta: bool) -> None:
    client = anthropic_sync(parsing)
    messages: Any = client.beta.messages if beta else client.messages
    with messages.stream(**ask("<|s03|>")) as stream:
        events = list(stream)
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking, message.content[1].text) == ("plan it", "42")
    assert message.content[0].signature
    assert message.usage.output_tokens == 8
    assert {"thinking", "signature", "text"} <= {event.type for event in events}


def test_streaming_helper_async_with_two_calls(parsing: Api) -> None:
    async def scene() -> Any:
        async with (
            anthropic_async(parsing) as client,
            client.messages.stream(**ask("<|s09|>", tools=TOOLS)) as stream,
        ):
            return await stream.get_final_message()

    message = parsing.run(scene())
    assert [(block.name, block.input) for block in message.content] == [("add", {"a": 1}), ("mul", {"b": 2})]
    assert message.content[0].id != message.content[1].id
    assert message.stop_reason == "tool_use"


def test_tool_runner(parsing: Api) -> None:
    asked: list[tuple[int, str]] = []

    @beta_tool
    def add(a: int, s: str) -> str:
        """Add.

        Args:
            a: a number.
            s: a text.
        """
        asked.append((a, s))
        return "<|s05|>"

    client = anthropic_sync(parsing)
    runner = client.beta.messages.tool_runner(**ask("<|s04|>", tools=[add]))
    messages = list(runner)
    assert asked == [(1, "é\n")]
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    assert messages[-1].content[0].text == "ABCDEFGH"


def test_count_tokens_is_what_messages_reports(parsing: Api) -> None:
    client = anthropic_sync(parsing)
    history: Any = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "3"}, {"type": "text", "text": "<|s05|>"},
        ]},
    ]  # fmt: skip
    bodies: list[dict[str, Any]] = [
        ask("<|s05|>"),
        ask("<|s05|>", system="x" * 100),
        ask("<|s05|>", tools=TOOLS),
        ask("", messages=history, tools=TOOLS),
    ]
    counts = []
    for body in bodies:
        message = client.messages.create(**body)
        before = len(parsing.engine.requests)
        body.pop("max_tokens")
        counts.append(client.messages.count_tokens(**body).input_tokens)
        assert counts[-1] == message.usage.input_tokens
        assert len(parsing.engine.requests) == before, "nothing is generated"
    assert counts[1] == counts[0] + 102, "the system message, its role and its end"
    assert counts[2] > counts[0]


def test_models(parsing: Api) -> None:
    client = anthropic_sync(parsing)
    found = list(client.models.list())
    assert [model.id for model in found] == [MODEL, "alias"]
    for model in (*found, client.models.retrieve("alias")):
        type(model).model_validate(model.model_dump())
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("none")
    assert caught.value.body["type"] == "error"
    assert parsing.send("GET", "/v1/models").json()["object"] == "list"


def test_cached_tokens_are_counted_apart(parsing: Api) -> None:
    parsing.engine.cached_tokens = 3
    client = anthropic_sync(parsing)
    usage = client.messages.create(**ask("<|s05|>")).usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (1, 3)
    with client.messages.stream(**ask("<|s05|>")) as stream:
        first = next(iter(stream))
    assert (first.message.usage.input_tokens, first.message.usage.cache_read_input_tokens) == (1, 3)


def test_errors_become_the_sdks_own(make_api: Callable[..., Api]) -> None:
    from headrace.config import ApiKey
    from headrace.errors import NotReady, QueueFull

    api = make_api(api_keys=(ApiKey("ada", "secret"),))
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_sync(api, "wrong").messages.create(**ask("x"))
    client = anthropic_sync(api, "secret")
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ask("x", model="none"))
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**ask("x", thinking={"type": "sometimes"}))
    api.engine.refusal = QueueFull("full", retry_after_s=3)
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(**ask("x", stream=True))
    api.engine.refusal = NotReady("later")
    with pytest.raises(anthropic.APIStatusError) as overloaded:
        client.messages.create(**ask("x"))
    assert overloaded.value.status_code == 529
    assert overloaded.value.body["error"]["type"] == "overloaded_error"


def test_an_error_in_a_stream_is_raised(parsing: Api) -> None:
    from headrace.request import FinishReason

    parsing.engine.failure = FinishReason.ERROR
    client = anthropic_sync(parsing)
    with pytest.raises(anthropic.APIError, match="the row failed"), client.messages.stream(**ask("<|s00|>")) as s:
        list(s)
