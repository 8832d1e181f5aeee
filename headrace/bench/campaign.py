"""Runs cells: prompts are made, caches warmed where asked, the load runs while the server's metrics are watched.

Repetitions are interleaved (every cell once, then every cell again), because a machine's speed drifts and would
otherwise be taken for a difference between cells.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.bench.cells import Cell, arrivals_s
from headrace.bench.compose import Composed, Composer
from headrace.bench.load import (
    Conversation,
    Interrupted,
    LoadOptions,
    LoadRequest,
    LoadResult,
    Work,
    run_arrivals,
    run_closed_loop,
)
from headrace.bench.observe import Sample
from headrace.bench.prometheus import Moment, ServerRecord, Watcher, record
from headrace.bench.server import BenchFault, TokenCounter

_WARMING_STREAMS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition of a cell; ``began_s`` since the campaign began."""

    repetition: int
    began_s: float
    result: LoadResult
    server: ServerRecord | None


@dataclass(slots=True)
class CellRuns:
    """A cell and what was measured. ``skipped``: why nothing was; ``incomplete``: why not all of it was."""

    cell: Cell
    prompt_tokens: int | None = None
    exact: bool | None = None
    runs: list[Run] = field(default_factory=list)
    skipped: str | None = None
    incomplete: str | None = None


@dataclass
class Campaign:
    """Everything a run needs.

    Attributes:
        num_requests: per repetition; None: by the load.
        max_model_len: of the model, where known: cells that cannot fit are skipped.
        on_request: told of each request that ended.
    """

    url: str
    options: LoadOptions
    composer: Composer
    watcher: Watcher | None = None
    counter: TokenCounter | None = None
    num_requests: int | None = None
    max_model_len: int | None = None
    on_request: Callable[[Sample], None] = lambda sample: None
    _began_s: float = field(default_factory=time.perf_counter)

    async def warm_up(self, cell: Cell, count: int) -> None:
        """``count`` short requests that nobody counts. Raises BenchFault when all of them fail."""
        if not count:
            return
        composed = await self.composer.compose(replace(cell, cache="warm-up"), 0, count)
        result = await run_closed_loop(self.url, _shortened(composed.work, 8), min(count, 4), self.options)
        if all(sample.failure for sample in result.samples):
            first = result.samples[0]
            raise BenchFault(f"no warm-up request succeeded: {first.failure}: {first.detail}")

    async def run(self, cells: Sequence[CellRuns], repetitions: int, on_run: Callable[[CellRuns], None]) -> None:
        """All cells, repetitions interleaved; ``on_run`` is told of each run. Raises Interrupted."""
        for repetition in range(repetitions):
            for one in cells:
                await self.repeat(one, repetition)
                on_run(one)

    async def repeat(self, one: CellRuns, repetition: int) -> None:
        """Measure a cell once more. Raises Interrupted when it is cancelled; the part of the run is kept."""
        cell = one.cell
        count = self.num_requests or cell.load.default_requests()
        composed = await self.composer.compose(cell, repetition, count)
        one.prompt_tokens, one.exact = (
            composed.tokens,
            composed.exact if repetition == 0 else (one.exact and composed.exact),
        )
        if too_long := self._too_long(cell, composed):
            one.skipped = too_long
            return
        if cell.cache == "warm":
            await run_closed_loop(self.url, _shortened(composed.work, 1), _WARMING_STREAMS, self.options)
        run = await self._measure(cell, repetition, composed.work)
        if not run.result.interrupted or run.result.samples:
            one.runs.append(run)
        if run.result.interrupted:
            raise Interrupted(run.result)

    def _too_long(self, cell: Cell, composed: Composed) -> str | None:
        if self.max_model_len is None or composed.tokens is None:
            return None
        needed = composed.tokens + cell.output_tokens
        if needed <= self.max_model_len:
            return None
        return f"{composed.tokens} + {cell.output_tokens} tokens are more than the model's {self.max_model_len}"

    async def _measure(self, cell: Cell, repetition: int, work: Sequence[Work]) -> Run:
        options = replace(self.options, keep_text=True, on_sample=self.on_request)
        before = await self.watcher.scrape() if self.watcher else None
        moments: list[Moment] = []
        watching = asyncio.create_task(self.watcher.watch(moments)) if self.watcher and before else None
        began_s = time.perf_counter() - self._began_s
        try:
            if cell.load.kind == "concurrency":
                result = await run_closed_loop(self.url, work, int(cell.load.value), options)
            else:
                seed = f"{self.composer.seed}:{cell}:{repetition}:arrivals"
                due_s = arrivals_s(len(work), cell.load.value, seed)
                result = await run_arrivals(self.url, work, due_s, options)
        except Interrupted as cut:
            result = cut.result
        finally:
            if watching:
                watching.cancel()
        after = await self.watcher.scrape() if self.watcher and before else None
        samples = [await self._counted(sample) for sample in result.samples]
        result = replace(result, samples=tuple(samples))
        return Run(repetition, began_s, result, record(before, after, moments))

    async def _counted(self, sample: Sample) -> Sample:
        """Without its text; where the server sent no usage, tokens as its tokenizer counts (still an estimate)."""
        if sample.estimated and sample.failure is None and self.counter:
            tokens = await self.counter.of_text(sample.text)
            if tokens is not None:
                sample = replace(sample, output_tokens=tokens)
        return replace(sample, text="")


def _shortened(work: Sequence[Work], max_tokens: int) -> list[LoadRequest]:
    """First turns only, with so many tokens of answer."""
    firsts = [one.turns[0] if isinstance(one, Conversation) else one for one in work]
    return [LoadRequest(one.path, {**one.body, "max_tokens": max_tokens}) for one in firsts]
