"""Load on an OpenAI-compatible server: N streams in a closed loop, every request observed from outside.

Each of N streams sends its next request as soon as its last one ended, until the list of requests is used up. A
request's sample holds when it was sent, when each event with text arrived and how it ended. Times are seconds
since the run began, from one monotonic clock; connecting counts as part of a request's time.

    sent ──connect── headers ── first text ── text ── text ── finish, usage ── end
     0                              └ TTFT       └──┴ gaps (ITL)                └ E2E

What fails is a failure with its kind, never a fast request: an error status, an error event, a stream that
ends without a finish reason, a stream without any text. Output tokens are the server's own usage; where it
sends none they are the number of events with text, and the sample says that this is an estimate.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from headrace.bench.http_stream import BodyCut, ConnectFailed, MalformedAnswer, Server, send
from headrace.bench.sse import EventParser


class Failure(StrEnum):
    """Why a request does not count."""

    CONNECT = "connect"
    STATUS = "status"
    ERROR_EVENT = "error_event"
    CUT = "cut"
    EMPTY = "empty"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A streamed request: route and JSON body. ``usage`` is asked for when the body does not say otherwise."""

    path: str
    body: Mapping[str, object]

    def encoded(self) -> bytes:
        body = {"stream": True, "stream_options": {"include_usage": True}, **self.body}
        return json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as observed.

    Attributes:
        index: place in the list of requests.
        stream: which of the N streams sent it.
        sent_s, end_s: begin of connecting; end of the answer, or of the attempt.
        text_times_s: arrival of each event with text (several tokens may share one).
        status: of the answer; None without one.
        prompt_tokens, cached_tokens: from usage; None where the server sends none.
        output_tokens: from usage, or the number of events with text when ``estimated``.
        finish_reason: as the server spells it.
        failure: None for a request that counts; ``detail`` is a few words about it.
        text: what was generated, where keeping it was asked for.
    """

    index: int
    stream: int
    sent_s: float
    end_s: float
    text_times_s: tuple[float, ...] = ()
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    estimated: bool = False
    finish_reason: str | None = None
    failure: Failure | None = None
    detail: str = ""
    text: str = ""

    @property
    def first_text_s(self) -> float | None:
        return self.text_times_s[0] if self.text_times_s else None


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A finished run: samples in the order of the requests, its duration, and CPU seconds this client used."""

    streams: int
    duration_s: float
    client_cpu_s: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """``silence_timeout_s``: longest time without a byte from the server before a request counts as failed."""

    headers: Mapping[str, str] = field(default_factory=dict)
    silence_timeout_s: float = 600.0
    keep_text: bool = False


async def run_closed_loop(
    url: str, requests: Sequence[LoadRequest], streams: int, options: LoadOptions | None = None
) -> LoadResult:
    """Sends all ``requests``, at most ``streams`` at a time. Failures are samples, not exceptions."""
    server = Server.of(url)
    options = options or LoadOptions()
    encoded = [(request.path, request.encoded()) for request in requests]
    queue = iter(enumerate(encoded))
    started_s = time.perf_counter()
    cpu_before_s = time.process_time()
    lanes = [_run_stream(server, options, started_s, stream, queue) for stream in range(streams)]
    samples = [sample for lane in await asyncio.gather(*lanes) for sample in lane]
    samples.sort(key=lambda sample: sample.index)
    return LoadResult(
        streams=streams,
        duration_s=time.perf_counter() - started_s,
        client_cpu_s=time.process_time() - cpu_before_s,
        samples=tuple(samples),
    )


async def _run_stream(
    server: Server,
    options: LoadOptions,
    started_s: float,
    stream: int,
    queue: Iterator[tuple[int, tuple[str, bytes]]],
) -> list[Sample]:
    samples: list[Sample] = []
    for index, (path, body) in queue:
        observer = _Observer(index, stream, started_s, options.keep_text)
        samples.append(await _send_one(server, options, observer, path, body))
    return samples


