"""The official OpenAI client against the application, with its transport swapped for the application itself."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from http_harness import MODEL, Api

MESSAGES: Any = [{"role": "user", "content": "<|s02|>"}]


def sdk(api: Api) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(api.app)
    return openai.AsyncOpenAI(
        api_key="unused",
        base_url="http://test/v1",
        http_client=httpx.AsyncClient(transport=transport),
        max_retries=0,
    )


def test_chat(api: Api) -> None:
    async def scene() -> Any:
        async with sdk(api) as client:
            return await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2
            )

    answer = api.run(scene())
    assert answer.choices[0].message.content == "ok 😀 café end"
    assert answer.usage.completion_tokens == 10
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_chat_stream(api: Api) -> None:
    async def scene() -> list[Any]:
        async with sdk(api) as client:
            stream = await client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            return [chunk async for chunk in stream]

    chunks = api.run(scene())
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "ok 😀 café end"
    assert chunks[-1].usage.completion_tokens == 10


def test_completions_and_models(api: Api) -> None:
    async def scene() -> Any:
        async with sdk(api) as client:
            prompts = ["<|s05|><|assistant|>", "<|s00|><|assistant|>"]
            answer = await client.completions.create(
                model=MODEL, prompt=prompts, max_tokens=20, extra_body={"top_k": 1}
            )
            names = [model.id async for model in client.models.list()]
            return answer, names, await client.models.retrieve("alias")

    answer, names, alias = api.run(scene())
    assert [choice.text for choice in answer.choices] == ["ABCDEFGH", "Alpha beta gamma delta."]
    assert names == ["scripted", "alias"]
    assert alias.id == "alias"


def test_errors_become_the_sdks_own(api: Api) -> None:
    async def fails(**fields: Any) -> Exception:
        async with sdk(api) as client:
            with pytest.raises(openai.APIStatusError) as caught:
                await client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **fields})
            return caught.value

    assert isinstance(api.run(fails(model="none")), openai.NotFoundError)
    error = api.run(fails(temperature=5))
    assert isinstance(error, openai.BadRequestError)
    assert error.param == "temperature"


def test_an_error_in_a_stream_is_raised(api: Api) -> None:
    from headrace.request import FinishReason

    api.engine.failure = FinishReason.ERROR

    async def scene() -> None:
        async with sdk(api) as client:
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            with pytest.raises(openai.APIError, match="the row failed"):
                async for _ in stream:
                    pass

    api.run(scene())
