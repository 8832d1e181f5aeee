"""The engine loop's step: schedule, run, update, one step ahead of the host.

        host:    schedule k+1   launch k+1   read k    update k     schedule k+2 …
        device:  ····· step k ···············|····· step k+1 ······················

Step k+1 is scheduled and launched before the tokens of step k are read, so the device does not wait for Python. A
sequence that ended in step k has then run one position too far; the scheduler drops that token.

A step without one finite row is not believed at all (the device is at fault, not a request): it is poisoned, as
one that raises is. A few bad rows are the scheduler's business; it computes each once more, alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from headrace.core.scheduler import Rejection, Scheduler
from headrace.core.step import SchedulerOutput, StepResult
from headrace.request import EngineRequest, SequenceOutput
from headrace.worker.grammar_queue import Compiler, GrammarQueue
from headrace.worker.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    ClearPrefixCache,
    EngineStats,
    Rejected,
    StepOutputs,
    ToWorker,
)
from headrace.worker.step_record import StepRecord
from headrace.worker.timelines import Timelines

log = logging.getLogger("headrace.worker")


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for it. Raises for a fault of the device: the step is poisoned, nothing of it may be used."""
        ...


class PoisonedStep(Exception):
    """A step of which nothing may be used; the process must be replaced."""


class Runner(Protocol):
    """What executes scheduler outputs. Launches are read in order, at most two at a time."""

    def launch(self, output: SchedulerOutput) -> StepHandle: ...


class _Launched(NamedTuple):
    handle: StepHandle
    output: SchedulerOutput


class MemoryUse(NamedTuple):
    """Device memory of this process and what the machine has free, bytes; the level of memory pressure."""

    active: int = 0
    peak: int = 0
    cache: int = 0
    process: int = 0
    available: int = 0
    pressure: str = "none"


