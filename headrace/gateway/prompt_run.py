"""One prompt's run: reads its engine outputs, keeps its clocks, reports its metrics.

    submit ──► accepted ──► started (first output) ──► first token ──► … ──► every sequence over ──► close
    |<- queue_timeout_s ----------->|<- progress_timeout_s between any two outputs ------------->|

A run reads its stream in the handler's own task. Its timer only wakes the stream; the clocks are looked at by the
reader, so nothing is ever cancelled from outside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

import msgspec

from headrace.errors import InternalFault, InvalidRequest, RequestError, RequestTimeout
from headrace.gateway.events import Embedded, Event, KeepAlive, PromptScored, SequenceFinished, Started
from headrace.gateway.run_record import RunRecord, RunTracing
from headrace.gateway.sequence_text import SequenceText, TextOptions, score_prompt
from headrace.gateway.service import EngineClient, Interruption, RequestMetrics
from headrace.request import EngineRequest, FinishReason, SequenceOutput, Timeline
from headrace.text.tokenizer import Tokenizer

Phase = Literal["waiting", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("waiting", "prefill", "decode")


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


@dataclass(frozen=True, slots=True)
class RunServices:
    """What every run of one engine shares."""

    engine: EngineClient
    tokenizer: Tokenizer
    metrics: RequestMetrics
    limits: PipelineLimits
    tracing: RunTracing | None = None


class PromptRun:
    """One engine request. Submitted when made; ``close`` must follow, however it ends.

    Args:
        first_index: index of its first sequence among those of the whole request.
        received_at: when the HTTP request came, on the monotonic clock.
    """

    def __init__(
        self,
        request: EngineRequest,
        first_index: int,
        options: TextOptions,
        received_at: float,
        shared: RunServices,
    ) -> None:
        self._tracing = shared.tracing
        self._span = None if shared.tracing is None else shared.tracing.current()
        if self._span is not None:
            request = msgspec.structs.replace(request, traced=True)
        self.request = request
        self.cached_tokens = 0
        self._first_index = first_index
        self._engine = shared.engine
        self._tokenizer = shared.tokenizer
        self._metrics = shared.metrics
        self._limits = shared.limits
        self._sequences = [SequenceText(first_index + i, shared.tokenizer, options) for i in range(request.n)]
        self._open = request.n
        self._outcome: FinishReason | None = FinishReason.ABORT  # of sequences still open when the run closes
        self._received_at = received_at
        self._submitted_at = self._progress_at = self._sent_at = time.monotonic()
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at = [0.0] * request.n
        self._finish_reasons: list[str] = []
        self._timelines: list[Timeline] = []
        self._interruptions: list[Interruption] = []
        self._is_continued = False
        self._has_begun = False
        self._num_forced = len(options.thinking.ending) if options.thinking is not None else 0
        self._stream = self._engine.submit(request)
        self._timer = asyncio.get_running_loop().call_later(self._limits.tick_s, self._tick)

    @property
    def completion_tokens(self) -> int:
        return sum(sequence.completion_tokens for sequence in self._sequences)

    @property
    def reasoning_tokens(self) -> int:
        return sum(sequence.reasoning_tokens for sequence in self._sequences)

    @property
    def phase(self) -> Phase:
        """As far as its outputs tell: one that was preempted, or waits for a new worker, keeps its phase."""
        if self._started_at is None:
            return "waiting"
        return "prefill" if self._first_token_at is None else "decode"

    @property
    def age_s(self) -> float:
        """Since the HTTP request came."""
        return time.monotonic() - self._received_at

    async def accepted(self) -> None:
        try:
            await self._stream.accepted()
        except RequestError:
            self._outcome = None
            raise

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """Events as the outputs come, until every sequence is over."""
        try:
            while True:
                try:
                    outputs = await self._stream.__anext__()  # it changes where thinking is cut short
                except StopAsyncIteration:
                    break
                now = time.monotonic()
                events = self._absorb(outputs, now) if outputs else self._look_at_clocks(now)
                if events:
                    yield events
                elif now - self._sent_at >= self._limits.keep_alive_s:
                    self._sent_at = now
                    yield [KeepAlive()]
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
                    self._finish_reasons.append(self._outcome)
        if self._has_begun:
            first_at, last_at = self._first_token_at, max(self._last_token_at)
            self._metrics.ended(
                e2e_s=None if first_at is None else last_at - self._received_at,
                decode_s=None if first_at is None or not self.completion_tokens else last_at - first_at,
                prompt_tokens=len(self.request.prompt_token_ids),
                completion_tokens=self.completion_tokens,
                key=self.request.key,
            )
        if self._tracing is not None and self._span is not None:
            self._tracing.run_ended(self._span, self._record())

    def _record(self) -> RunRecord:
        interruptions = (*self._interruptions, *self._stream.interruptions)
        is_whole = not interruptions and not self._is_continued
        return RunRecord(
            id=self.request.id,
            params=self.request.params,
            n=self.request.n,
            prompt_tokens=len(self.request.prompt_token_ids),
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            reasoning_tokens=self.reasoning_tokens,
            received_at=self._received_at,
            submitted_at=self._submitted_at,
            started_at=self._started_at,
            first_token_at=self._first_token_at,
            last_token_at=max(self._last_token_at) or None,
            ended_at=time.monotonic(),
            finish_reasons=tuple(self._finish_reasons),
            timelines=tuple(self._timelines) if is_whole else (),
            interruptions=interruptions,
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
        return []

    # -- outputs

    def _absorb(self, outputs: list[SequenceOutput], now: float) -> list[Event]:
        self._progress_at = now
        if self._started_at is None:
            self._started_at = self._when(self._stream.started_at, now)
            self._metrics.scheduled(self._started_at - self._submitted_at)
            self.cached_tokens = outputs[0].cached_tokens
            return [Started(self.cached_tokens), *self._absorb(outputs, now)]
        events: list[Event] = []
        stream = self._stream
        for output in outputs:
            if not self.cached_tokens:
                self.cached_tokens = output.cached_tokens
            self._has_begun |= output.has_begun
            if output.timeline is not None:
                self._timelines.append(output.timeline)
            if output.prompt_logprobs is not None and output.index == 0:
                scored = score_prompt(self._tokenizer, self.request.prompt_token_ids, output.prompt_logprobs)
                events.append(PromptScored(self._first_index, scored))
            if output.hidden:
                events.append(Embedded(self._first_index, output.hidden))
                self._first_token_at = self._last_token_at[0] = now
            if output.token_ids:
                self._observe_tokens(output, now)
            _raise_failure(output)
            events += self._advance(output)
            if self._stream is not stream:
                break  # what the old stream says beyond this does not exist
        if events:
            self._sent_at = now
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
        elif sequence.taken is not None:
            self._metrics.forced_tokens(self._num_forced)
            self._continue_behind(sequence.taken)
        return events

    def _continue_behind(self, taken: list[int]) -> None:
        """Let the engine go on behind other tokens than its own: as a replay, under a new id.

        Submitted before the old one is dropped, so that a draining server does not take itself for idle.
        """
        old_id = self.request.id
        base, _, number = old_id.partition("~")
        self.request = msgspec.structs.replace(
            self.request, id=f"{base}~{int(number or 0) + 1}", emitted={0: taken}
        )
        self._is_continued = True
        self._interruptions += self._stream.interruptions
        self._stream = self._engine.submit(self.request)
        self._engine.abort(old_id)

    def _end_open_sequences(self) -> list[Event]:
        """The stream ended early: cancelled. What there is is delivered."""
        events: list[Event] = []
        for sequence in self._sequences:
            if not sequence.finished:
                events += sequence.end(FinishReason.ABORT)
                self._note_finish(events[-1])
        return events

    def _when(self, reported: float | None, now: float) -> float:
        """When the worker did what is read ``now``: this process may have been busy in between."""
        return now if reported is None else min(now, max(self._submitted_at, reported))

    def _note_finish(self, event: Event) -> None:
        self._open -= 1
        if isinstance(event, SequenceFinished):
            self._metrics.sequence_finished(event.reason)
            self._finish_reasons.append(event.reason)

    def _observe_tokens(self, output: SequenceOutput, now: float) -> None:
        if self._first_token_at is None:
            self._first_token_at = now
            sampled_at = self._when(self._stream.first_token_at, now)
            self._metrics.first_token(
                now - self._received_at, sampled_at - (self._started_at or self._submitted_at)
            )
        last = self._last_token_at[output.index]
        count = len(output.token_ids)
        if last:
            self._metrics.inter_token((now - last) / count, count)
        elif count > 1:  # merged with the first one, before anybody looked
            self._metrics.inter_token(0.0, count - 1)
        self._last_token_at[output.index] = now


def _raise_failure(output: SequenceOutput) -> None:
    """A failed sequence fails its request: half an answer that looks whole would be worse."""
    if output.refused:
        raise InvalidRequest(output.error)
    if output.finish_reason is FinishReason.ERROR:
        raise InternalFault(output.error or "the engine failed on this request")
    if output.finish_reason is FinishReason.TIMEOUT:
        raise RequestTimeout(output.error or "the request took too long")
