"""Load on an OpenAI-compatible server: a closed loop of N streams, or arrivals at given times.

Closed loop: each of N streams sends its next request as soon as its last one ended, until the list of requests is
used up. Arrivals: each request is sent at its time, however many are open. Either way a request's sample holds
when it was sent, when each event with text arrived and how it ended; times are seconds since the run began, from
one monotonic clock; connecting counts as part of a request's time.

    due ─ sent ──connect── headers ── first text ── text ── text ── finish, usage ── end
            0                              └ TTFT       └──┴ gaps (ITL)                └ E2E

The client watches itself as well: its CPU time, how long arrived bytes waited for it, how late its timers fire.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.bench.http_stream import BodyCut, ConnectFailed, MalformedAnswer, Server, send
from headrace.bench.observe import Failure, Observer, Sample
from headrace.bench.sse import EventParser

_PROBE_S = 0.02


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A streamed request: route and JSON body. ``usage`` is asked for when the body does not say otherwise."""

    path: str
    body: Mapping[str, object]

    def encoded(self) -> bytes:
        body = {"stream": True, "stream_options": {"include_usage": True}, **self.body}
        return json.dumps(body).encode()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Requests one after the other; each one's ``messages`` are its own turn, those before are put in front."""

    turns: tuple[LoadRequest, ...]


Work = LoadRequest | Conversation


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A finished run.

    Attributes:
        streams: of a closed loop; None where arrivals were scheduled.
        duration_s: from the first request's begin to the last one's end.
        client_cpu_s: CPU time of this process.
        samples: in the order of the requests.
        waits_s: how long arrived bytes waited until this client looked at them, one per piece.
        timer_lags_s: how late a timer of this client fired, every 20 ms.
        interrupted: it was ended before its requests were; ``samples`` are those that had ended. What was under
            way is in no count, so the run has no rates.
    """

    streams: int | None
    duration_s: float
    client_cpu_s: float
    samples: tuple[Sample, ...]
    waits_s: tuple[float, ...] = ()
    timer_lags_s: tuple[float, ...] = ()
    interrupted: bool = False


class Interrupted(Exception):
    """A run was cancelled; ``result`` is what there is of it."""

    def __init__(self, result: LoadResult) -> None:
        super().__init__("interrupted")
        self.result = result


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are sent.

    Attributes:
        headers: of every request.
        silence_timeout_s: longest time without a byte from the server before a request counts as failed.
        keep_text: samples carry what was generated.
        on_sample: told of every request that ended.
    """

    headers: Mapping[str, str] = field(default_factory=dict)
    silence_timeout_s: float = 600.0
    keep_text: bool = False
    on_sample: Callable[[Sample], None] | None = None


async def run_closed_loop(
    url: str, requests: Sequence[Work], streams: int, options: LoadOptions | None = None
) -> LoadResult:
    """Sends all ``requests``, at most ``streams`` at a time. Failures are samples, not exceptions.

    Raises Interrupted when it is cancelled.
    """
    run = _Run(Server.of(url), options or LoadOptions())
    queue = iter(enumerate(requests))
    try:
        async with run.watched():
            await asyncio.gather(*(run.stream(stream, queue) for stream in range(streams)))
    except asyncio.CancelledError:
        raise Interrupted(replace(run.result(streams), interrupted=True)) from None
    return run.result(streams)


async def run_arrivals(
    url: str, requests: Sequence[Work], due_s: Sequence[float], options: LoadOptions | None = None
) -> LoadResult:
    """Sends request i at ``due_s[i]`` seconds after the begin. Failures are samples, not exceptions.

    Raises Interrupted when it is cancelled.
    """
    run = _Run(Server.of(url), options or LoadOptions())
    arrivals = enumerate(zip(requests, due_s, strict=True))
    try:
        async with run.watched():
            await asyncio.gather(*(run.arrival(index, work, due) for index, (work, due) in arrivals))
    except asyncio.CancelledError:
        raise Interrupted(replace(run.result(None), interrupted=True)) from None
    return run.result(None)


