"""The official OpenAI SDK against a real server: chats, streams, cancels, lists models; sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from support.scripted import expected_text
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": "<|s05|>"}]
ENDLESS = [{"role": "user", "content": "<|s01|>"}]


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_and_a_completion(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="m", messages=MESSAGES, temperature=0, seed=1)
    assert chat.choices[0].message.content == "ABCDEFGH"
    assert chat.choices[0].message.role == "assistant" and chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None and chat.usage.prompt_tokens == 4 and chat.usage.total_tokens == 13
    completion = client.completions.create(model="m", prompt="<|s00|><|assistant|>", temperature=0, max_tokens=40)
    assert completion.choices[0].text == expected_text("s00")


def test_a_stream_with_usage_and_logprobs(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="m",
        messages=MESSAGES,
        temperature=0,
        stream=True,
        stream_options=options,
        logprobs=True,
        top_logprobs=2,
    )
    chunks = list(stream)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "ABCDEFGH"
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or []]
    assert all(len(entry.top_logprobs) == 2 for entry in entries) and len(entries) >= 8
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 9


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=MESSAGES, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert any(event.type == "content.delta" for event in events)
    assert final.choices[0].message.content == "ABCDEFGH"


def test_a_closed_stream_frees_its_slot(client: openai.OpenAI, server: Server) -> None:
    stream = client.chat.completions.create(model="m", messages=ENDLESS, temperature=0, stream=True)
    for _ in range(5):
        next(stream)
    stream.close()
    server.wait_idle()


def test_errors_are_the_sdks_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 9000}])
    assert long.value.code == "context_length_exceeded"


def test_async_streams_side_by_side_and_a_cancelled_task(server: Server) -> None:
    async def joined(client: openai.AsyncOpenAI, script: str) -> str:
        stream = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": f"<|{script}|>"}], temperature=0, stream=True
        )
        return "".join([choice.delta.content or "" async for chunk in stream for choice in chunk.choices])

    async def main() -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=90) as client:
            assert [model.id async for model in client.models.list()] == ["m"]
            scripts = ["s00", "s02", "s05", "s07"] * 2
            endless = asyncio.create_task(joined(client, "s01"))
            texts = await asyncio.gather(*(joined(client, script) for script in scripts))
            assert texts == [expected_text(script) for script in scripts]
            await asyncio.sleep(0.2)
            endless.cancel()
            with pytest.raises(asyncio.CancelledError):
                await endless

    asyncio.run(main())
    server.wait_idle()


def test_a_key_is_sent(serve: Serve) -> None:
    server = serve("plain", "--api-key", "right", key="right")
    for key, is_right in (("right", True), ("wrong", False)):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=90) as client:
            if is_right:
                assert client.models.list().data
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()
