"""One pipeline for all APIs, streamed or not: validated request in, events out.

    GenerationRequest ── one EngineRequest per prompt ──► engine
    events ◄── SequenceText (one per sequence) ◄── PromptRun (one per prompt) ◄── OutputStream

A run reads its stream in the handler's own task; there is no task per token and none per request unless a
request has several prompts. Clocks (keep-alive, time in the queue, time without progress) are looked at when a
timer wakes the idle stream. Leaving the ``async with`` block, for whatever reason, aborts what is still running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager

import msgspec

from headrace.errors import InternalFault, RequestError, RequestTimeout
from headrace.gateway.events import Event, KeepAlive, PromptScored, SequenceFinished, Usage
from headrace.gateway.sequence_text import SequenceText, TextOptions, score_prompt
from headrace.gateway.service import EngineClient, RequestMetrics
from headrace.params import SamplingParams
from headrace.request import EngineRequest, FinishReason, SequenceOutput
from headrace.text.tokenizer import Tokenizer

ACCEPTANCE_WAIT_S = 2.0
"""A streaming answer begins after this long even when the worker has not said yes (it may be restarting)."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt with its resolved parameters (the room for output depends on the prompt's length)."""

    token_ids: list[int]
    params: SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: what every API dialect is turned into.

    Sequence indices count through all prompts: prompt ``p`` has ``p * n`` … ``p * n + n - 1``.

    Attributes:
        id: unique; what the client can cancel.
        prompts: at least one.
        n: sequences per prompt.
        text: how tokens become text.
        priority, key, cache_salt: as in ``EngineRequest``.
        received_at: ``time.monotonic()`` when the HTTP request came.
    """

    id: str
    prompts: tuple[Prompt, ...]
    n: int = 1
    text: TextOptions = TextOptions()
    priority: int = 0
    key: str = ""
    cache_salt: str = ""
    received_at: float


class PipelineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks of a request; seconds, None is off.

    Attributes:
        queue_timeout_s: from submission to the first sign that the engine works on it.
        progress_timeout_s: between two such signs.
        keep_alive_s: silence after which a ``KeepAlive`` is due.
    """

    queue_timeout_s: float | None = None
    progress_timeout_s: float | None = 300.0
    keep_alive_s: float = 10.0

    @property
    def tick_s(self) -> float:
        """How often an idle request looks at its clocks."""
        clocks = [self.queue_timeout_s, self.progress_timeout_s, self.keep_alive_s]
        return min([1.0, *(clock / 4 for clock in clocks if clock)])


class Pipeline:
    """Runs requests on one engine and knows those in flight."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, metrics: RequestMetrics, limits: PipelineLimits
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._limits = limits
        self._running: dict[str, Generation] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Submit all prompts and wait until the engine has taken them in.

        Raises the ``RequestError`` of the first that is refused; the others are then aborted.
        """
        runs: list[PromptRun] = []
        try:
            for engine_request in _engine_requests(request):
                first_index = len(runs) * request.n
                runs.append(
                    PromptRun(
                        engine_request,
                        first_index,
                        request,
                        self._engine,
                        self._tokenizer,
                        self._metrics,
                        self._limits,
                    )
                )
            await _all_accepted(runs)
            generation = Generation(runs, self._engine)
            self._running[request.id] = generation
            yield generation
        finally:
            self._running.pop(request.id, None)
            for run in runs:
                run.close()

    def cancel(self, request_id: str, key: str) -> bool:
        """End a request of this key: its client gets what there is, with reason "abort". False: unknown."""
        generation = self._running.get(request_id)
        if generation is None or generation.key != key:
            return False
        generation.cancel()
        return True


class Generation:
    """A request that the engine has taken in. ``events`` may be iterated once."""

    def __init__(self, runs: list[PromptRun], engine: EngineClient) -> None:
        self._runs = runs
        self._engine = engine
        self.key = runs[0].request.key

    def cancel(self) -> None:
        for run in self._runs:
            self._engine.abort(run.request.id)

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """All events, a ``Usage`` last; raises the ``RequestError`` that ends the request early."""
        batches = self._runs[0].batches() if len(self._runs) == 1 else _merged(self._runs)
        async with aclosing(batches):
            async for batch in batches:
                yield batch
        yield [
            Usage(
                prompt_tokens=sum(len(run.request.prompt_token_ids) for run in self._runs),
                completion_tokens=sum(run.completion_tokens for run in self._runs),
                cached_tokens=sum(run.cached_tokens for run in self._runs),
            )
        ]


