"""Talking to the application in this process: requests, parsed streams, and raw ASGI for clients that leave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec
from fastapi import FastAPI
from scripted_engine import ScriptedEngine

from headrace.api.app import create_app
from headrace.config import EngineConfig, ServerConfig
from headrace.text.grammars.compiler import GrammarCompiler
from headrace.text.model_text import ModelText

T = TypeVar("T")
MODEL = "scripted"
CONFIG = ServerConfig(
    engine=EngineConfig(model="unused"), served_model_names=(MODEL, "alias"), response_store_mb=0
)


class RecordingMetrics:
    """Implements ``headrace.gateway.service.RequestMetrics`` by remembering."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.rejections: list[str] = []
        self.unknown = 0
        self.first_tokens = 0
        self.later_tokens = 0
        self.forced = 0
        self.ends: list[dict[str, Any]] = []
        self.queue_times: list[float] = []

    def rejected(self, reason: str) -> None:
        self.rejections.append(reason)

    def scheduled(self, queue_s: float) -> None:
        self.queue_times.append(queue_s)

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        self.first_tokens += 1

    def inter_token(self, gap_s: float, tokens: int) -> None:
        self.later_tokens += tokens

    def forced_tokens(self, count: int) -> None:
        self.forced += count

    def sequence_finished(self, reason: str) -> None:
        self.reasons.append(str(reason))

    def ended(self, **values: Any) -> None:
        self.ends.append(values)

    def unknown_field(self, count: int = 1) -> None:
        self.unknown += count

    def render(self) -> bytes:
        return b"# HELP x y\n"


@dataclass
class StreamedAnswer:
    """A parsed event stream: chunks, comments, the error event, and what followed the last chunk."""

    status: int
    headers: httpx.Headers
    raw: str
    chunks: list[dict[str, Any]] = field(default_factory=list)
    comments: int = 0
    error: dict[str, Any] | None = None
    done: bool = False

    def text(self, index: int = 0) -> str:
        return "".join(delta_text(choice) for choice in self.choices(index))

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"] is not None]

    @property
    def usage(self) -> dict[str, Any] | None:
        found = [chunk["usage"] for chunk in self.chunks if not chunk["choices"]]
        assert len(found) <= 1
        return found[0] if found else None


def delta_text(choice: dict[str, Any]) -> str:
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def parse_stream(response: httpx.Response) -> StreamedAnswer:
    answer = StreamedAnswer(response.status_code, response.headers, response.text)
    assert response.headers["content-type"].startswith("text/event-stream")
    for event in response.text.split("\n\n"):
        if not event:
            continue
        if event.startswith(":"):
            answer.comments += 1
            continue
        assert event.startswith("data: ")
        assert "\n" not in event
        assert not answer.done
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            answer.done = True
            continue
        content = json.loads(data)
        if "error" in content:
            answer.error = content["error"]
        else:
            answer.chunks.append(content)
    return answer


class Api:
    """The application over one scripted engine, called from plain test functions."""

    def __init__(self, text: ModelText, config: ServerConfig, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine()
        self.metrics = RecordingMetrics()
        self.app: FastAPI = create_app(
            config, self.engine, text, self.metrics, compiler=GrammarCompiler(lambda: text)
        )
        self.runner = asyncio.Runner()
        transport = httpx.ASGITransport(self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    def close(self) -> None:
        self.run(self.client.aclose())
        self.app.state.services.responses.close()
        self.runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        return self.run(self.client.request(method, path, **kwargs))

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.send("POST", path, json=body, **kwargs)

    def chat(self, content: str = "<|s05|>", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", chat_body(content, **fields))

    def chat_stream(self, content: str = "<|s05|>", **fields: Any) -> StreamedAnswer:
        return parse_stream(self.chat(content, stream=True, **fields))

    def complete(self, prompt: Any = "<|s05|><|assistant|>", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", completion_body(prompt, **fields))

    def complete_stream(self, prompt: Any = "<|s05|><|assistant|>", **fields: Any) -> StreamedAnswer:
        return parse_stream(self.complete(prompt, stream=True, **fields))


def chat_body(content: str, **fields: Any) -> dict[str, Any]:
    defaults = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 40,
    }
    return {**defaults, **fields}


def completion_body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 40, **fields}


class RawClient:
    """One POST as bare ASGI messages; the client can leave, and can refuse to read."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._body = msgspec.json.encode(body)
        self._scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": ("127.0.0.1", 1),
            "server": ("test", 80),
        }  # fmt: skip
        self._sent_body = False
        self._left = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.messages: list[dict[str, Any]] = []
        self.first_body = asyncio.Event()

    def leave(self) -> None:
        self._left.set()

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reading.wait()
        self.messages.append(message)
        if message.get("body"):
            self.first_body.set()
