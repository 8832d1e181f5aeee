from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.prefill_batch import PrefillBatch
from headrace.core.prefill_budget import MIN_CHUNK_TOKENS, QUIET_TOKENS, PrefillBudget, StepCostModel

TOKEN_S, CONTEXT_S, DECODE_S = 1e-4, 2e-8, 5e-3


def measured(noise: float = 0.0) -> StepCostModel:
    """A model that has seen 300 steps of a device with these costs."""
    rng, cost = random.Random(1), StepCostModel()
    for _ in range(300):
        tokens, context = rng.choice([0, rng.randint(16, 2048)]), float(rng.randint(0, 30_000))
        seconds = DECODE_S + tokens * (TOKEN_S + CONTEXT_S * context)
        cost.observe(32, tokens, context if tokens else 0.0, seconds * (1 + rng.uniform(-noise, noise)))
    return cost


def test_decode_and_prefill_are_told_apart() -> None:
    cost = measured()
    assert abs(cost.decode_s(32) - DECODE_S) < 0.05 * DECODE_S
    assert cost.token_s is not None and abs(cost.token_s - TOKEN_S) < 0.05 * TOKEN_S
    assert abs(cost.scale_tokens - TOKEN_S / CONTEXT_S) < 0.1 * TOKEN_S / CONTEXT_S


def test_noise_is_averaged() -> None:
    cost = measured(noise=0.2)
    assert cost.token_s is not None and abs(cost.token_s - TOKEN_S) < 0.4 * TOKEN_S


def test_one_slow_step_does_not_spoil_the_estimate() -> None:
    cost = measured()
    cost.observe(32, 256, 0.0, 10.0)  # a compilation
    cost.observe(32, 0, 0.0, 10.0)
    assert cost.token_s is not None and cost.token_s < 3 * TOKEN_S
    assert cost.decode_s(32) < 2 * DECODE_S


def test_another_number_of_rows_uses_the_nearest_measurement() -> None:
    cost = StepCostModel()
    assert cost.decode_s(8) == 0.0
    cost.observe(4, 0, 0.0, 0.004)
    cost.observe(100, 0, 0.0, 0.010)
    assert cost.decode_s(3) == cost.decode_s(8) == 0.004
    assert cost.decode_s(256) == 0.010
    assert cost.decode_s(0) == 0.0


@given(st.floats(1.0, 5000.0), st.integers(0, 200_000), st.integers(1, 4096))
def test_a_chunk_costs_its_work(work: float, start: int, step_size: int) -> None:
    budget = PrefillBudget(step_size, None, 16)
    tokens = budget.chunk(work, start)
    assert 1 <= tokens <= step_size
    cost = tokens * (1 + (start + tokens / 2) / budget.cost.scale_tokens)
    assert cost <= work * 1.001 or tokens == min(MIN_CHUNK_TOKENS, step_size)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), max_size=20), st.integers(1, 2048))
def test_padding_stays_within_the_step(rows: list[tuple[int, int]], step_size: int) -> None:
    batch = PrefillBatch(PrefillBudget(step_size, None, 16), max_rows=8)
    batch.open(decode_rows=0)
    taken = []
    for start, remaining in rows:
        tokens = batch.room(start, remaining)
        assert not (batch.is_full and tokens)
        if tokens:
            batch.add(start, tokens)
            taken.append(tokens)
    assert bool(taken) == bool(rows)  # the first always gets something
    assert len(taken) <= 8
    assert batch.area == len(taken) * max(taken, default=0) <= step_size
    assert 2 * sum(taken) >= batch.area


def test_a_bound_that_is_too_tight_still_lets_prompts_in() -> None:
    budget = PrefillBudget(2048, 1.0, 16)
    budget.cost.observe(4, 0, 0.0, 0.005)
    budget.cost.observe(4, 64, 0.0, 0.010)
    assert budget.chunk(budget.work(decode_rows=4), 0) == MIN_CHUNK_TOKENS
    assert budget.chunk(budget.work(decode_rows=0), 0) == 2048


@pytest.mark.parametrize(
    ("token_s", "tokens"), [(1e-4, 2048), (2e-3, 500), (1.0, QUIET_TOKENS), (None, 2048)], ids=str
)
def test_a_chunk_that_nobody_streams_beside_takes_a_second(token_s: float | None, tokens: int) -> None:
    """Known from the start or from a step; what few tokens take is taken all the same."""
    told = PrefillBudget(2048, 250.0, 16, token_s)
    found = PrefillBudget(2048, 250.0, 16)
    if token_s is not None:
        found.cost.observe(0, 512, 0.0, 512 * token_s)
    for budget in (told, found):
        assert 0.9 * tokens <= budget.chunk(budget.work(decode_rows=0), 0) <= tokens