class _Run:
    """One run: its clock, its samples, and what the client observes about itself."""

    def __init__(self, server: Server, options: LoadOptions) -> None:
        self._server = server
        self._options = options
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **options.headers}
        self._samples: list[Sample] = []
        self._waits_s: list[float] = []
        self._lags_s: list[float] = []
        self._started_s = self._cpu_s = self._duration_s = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._started_s

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        self._started_s, self._cpu_s = time.perf_counter(), time.process_time()
        probe = asyncio.create_task(self._probe())
        try:
            yield
        finally:
            self._duration_s = self._now()
            self._cpu_s = time.process_time() - self._cpu_s
            probe.cancel()

    async def _probe(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_PROBE_S)
            self._lags_s.append(time.perf_counter() - before - _PROBE_S)

    def result(self, streams: int | None) -> LoadResult:
        samples = sorted(self._samples, key=lambda sample: (sample.index, sample.turn))
        return LoadResult(
            streams, self._duration_s, self._cpu_s, tuple(samples), tuple(self._waits_s), tuple(self._lags_s)
        )

    async def stream(self, stream: int, queue: Iterator[tuple[int, Work]]) -> None:
        for index, work in queue:
            await self._converse(index, stream, work, None)

    async def arrival(self, index: int, work: Work, due_s: float) -> None:
        await asyncio.sleep(due_s - self._now())
        await self._converse(index, index, work, due_s)

    async def _converse(self, index: int, stream: int, work: Work, due_s: float | None) -> None:
        turns = work.turns if isinstance(work, Conversation) else (work,)
        messages: list[Any] = []
        for turn, request in enumerate(turns):
            if turn:
                messages += request.body["messages"]  # type: ignore[arg-type]
                request = LoadRequest(request.path, {**request.body, "messages": messages})
            elif len(turns) > 1:
                messages = list(request.body["messages"])  # type: ignore[call-overload]
            observer = Observer(index, stream, self._now(), turn=turn, due_s=None if turn else due_s)
            sample = await self._send(
                observer, request, keep_text=self._options.keep_text or turn + 1 < len(turns)
            )
            self._add(sample)
            if sample.failure:
                for skipped in range(turn + 1, len(turns)):
                    lost = Observer(index, stream, self._now(), turn=skipped)
                    self._add(lost.failed(Failure.NOT_SENT, "an earlier turn failed", self._now()))
                return
            messages.append({"role": "assistant", "content": sample.text})

    def _add(self, sample: Sample) -> None:
        self._samples.append(sample if self._options.keep_text else replace(sample, text=""))
        if self._options.on_sample:
            self._options.on_sample(sample)

    async def _send(self, observer: Observer, request: LoadRequest, *, keep_text: bool) -> Sample:
        silence_s = self._options.silence_timeout_s
        body = request.encoded()
        loop = asyncio.get_running_loop()
        end_s = 0.0
        try:
            async with (
                asyncio.timeout(silence_s) as limit,
                send(self._server, "POST", request.path, self._headers, body) as answer,
            ):
                limit.reschedule(loop.time() + silence_s)
                observer.status = answer.status
                if answer.status != 200:
                    text = " ".join((await answer.read(4096)).decode("utf-8", "replace").split())[:200]
                    return observer.failed(Failure.STATUS, f"{answer.status}: {text}", self._now())
                end_s = answer.arrived_s - self._started_s
                parser = EventParser()
                async for piece in answer.pieces():
                    limit.reschedule(loop.time() + silence_s)
                    end_s = answer.arrived_s - self._started_s
                    self._waits_s.append(self._now() - end_s)
                    for event in parser.feed(piece):
                        observer.take(event.data, end_s)
            return observer.ended(end_s, keep_text)
        except TimeoutError:
            return observer.failed(Failure.TIMEOUT, f"no byte for {silence_s:g} s", self._now())
        except ConnectFailed as error:
            return observer.failed(Failure.CONNECT, str(error), self._now())
        except BodyCut as error:
            return observer.failed(Failure.CUT, f"connection ended: {error}", self._now())
        except MalformedAnswer as error:
            return observer.failed(Failure.MALFORMED, str(error), self._now())
