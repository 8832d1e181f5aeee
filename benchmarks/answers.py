"""One request and its answer as it comes: arrival time of every token, text, usage, refusal. For benchmarks that
steer several requests by what has arrived (a closed loop is ``headrace.bench.load``)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.http_stream import BodyCut, ConnectFailed, MalformedAnswer, Server, send
from headrace.bench.sse import EventParser


@dataclass
class Answer:
    """What has arrived so far. Times are ``time.perf_counter()``.

    Attributes:
        sent_s: begin of connecting.
        times_s: arrival of each token (tokens of one event share it).
        usage: the last one that came.
        retry_after_s: the header of a refusal, as a number; None without one.
        fault: what went wrong after the status, or without one; "" for nothing.
    """

    sent_s: float
    status: int | None = None
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None
    message: str = ""
    fault: str = ""
    end_s: float | None = None
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def ttft_s(self) -> float | None:
        return self.times_s[0] - self.sent_s if self.times_s else None

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    async def tokens(self, count: int) -> None:
        """Return when so many tokens have arrived, or when no more will."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.times_s) >= count or self.end_s is not None)


async def ask(server: Server, path: str, body: Mapping[str, object], answer: Answer) -> None:
    """Send a streamed request and fill ``answer``; faults are noted there. Cancelling closes the connection."""
    whole = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True, **body}
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    try:
        async with send(server, "POST", path, headers, json.dumps(whole).encode()) as found:
            answer.status = found.status
            if found.status != 200:
                retry = found.headers.get("retry-after")
                answer.retry_after_s = float(retry) if retry else None
                answer.message = json.loads(await found.read())["error"]["message"]
                return
            parser = EventParser()
            async for piece in found.pieces():
                now = time.perf_counter()
                for event in parser.feed(piece):
                    _take(answer, event.data, now)
                async with answer.arrived:
                    answer.arrived.notify_all()
    except (ConnectFailed, BodyCut, MalformedAnswer, ValueError, KeyError) as error:
        answer.fault = f"{type(error).__name__}: {error}"
    finally:
        answer.end_s = time.perf_counter()
        async with answer.arrived:
            answer.arrived.notify_all()


def start(
    server: Server, path: str, body: Mapping[str, object], group: asyncio.TaskGroup
) -> tuple[Answer, asyncio.Task[None]]:
    """Begin a request; read ``Answer`` as it fills."""
    answer = Answer(time.perf_counter())
    return answer, group.create_task(ask(server, path, body, answer))


def _take(answer: Answer, data: str, now: float) -> None:
    if data == "[DONE]":
        return
    chunk = json.loads(data)
    if "error" in chunk:
        answer.fault = str(chunk["error"].get("message"))
        return
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        answer.times_s += [now] * len(choice.get("token_ids") or ())


async def get_json(server: Server, path: str) -> Any:
    async with send(server, "GET", path, {}) as found:
        return json.loads(await found.read())


async def get_text(server: Server, path: str) -> str:
    async with send(server, "GET", path, {}) as found:
        return (await found.read(1 << 22)).decode()
