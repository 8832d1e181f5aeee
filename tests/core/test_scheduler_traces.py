"""Random traces over everything a scheduler meets; every output must be the undisturbed one."""

from __future__ import annotations

import random

import pytest
from fake_runner import Engine, expected_tokens, layout, request
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.scheduler import SchedulerConfig
from headrace.core.step import ScheduledRow
from headrace.request import EngineRequest

WINDOWS = [(None,), (None, 5), (7,), (4, 11), (None, 3, 9), (None, None), (2,)]


def random_engine(rng: random.Random) -> Engine:
    block_size = rng.choice([1, 2, 4, 5])
    windows = rng.choice(WINDOWS)
    num_blocks = tuple(rng.randint(4, rng.choice([8, 20, 60])) for _ in windows)
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 8),
        max_model_len=rng.randint(8, 60),
        prefill_step_size=rng.choice([1, 3, 8, 16, 64]),
        max_prefill_rows=rng.randint(1, 4),
        max_decode_stall_ms=rng.choice([None, 2.0, 50.0]),
        max_queue=100,
        enable_prefix_cache=rng.random() < 0.8,
        prefix_cache_max_blocks=rng.choice([None, None, 0, 3, 10]),
        watermark=rng.choice([0.0, 0.01, 0.2]),
        continuous_batching=rng.random() < 0.9,
    )
    return Engine(config, layout(block_size, *windows), num_blocks, is_ahead=rng.random() < 0.8)


def random_prompt(rng: random.Random, prompts: list[list[int]], longest: int) -> list[int]:
    """New tokens, or behind a beginning of an earlier prompt."""
    base: list[int] = []
    if prompts and rng.random() < 0.7:
        earlier = rng.choice(prompts)
        base = earlier[: rng.choice([len(earlier), rng.randint(0, len(earlier))])]
    new = [rng.randrange(23) for _ in range(rng.choice([0, 1, rng.randint(0, longest)]))]
    return (base + new)[:longest] or [rng.randrange(23)]


class Trace:
    """One random history of one engine."""

    def __init__(self, seed: int, *, failures: bool, pressed: bool = False) -> None:
        self.pressed = pressed
        self.rng = random.Random(seed)
        self.engine = random_engine(self.rng)
        self.prompts: list[list[int]] = []
        self.count = 0
        if failures:
            self.engine.runner.fail = self.fails

    def fails(self, row: ScheduledRow) -> bool:
        return self.rng.random() < 0.03

    def submit(self) -> None:
        rng = self.rng
        prompt = random_prompt(rng, self.prompts, self.engine.scheduler.max_sequence_tokens + 1)
        new = request(
            f"r{self.count}",
            prompt,
            rng.choice([0, 1, 2, 9, 30]),
            n=rng.choice([1, 1, 1, 2, 4]),
            stop=rng.random() < 0.5,
            seed=rng.choice([0, rng.randrange(1000)]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
            priority=rng.choice([0, 0, 0, 1, -1]),
            key=rng.choice(["", "a", "b"]),
            cache_salt=rng.choice(["", "", "s"]),
        )
        if rng.random() < 0.1:
            new = self.replayed(new)
        self.count += 1
        if self.engine.add(new) is None:
            self.prompts.append(prompt)

    def replayed(self, new: EngineRequest) -> EngineRequest:
        """The same request as a second worker gets it: some tokens emitted, some sequences done."""
        limit = self.engine.scheduler.max_sequence_tokens
        emitted = {}
        for index in range(new.n):
            tokens, _ = expected_tokens(new, index, limit)
            emitted[index] = tokens[: self.rng.randint(0, len(tokens))]
        done = [index for index in range(new.n) if self.rng.random() < 0.2]
        return replace(new, emitted=emitted, done=done)

    def abort(self) -> None:
        if self.engine.requests:
            request_id = self.rng.choice(list(self.engine.requests))
            self.engine.abort(request_id, self.rng.choice([None, None, 0, 1]))

    def run(self, events: int) -> None:
        for _ in range(events):
            dice = self.rng.random()
            if dice < 0.3:
                self.submit()
            elif dice < 0.36:
                self.abort()
            elif dice < 0.37:
                self.engine.scheduler.clear_prefix_cache()
            elif self.pressed and dice < 0.45:
                self.press()
            else:
                self.engine.step()
        self.engine.scheduler.set_admission(True)
        self.engine.run(at_most=20_000)
        self.engine.check_outputs()

    def press(self) -> None:
        """What memory pressure may do at any moment."""
        scheduler = self.engine.scheduler
        match self.rng.randrange(4):
            case 0:
                scheduler.preempt_last()
            case 1:
                scheduler.set_admission(self.rng.random() < 0.5)
            case _:
                self.engine.resize(self.rng.choice([0.0, 0.0, self.rng.random(), 1.0]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_every_output_is_the_undisturbed_one(seed: int) -> None:
    Trace(seed, failures=False).run(events=80)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_failing_rows_take_nobody_along(seed: int) -> None:
    Trace(seed, failures=True).run(events=80)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_memory_pressure_changes_no_output(seed: int) -> None:
    Trace(seed, failures=seed % 4 == 0, pressed=True).run(events=100)


@pytest.mark.slow
def test_many_long_traces() -> None:
    for seed in range(100):
        Trace(seed, failures=seed % 3 == 0).run(events=150)


def test_traces_reach_what_they_are_for() -> None:
    """The random traces above are worth something only if they preempt, share, copy and fork."""
    preemptions = hits = copies = forks = 0
    for seed in range(30):
        trace = Trace(seed, failures=False)
        trace.run(events=80)
        stats = trace.engine.scheduler.stats()
        preemptions += stats.preemptions_total
        hits += stats.prefix_hits_total
        copies += sum(len(step.copies) for step in trace.engine.steps)
        forks += sum(new.n > 1 for new in trace.engine.requests.values())
    assert min(preemptions, hits, copies, forks) > 20


def test_manager_is_what_the_scheduler_is_built_on() -> None:
    manager = KVCacheManager(layout(4, None, 8), (10, 3), True, (None, None))
    assert manager.max_tokens == 40  # 3 blocks hold any window of 8
    assert KVCacheManager(layout(4, None, 10), (10, 3), True, (None, None)).max_tokens == 12


def test_pressure_shrinks_sliding_pools_and_one_long_prompt_still_runs() -> None:
    """Down to a window and a small chunk, while the window moves on, and back."""
    config = SchedulerConfig(max_num_seqs=4, max_model_len=200, prefill_step_size=64)
    engine = Engine(config, layout(4, None, 10), (60, 40), is_ahead=True)
    long, short = request("long", list(range(20)) * 8, max_tokens=30), request("short", [1, 2, 3], max_tokens=60)
    engine.add(short)
    for _ in range(5):
        engine.step()
    engine.resize(0.0)
    sizes = engine.scheduler.pool_sizes
    assert sizes == (50, 4 + 4), "a sequence of 200 tokens; a window of 10 in at most 4 blocks, and a chunk of 4"
    engine.add(long)
    for _ in range(30):
        engine.step()
    engine.resize(1.0)
    assert engine.scheduler.pool_sizes == (60, 40)
    engine.run(at_most=2000)
    engine.check_outputs()
