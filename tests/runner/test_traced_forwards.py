"""Prompts whose forward is traced give what untraced ones give, whatever their lengths, neighbours and tokens."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paged_driver import Driver, make_runner, reference_tokens
from tiny_models import VOCAB, tiny_model

from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.forwards import traced as traced_forwards
from headrace.runner.model_runner import ModelRunner, RunnerOptions

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 40))] for _ in range(count)]


def run(
    name: str, given: list[list[int]], *, compile: bool, kv: str = "auto"
) -> tuple[list[list[int]], ModelRunner]:
    runner, layout = make_runner(
        tiny_model(name),
        vocab_size=VOCAB,
        num_blocks=2000,
        head_major=False,
        options=RunnerOptions(compile=compile, trace_prompts=True),
        kv_cache_dtype=kv,
    )
    driver = Driver(runner, layout, 2000)
    for prompt in given:
        driver.add(prompt, GREEDY)
    return driver.run(48, prefill_rows=3), runner


def traces(runner: ModelRunner) -> int:
    assert runner._traced is not None
    return sum(forward is not None for forward in runner._traced._prompts.values())


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_traced_prompts_equal_one_sequence(name: str) -> None:
    given = prompts(40)
    found, runner = run(name, given, compile=True)
    assert traces(runner) >= 3
    model = tiny_model(name)
    assert found == [reference_tokens(model, prompt, GREEDY.max_tokens) for prompt in given]


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_traced_prompts_over_packed_pools(kv: str) -> None:
    given = prompts(40)
    found, runner = run("llama", given, compile=True, kv=kv)
    assert traces(runner) >= 3
    assert found == run("llama", given, compile=False, kv=kv)[0]


def test_few_traces_are_kept_and_the_rest_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_forwards, "MOST_PROMPTS", 3)
    given = prompts(60)
    found, runner = run("llama", given, compile=True)
    assert runner._traced is not None and len(runner._traced._prompts) == 3
    assert found == run("llama", given, compile=False)[0]


class Alone:
    """A runner and rows of it that begin at their first position."""

    def __init__(self, *, compile: bool) -> None:
        self.runner, layout = make_runner(
            tiny_model("llama"),
            vocab_size=VOCAB,
            head_major=False,
            options=RunnerOptions(compile=compile, trace_prompts=True),
        )
        self.driver = Driver(self.runner, layout, 400)

    def rows(self, given: list[list[int]]) -> list[ScheduledRow]:
        return [self.driver.row(self.driver.add(prompt, GREEDY), len(prompt)) for prompt in given]

    def logits(self, given: list[list[int]]) -> np.ndarray:
        found = self.runner.prefill_logits(self.rows(given))
        mx.eval(found, self.runner._pool.changes)
        return np.array(found)


def test_rows_of_a_trace_end_where_they_end() -> None:
    """One shape, other lengths and tokens: each row's logits are those of its own last token."""
    traced, plain = Alone(compile=True), Alone(compile=False)
    for turn in range(5):
        rng = random.Random(turn)
        given = [[rng.randrange(VOCAB) for _ in range(length)] for length in (17 + turn, 24, 20 - turn)]
        np.testing.assert_allclose(traced.logits(given), plain.logits(given), rtol=1e-4, atol=1e-5)
    assert traces(traced.runner) == 1


def test_a_trace_goes_on_over_pools_of_another_size() -> None:
    traced, plain = Alone(compile=True), Alone(compile=False)
    for blocks in (399, 700, 399):
        for alone in (traced, plain):
            alone.runner.resize_pools([blocks], [{}])
        for given in (prompts(2, seed=blocks), prompts(2, seed=blocks)):
            np.testing.assert_allclose(traced.logits(given), plain.logits(given), rtol=1e-4, atol=1e-5)
