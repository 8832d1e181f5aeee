"""Live figures: rates and percentiles over their windows, restarts, gaps, a bounded history, no work unwatched."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway import live as live_module
from headrace.gateway.latencies import FineHistogram, WatchedMetrics, percentiles
from headrace.gateway.live import HISTORY_POINTS, Live, Point
from headrace.gateway.service import EngineState
from headrace.worker.protocol import EngineStats


class Inner:
    """``RequestMetrics`` that remembers the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        return lambda *args, **named: self.calls.append((name, *args, *named.items()))


class Scene:
    """An engine whose counters the test moves, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.asked = 0
        self.in_flight = 0
        self.engine_state = EngineState(status="ready")
        self.metrics = WatchedMetrics(Inner())  # type: ignore[arg-type]
        self.live = Live(self, self.metrics, lambda: self.in_flight, clock=lambda: self.now)  # type: ignore[arg-type]

    def state(self) -> EngineState:
        self.asked += 1
        return self.engine_state

    def set(self, **changes: object) -> None:
        self.engine_state = msgspec.structs.replace(self.engine_state, **changes)

    def count(self, generated: int = 0, prompted: int = 0, queried: int = 0, hit: int = 0, **more: int) -> None:
        self.set(
            stats=EngineStats(
                generation_tokens_total=generated,
                prompt_tokens_total=prompted,
                prefix_queries_total=queried,
                prefix_hits_total=hit,
                **more,
            )
        )

    def tick(self, seconds: float = 1.0) -> Point:
        self.now += seconds
        return self.live.newest()


def test_nothing_is_known_at_first() -> None:
    point = Scene().tick()
    unknown = (point.generation_tps, point.prompt_tps, point.ttft_s, point.itl_s, point.hit_rate)
    assert unknown == (None,) * 5
    assert (point.running, point.waiting, point.kv_held) == (0, 0, 0.0)


def test_rates_over_the_last_seconds() -> None:
    scene = Scene()
    scene.count(generated=1000, prompted=500, queried=500, hit=100)  # before anybody watched
    scene.tick()
    scene.count(
        generated=1010, prompted=520, queried=520, hit=115, running=2, waiting=1, blocks_total=8, blocks_held=2
    )
    point = scene.tick()
    assert (point.generation_tps, point.prompt_tps, point.hit_rate) == (10.0, 20.0, 0.75)
    assert (point.running, point.waiting, point.kv_held) == (2, 1, 0.25)
    for _ in range(5):
        point = scene.tick()
    assert (point.generation_tps, point.prompt_tps, point.hit_rate) == (0.0, 0.0, 0.75)
    for _ in range(30):
        point = scene.tick()
    assert point.hit_rate is None


def test_a_new_worker_counts_from_zero() -> None:
    scene = Scene()
    scene.count(generated=1000)
    scene.tick()
    scene.set(restarts=1, stats=EngineStats())
    assert scene.tick().generation_tps == 0.0
    scene.count(generated=30)
    assert scene.tick().generation_tps == 15.0
    scene.set(reloads=1)
    scene.count(generated=40)  # more than the one before had, all of it new
    assert scene.tick().generation_tps == pytest.approx(70 / 3)


def test_requests_wait_while_no_worker_is_there() -> None:
    scene = Scene()
    scene.in_flight = 3
    scene.count(running=2, waiting=1, blocks_total=8)
    assert (scene.tick().running, scene.tick().waiting) == (2, 1)
    scene.set(restarts=1, stats=EngineStats())
    point = scene.tick()
    assert (point.running, point.waiting) == (0, 3)


def test_a_pause_without_watchers_is_a_gap() -> None:
    scene = Scene()
    scene.tick()
    scene.count(generated=100)
    assert scene.tick().generation_tps == 100.0
    scene.count(generated=5000)
    assert scene.tick(60).generation_tps is None
    scene.count(generated=5007)
    assert scene.tick().generation_tps == 7.0


def test_latencies_of_the_window() -> None:
    scene = Scene()
    scene.metrics.first_token(9.0, 1.0)
    scene.tick()
    for _ in range(9):
        scene.metrics.first_token(0.2, 0.1)
    scene.metrics.first_token(2.0, 0.1)
    scene.metrics.inter_token(0.01, 3)
    point = scene.tick()
    assert point.ttft_s == pytest.approx([0.2, 0.2, 2.0], rel=0.05)
    assert point.itl_s == pytest.approx([0.01] * 3, rel=0.05)
    for _ in range(31):
        point = scene.tick()
    assert (point.ttft_s, point.itl_s) == (None, None)


def test_history_is_bounded() -> None:
    scene = Scene()
    for _ in range(2 * HISTORY_POINTS):
        scene.tick()
    history = scene.live.history
    assert len(history) == HISTORY_POINTS
    assert all(a.at <= b.at for a, b in pairwise(history))
    assert len(scene.live._samples) <= live_module.LATENCY_WINDOW_S + 1


def test_watchers_share_samples_and_leave_nothing_running() -> None:
    scene = Scene()
    scene.live = Live(scene, scene.metrics, lambda: 0, interval_s=0.02)  # type: ignore[arg-type]

    async def watch(points: int) -> list[Point]:
        return [await scene.live.next() for _ in range(points)]

    async def run() -> None:
        seen = await asyncio.gather(*(watch(5) for _ in range(20)))
        everyones = [points[1:] for points in seen]  # a late one may begin with the second
        assert all(set(map(id, points)) & set(map(id, everyones[0])) for points in everyones)
        assert scene.asked <= 8
        assert len(asyncio.all_tasks()) == 1
        before = scene.asked
        await asyncio.sleep(0.1)
        assert scene.asked == before

    asyncio.run(run())


@given(st.lists(st.floats(1e-5, 2000.0), min_size=1, max_size=200))
def test_percentiles_are_near_an_observation(durations: list[float]) -> None:
    histogram = FineHistogram()
    before = histogram.counts()
    for duration in durations:
        histogram.observe(duration)
    shares = (0.5, 0.9, 0.99)
    found = percentiles(before, histogram.counts(), shares)
    assert found is not None
    ordered = sorted(durations)
    for share, value in zip(shares, found, strict=True):
        exact = next(d for i, d in enumerate(ordered, 1) if i >= share * len(ordered))
        assert value == pytest.approx(min(max(exact, 1e-4), 600.0), rel=0.1)
    assert percentiles(histogram.counts(), histogram.counts(), shares) is None


def test_metrics_pass_everything_on() -> None:
    inner = Inner()
    metrics = WatchedMetrics(inner)  # type: ignore[arg-type]
    metrics.rejected("queue_full")
    metrics.scheduled(0.5)
    metrics.first_token(1.0, 0.5)
    metrics.inter_token(random.random(), 2)
    metrics.sequence_finished("stop")
    metrics.ended(e2e_s=1.0, decode_s=0.5, prompt_tokens=3, completion_tokens=4, key="ada")
    metrics.unknown_field(2)
    metrics.render()
    names = [
        "rejected",
        "scheduled",
        "first_token",
        "inter_token",
        "sequence_finished",
        "ended",
        "unknown_field",
        "render",
    ]
    assert [call[0] for call in inner.calls] == names
    assert inner.calls[2] == ("first_token", 1.0, 0.5)
