"""The official SDKs, asynchronous and synchronous, with their transport swapped for the application."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import anthropic
import httpx2
import openai
from http_harness import Api


class SyncASGITransport(httpx2.BaseTransport):
    """Runs each request to its end on the test's own loop; the answer is then read from memory."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        async def exchange() -> httpx2.Response:
            transport = httpx2.ASGITransport(self._api.app)
            sent = httpx2.Request(request.method, request.url, headers=request.headers, content=request.read())
            answer = await transport.handle_async_request(sent)
            content = await answer.aread()
            return httpx2.Response(answer.status_code, headers=answer.headers, content=content)

        return self._api.run(exchange())


def openai_sync(api: Api, key: str = "unused") -> openai.OpenAI:
    client = httpx2.Client(transport=SyncASGITransport(api))
    return openai.OpenAI(api_key=key, base_url="http://test/v1", http_client=client, max_retries=0)


def openai_async(api: Api, key: str = "unused") -> openai.AsyncOpenAI:
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app))
    return openai.AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=client, max_retries=0)


def anthropic_sync(api: Api, key: str = "unused") -> anthropic.Anthropic:
    client = httpx2.Client(transport=SyncASGITransport(api))
    return anthropic.Anthropic(api_key=key, base_url="http://test", http_client=client, max_retries=0)


def anthropic_async(api: Api, key: str = "unused") -> anthropic.AsyncAnthropic:
    client = httpx2.AsyncClient(transport=httpx2.ASGITransport(api.app))
    return anthropic.AsyncAnthropic(api_key=key, base_url="http://test", http_client=client, max_retries=0)


def tool_names(names: Iterable[str] = ("add", "mul")) -> dict[str, list[dict[str, Any]]]:
    """Declarations of these tools in every dialect: "chat", "responses", "anthropic"."""
    schema = {"type": "object"}
    return {
        "chat": [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names],
        "responses": [{"type": "function", "name": name, "parameters": schema} for name in names],
        "anthropic": [{"name": name, "input_schema": schema} for name in names],
    }