class Engine:
    """One scheduler, one runner. Main thread only.

    Args:
        record: told which requests are in flight before each launch.
        read_memory: current device memory, read once per step.
        grammars: compiles the grammars of requests; None: the runner takes none.
        announce: takes an empty output per prefilling request, before the launch: a launch of a long chunk may
            return late (MLX's CPU backend takes in a bounded number of operations), and its requests wait no more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        record: StepRecord,
        read_memory: Callable[[], MemoryUse] = MemoryUse,
        clock: Callable[[], float] = time.monotonic,
        grammars: Compiler | None = None,
        announce: Callable[[StepOutputs], None] | None = None,
    ) -> None:
        self._announce = announce
        self._scheduler = scheduler
        self._runner = runner
        self._record = record
        self._read_memory = read_memory
        self._clock = clock
        self._compiling = GrammarQueue(grammars)
        self._in_flight: _Launched | None = None
        self._running: frozenset[str] = frozenset()  # requests of the step in flight, and those beside it
        self._answering: set[str] = set()  # those of them that have sampled a token
        self._timelines = Timelines()
        self._steps_total = 0
        self._step_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._in_flight is not None or self._scheduler.has_work() or len(self._compiling) > 0

    def step(self) -> StepOutputs | None:
        """Launch the next step, then take in the one before. None: there was nothing to do."""
        output = self._schedule()
        launched = self._launch(output)
        before, self._in_flight = self._in_flight, launched
        if before is None and launched is None:
            return None
        outputs = [] if before is None else self._take_in(before)
        return StepOutputs(outputs, self.stats(), self._clock())

    def settle(self) -> StepOutputs | None:
        """Take in the step that is outstanding and launch none: nothing refers to the pools then."""
        before, self._in_flight = self._in_flight, None
        return None if before is None else StepOutputs(self._take_in(before), self.stats(), self._clock())

    def stats(self) -> EngineStats:
        """Now; ``steps_total`` counts steps whose results were taken in."""
        stats, memory = self._scheduler.stats(), self._read_memory()
        return EngineStats(
            running=stats.running,
            waiting=stats.waiting,
            blocks_total=stats.blocks_total,
            blocks_held=stats.blocks_held,
            blocks_cached=stats.blocks_cached,
            steps_total=self._steps_total,
            prompt_tokens_total=stats.prompt_tokens_total,
            generation_tokens_total=stats.generation_tokens_total,
            prefix_queries_total=stats.prefix_queries_total,
            prefix_hits_total=stats.prefix_hits_total,
            preemptions_total=stats.preemptions_total,
            step_s=self._step_s,
            active_bytes=memory.active,
            peak_bytes=memory.peak,
            cache_bytes=memory.cache,
            process_bytes=memory.process,
            available_bytes=memory.available,
            pressure=memory.pressure,
            groups=stats.groups,
        )

    def handle(self, message: ToWorker) -> Accepted | Rejected | None:
        """Obey one message; a request's own fault is an answer, never an exception.

        A request with a grammar is answered by ``compiled``.
        """
        match message:
            case AddRequest(request) if request.params.grammar is not None:
                self._compiling.add(request)
            case AddRequest(request):
                return self._add(request)
            case AbortRequest(request_id, index):
                if index is None:
                    self._compiling.drop(request_id)
                self._timelines.drop(request_id, index)
                self._scheduler.abort(request_id, index)
            case ClearPrefixCache():
                self._scheduler.clear_prefix_cache()
        return None

    def compiled(self) -> list[Accepted | Rejected]:
        """Queue the requests whose grammars are ready; the answers to them."""
        answers: list[Accepted | Rejected] = []
        for request, error in self._compiling.done():
            if error is None:
                answers.append(self._add(request))
            else:
                message = f"The demanded form of the answer cannot be used: {error}"
                answers.append(
                    Rejected(request_id=request.id, status=400, code="invalid_grammar", message=message)
                )
        return answers

    # -- inside

    def _take_in(self, before: _Launched) -> list[SequenceOutput]:
        result = believed(before.output, before.handle.result())
        now = self._clock()
        outputs = self._scheduler.update(result, now)
        if self._timelines:
            outputs = self._timelines.took(outputs, now)
        self._answering.update(output.request_id for output in outputs if output.token_ids)
        self._steps_total += 1
        self._step_s = result.duration_s
        return outputs

    def _schedule(self) -> SchedulerOutput:
        """A fault here may be of any request, running or waiting."""
        try:
            return self._scheduler.schedule(self._clock())
        except Exception:
            self._record.write(frozenset((*self._scheduler.running_ids(), *self._scheduler.waiting_ids())))
            raise

    def _launch(self, output: SchedulerOutput) -> _Launched | None:
        """Launch, unless there is nothing to run. The record names everybody who may be blamed for a death now."""
        before = self._running if self._in_flight is not None else frozenset()
        self._running = frozenset() if output.is_empty else frozenset(self._scheduler.running_ids())
        self._answering.intersection_update(self._running | before)
        self._record.write(self._running | before)
        if self._timelines and not output.is_empty:
            self._timelines.launched(self._running, self._clock())
        if output.prefill and self._announce is not None:
            self._announce(StepOutputs(self._signs_of_life(), self.stats(), self._clock()))
        return None if output.is_empty else _Launched(self._runner.launch(output), output)

    def _signs_of_life(self) -> list[SequenceOutput]:
        """One empty output per request that is not waiting any more and has no token yet."""
        return [
            SequenceOutput(request_id=request_id, cached_tokens=self._scheduler.cached_tokens(request_id))
            for request_id in sorted(self._running - self._answering)
        ]

    def _add(self, request: EngineRequest) -> Accepted | Rejected:
        try:
            rejection = self._scheduler.add_request(request, self._clock())
        except Exception:
            log.exception("a request could not be queued")
            rejection = Rejection(500, "internal_error", "the request could not be queued")
        if rejection is None:
            if request.traced:
                self._timelines.add(request.id, request.n - len(request.done), self._clock())
            return Accepted(request.id)
        return Rejected(
            request_id=request.id,
            status=rejection.status,
            code=rejection.code,
            message=rejection.message,
            param=rejection.param,
            retry_after_s=rejection.retry_after_s,
        )


def believed(output: SchedulerOutput, result: StepResult) -> StepResult:
    """The result, unless every row that sampled failed; a single row that is tried again may fail by itself."""
    if result.failed and not result.sampled and not output.recomputes:
        raise PoisonedStep(f"all {len(result.failed)} rows failed: {next(iter(result.failed.values()))}")
    return result