async def _send_one(server: Server, options: LoadOptions, observer: _Observer, path: str, body: bytes) -> Sample:
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **options.headers}
    loop = asyncio.get_running_loop()
    try:
        async with (
            asyncio.timeout(options.silence_timeout_s) as limit,
            send(server, "POST", path, headers, body) as answer,
        ):
            limit.reschedule(loop.time() + options.silence_timeout_s)
            observer.status = answer.status
            if answer.status != 200:
                return observer.failed(Failure.STATUS, f"{answer.status}: {_excerpt(await answer.read(4096))}")
            parser = EventParser()
            async for piece in answer.pieces():
                limit.reschedule(loop.time() + options.silence_timeout_s)
                for event in parser.feed(piece):
                    observer.take(event.data)
        return observer.ended()
    except TimeoutError:
        return observer.failed(Failure.TIMEOUT, f"no byte for {options.silence_timeout_s:g} s")
    except ConnectFailed as error:
        return observer.failed(Failure.CONNECT, str(error))
    except BodyCut as error:
        return observer.failed(Failure.CUT, f"connection ended: {error}")
    except MalformedAnswer as error:
        return observer.failed(Failure.MALFORMED, str(error))


class _Observer:
    """Collects one request's events and turns them into its sample."""

    def __init__(self, index: int, stream: int, started_s: float, keep_text: bool) -> None:
        self.index = index
        self.stream = stream
        self.status: int | None = None
        self._started_s = started_s
        self._sent_s = self._now()
        self._keep_text = keep_text
        self._texts: list[str] = []
        self._times_s: list[float] = []
        self._usage: Mapping[str, Any] | None = None
        self._finish_reason: str | None = None
        self._error: tuple[Failure, str] | None = None

    def _now(self) -> float:
        return time.perf_counter() - self._started_s

    def take(self, data: str) -> None:
        """One event's data. The time is taken before parsing."""
        now = self._now()
        if data.strip() == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            self._fail(Failure.MALFORMED, f"event is not JSON: {data[:80]}")
            return
        if not isinstance(chunk, dict):
            self._fail(Failure.MALFORMED, f"event is not an object: {data[:80]}")
        elif chunk.get("error"):
            self._fail(Failure.ERROR_EVENT, _error_text(chunk["error"]))
        else:
            self._take_chunk(chunk, now)

    def _take_chunk(self, chunk: Mapping[str, Any], now: float) -> None:
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        has_text = False
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason"):
                self._finish_reason = str(choice["finish_reason"])
            text = choice_text(choice)
            if text:
                has_text = True
                if self._keep_text:
                    self._texts.append(text)
        if has_text:
            self._times_s.append(now)

    def _fail(self, kind: Failure, detail: str) -> None:
        if self._error is None:
            self._error = (kind, detail)

    def ended(self) -> Sample:
        """The stream ended without a fault of the connection."""
        if self._error is None and self._finish_reason is None:
            empty = not self._times_s
            self._fail(
                Failure.EMPTY if empty else Failure.CUT,
                "stream without any text" if empty else "stream ended without a finish reason",
            )
        if self._error is None and not self._times_s:
            self._fail(Failure.EMPTY, f"no text, finish reason {self._finish_reason}")
        return self._sample()

    def failed(self, kind: Failure, detail: str) -> Sample:
        self._fail(kind, detail)
        return self._sample()

    def _sample(self) -> Sample:
        usage = self._usage or {}
        tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        return Sample(
            index=self.index,
            stream=self.stream,
            sent_s=self._sent_s,
            end_s=self._now(),
            text_times_s=tuple(self._times_s),
            status=self.status,
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=details.get("cached_tokens"),
            output_tokens=tokens if isinstance(tokens, int) else len(self._times_s),
            estimated=not isinstance(tokens, int),
            finish_reason=self._finish_reason,
            failure=self._error[0] if self._error else None,
            detail=self._error[1] if self._error else "",
            text="".join(self._texts),
        )


def choice_text(choice: Mapping[str, Any]) -> str:
    """Text of a choice of either route; reasoning and tool-call arguments count, roles and nulls do not."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    delta = choice.get("delta") or choice.get("message") or {}
    parts = [delta.get(name) for name in ("reasoning_content", "reasoning", "content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message).split())[:200]


def _excerpt(body: bytes) -> str:
    return " ".join(body.decode("utf-8", "replace").split())[:200]