class PromptRun:
    """One engine request: reads its outputs, keeps its clocks, reports its metrics."""

    def __init__(
        self,
        request: EngineRequest,
        first_index: int,
        parent: GenerationRequest,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        limits: PipelineLimits,
    ) -> None:
        self.request = request
        self.cached_tokens = 0
        self._first_index = first_index
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._limits = limits
        self._skip_special = parent.text.skip_special
        self._sequences = [SequenceText(first_index + i, tokenizer, parent.text) for i in range(request.n)]
        self._open = request.n
        self._outcome: FinishReason | None = FinishReason.ABORT  # of sequences still open when the run closes
        self._received_at = parent.received_at
        self._submitted_at = self._progress_at = self._sent_at = time.monotonic()
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at = [0.0] * request.n
        self._stream = engine.submit(request)
        self._timer = asyncio.get_running_loop().call_later(limits.tick_s, self._tick)

    @property
    def completion_tokens(self) -> int:
        return sum(sequence.completion_tokens for sequence in self._sequences)

    async def accepted(self) -> None:
        try:
            await self._stream.accepted()
        except RequestError:
            self._outcome = None
            raise

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Events as the outputs come, until every sequence is over."""
        try:
            async for outputs in self._stream:
                now = time.monotonic()
                events = self._absorb(outputs, now) if outputs else self._look_at_clocks(now)
                if events:
                    yield events
                    self._sent_at = now
                if not self._open:
                    return
            yield self._end_open_sequences()
        except RequestTimeout:
            self._outcome = FinishReason.TIMEOUT
            raise
        except RequestError:
            self._outcome = FinishReason.ERROR if self._started_at is not None else None
            raise

    def close(self) -> None:
        """Free everything: abort what still runs, stop the timer, report how it ended."""
        self._timer.cancel()
        if self._open:
            self._engine.abort(self.request.id)
            if self._outcome is not None:
                for _ in range(self._open):
                    self._metrics.sequence_finished(self._outcome)
        if self._first_token_at is not None:
            last_token_at = max(self._last_token_at)
            self._metrics.ended(
                e2e_s=last_token_at - self._received_at,
                decode_s=last_token_at - self._first_token_at,
                prompt_tokens=len(self.request.prompt_token_ids),
                completion_tokens=self.completion_tokens,
                key=self.request.key,
            )

    # -- clocks

    def _tick(self) -> None:
        self._stream.wake()
        self._timer = asyncio.get_running_loop().call_later(self._limits.tick_s, self._tick)

    def _look_at_clocks(self, now: float) -> list[Event]:
        queue, progress = self._limits.queue_timeout_s, self._limits.progress_timeout_s
        if queue is not None and self._started_at is None and now - self._submitted_at >= queue:
            raise RequestTimeout(
                f"the request waited {queue:g} s in the queue, the limit here; try again later",
                code="queue_timeout",
            )
        if progress is not None and now - self._progress_at >= progress:
            raise RequestTimeout(f"the request made no progress for {progress:g} s, the limit here")
        if now - self._sent_at >= self._limits.keep_alive_s:
            return [KeepAlive()]
        return []

    # -- outputs

    def _absorb(self, outputs: Iterable[SequenceOutput], now: float) -> list[Event]:
        self._progress_at = now
        events: list[Event] = []
        for output in outputs:
            if self._started_at is None:
                self._started_at = now
                self._metrics.scheduled(now - self._submitted_at)
            if not self.cached_tokens:
                self.cached_tokens = output.cached_tokens
            if output.prompt_logprobs is not None and output.index == 0:
                scored = score_prompt(self._tokenizer, self.request.prompt_token_ids, output.prompt_logprobs)
                events.append(PromptScored(self._first_index, scored))
            if output.token_ids:
                self._observe_tokens(output, now)
            _raise_failure(output)
            events += self._advance(output)
        return events

    def _advance(self, output: SequenceOutput) -> list[Event]:
        sequence = self._sequences[output.index]
        if sequence.finished:
            return []
        events = sequence.push(output)
        if sequence.finished:
            self._note_finish(events[-1])
            if output.finish_reason is None:
                self._engine.abort(self.request.id, output.index)
        return events

    def _end_open_sequences(self) -> list[Event]:
        """The stream ended early: cancelled. What there is is delivered."""
        events: list[Event] = []
        for sequence in self._sequences:
            if not sequence.finished:
                events += sequence.end(FinishReason.ABORT)
                self._note_finish(events[-1])
        return events

    def _note_finish(self, event: Event) -> None:
        self._open -= 1
        if isinstance(event, SequenceFinished):
            self._metrics.sequence_finished(event.reason)

    def _observe_tokens(self, output: SequenceOutput, now: float) -> None:
        if self._first_token_at is None:
            self._first_token_at = now
            self._metrics.first_token(now - self._received_at, now - (self._started_at or self._submitted_at))
        last = self._last_token_at[output.index]
        if last:
            count = len(output.token_ids)
            self._metrics.inter_token((now - last) / count, count)
        self._last_token_at[output.index] = now


def _engine_requests(request: GenerationRequest) -> list[EngineRequest]:
    several = len(request.prompts) > 1
    return [
        EngineRequest(
            id=f"{request.id}-{position}" if several else request.id,
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            n=request.n,
            priority=request.priority,
            key=request.key,
            cache_salt=request.cache_salt,
        )
        for position, prompt in enumerate(request.prompts)
    ]


def _raise_failure(output: SequenceOutput) -> None:
    """A failed sequence fails its request: half an answer that looks whole would be worse."""
    if output.finish_reason is FinishReason.ERROR:
        raise InternalFault(output.error or "the engine failed on this request")
    if output.finish_reason is FinishReason.TIMEOUT:
        raise RequestTimeout(output.error or "the request took too long")


async def _all_accepted(runs: list[PromptRun]) -> None:
    try:
        async with asyncio.timeout(ACCEPTANCE_WAIT_S):
            for run in runs:
                await run.accepted()
    except TimeoutError:
        pass


async def _merged(runs: list[PromptRun]) -> AsyncGenerator[list[Event], None]:
    """Batches of several runs as they come. One task per run; each waits until its last batch is taken."""
    queue: asyncio.Queue[list[Event] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def read(run: PromptRun) -> None:
        try:
            async with aclosing(run.batches()) as batches:
                async for batch in batches:
                    await queue.put(batch)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(read(run)) for run in runs]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
