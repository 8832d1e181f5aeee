"""One engine's figures second by second: sampled while somebody watches, by whoever of them is due first.

    watcher A ── tick ──┐                    ┌── tick ──► the point, taken
    watcher B ── tick ──┴─ same due time ────┴── tick ──► the same point

There is no task: without watchers nothing runs. Rates, percentiles and the hit rate are differences over a window
of the last seconds; a worker's counters begin at 0 with each start, so their growth is added up here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.gateway.latencies import WatchedMetrics, percentiles
from headrace.gateway.service import EngineClient, EngineState

INTERVAL_S = 1.0
RATE_WINDOW_S = 5.0
LATENCY_WINDOW_S = 30.0
HISTORY_POINTS = 300
SHARES = (0.5, 0.9, 0.99)
GAP_S = 3 * INTERVAL_S
"""After so long without a sample the windows begin anew."""

_COUNTERS = ("generation_tokens_total", "prompt_tokens_total", "prefix_queries_total", "prefix_hits_total")


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Figures at one time. None: nothing to tell it from.

    Attributes:
        at: seconds since 1970.
        generation_tps, prompt_tps: output tokens per second over ``RATE_WINDOW_S``, and prompt tokens (cached ones
            included) whose prefill began.
        ttft_s, itl_s: at ``SHARES``, of first tokens, and of gaps between tokens, in ``LATENCY_WINDOW_S``.
        hit_rate: of the prompt tokens looked up in the prefix cache in ``LATENCY_WINDOW_S``, those found.
        running: sequences that run in the worker.
        waiting: requests queued there; all in flight while no worker is there.
        kv_held: share of the KV blocks that requests hold.
    """

    at: float
    generation_tps: float | None
    prompt_tps: float | None
    ttft_s: list[float] | None
    itl_s: list[float] | None
    hit_rate: float | None
    running: int
    waiting: int
    kv_held: float


@dataclass(frozen=True, slots=True)
class _Sample:
    """Counters at one time on the clock, grown over all workers since the first sample."""

    at_s: float
    totals: tuple[int, ...]
    ttft: tuple[int, ...]
    itl: tuple[int, ...]


class Live:
    """The points of one engine, ``interval_s`` apart; at most ``HISTORY_POINTS`` are kept."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: WatchedMetrics,
        num_in_flight: Callable[[], int],
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._num_in_flight = num_in_flight
        self.interval_s = interval_s
        self._clock = clock
        self._history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._samples: deque[_Sample] = deque()
        self._due_s = float("-inf")
        self._worker: object = None
        self._seen = (0,) * len(_COUNTERS)

    @property
    def history(self) -> list[Point]:
        """Oldest first."""
        return list(self._history)

    def newest(self) -> Point:
        """The last point, taken now when it is due."""
        now = self._clock()
        if now >= self._due_s:
            self._due_s = now + self.interval_s
            self._history.append(self._take(now))
        return self._history[-1]

    async def next(self) -> Point:
        """The first point that is taken from now on."""
        before = self._history[-1] if self._history else None
        while (point := self.newest()) is before:
            await asyncio.sleep(max(0.001, self._due_s - self._clock()))
        return point

    def _take(self, now: float) -> Point:
        state = self._engine.state()
        samples = self._samples
        if samples and now - samples[-1].at_s > max(GAP_S, 3 * self.interval_s):
            samples.clear()
        samples.append(self._sample(now, state))
        while now - samples[0].at_s > LATENCY_WINDOW_S:
            samples.popleft()
        newest, oldest = samples[-1], samples[0]
        generated, prompted = self._rates(newest)
        queried = newest.totals[2] - oldest.totals[2]
        stats = state.stats
        return Point(
            at=round(time.time(), 3),
            generation_tps=generated,
            prompt_tps=prompted,
            ttft_s=percentiles(oldest.ttft, newest.ttft, SHARES),
            itl_s=percentiles(oldest.itl, newest.itl, SHARES),
            hit_rate=(newest.totals[3] - oldest.totals[3]) / queried if queried else None,
            running=stats.running,
            waiting=stats.waiting if stats.blocks_total else self._num_in_flight(),
            kv_held=stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0,
        )

    def _rates(self, newest: _Sample) -> tuple[float | None, float | None]:
        base = next(sample for sample in self._samples if newest.at_s - sample.at_s <= RATE_WINDOW_S)
        elapsed = newest.at_s - base.at_s
        if not elapsed:
            return None, None
        return (newest.totals[0] - base.totals[0]) / elapsed, (newest.totals[1] - base.totals[1]) / elapsed

    def _sample(self, now: float, state: EngineState) -> _Sample:
        seen = tuple(getattr(state.stats, name) for name in _COUNTERS)
        worker = (state.restarts, state.reloads)
        is_first = self._worker is None
        is_same = worker == self._worker and all(map(int.__ge__, seen, self._seen))
        base = seen if is_first else self._seen if is_same else (0,) * len(seen)
        past = self._samples[-1].totals if self._samples else (0,) * len(seen)
        totals = tuple(total + new - old for total, new, old in zip(past, seen, base, strict=True))
        self._worker, self._seen = worker, seen
        return _Sample(now, totals, self._metrics.ttft.counts(), self._metrics.itl.counts())
