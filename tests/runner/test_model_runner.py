"""Batched, paged, chunked output equals mlx-lm's own one-sequence output."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paged_driver import Driver, make_runner, reference_tokens
from tiny_models import VOCAB, tiny_model

from headrace.core.step import SchedulerOutput
from headrace.params import SamplingParams
from headrace.runner.model_runner import RunnerOptions

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def prompts(count: int, *, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 5, 8, 13, 21, 34]))] for _ in range(count)]


def check(name: str, *, head_major: bool, options: RunnerOptions, chunk: int, scattered: bool = True) -> None:
    model = tiny_model(name)
    expected = [reference_tokens(model, prompt, 12) for prompt in prompts(7)]
    runner, layout = make_runner(model, vocab_size=VOCAB, head_major=head_major, options=options)
    driver = Driver(runner, layout, 400)
    for prompt in prompts(7):
        driver.add(prompt, GREEDY, scattered=scattered)
    assert driver.run(chunk) == expected


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("head_major", [True, False])
def test_equals_one_sequence(name: str, chunk: int, head_major: bool) -> None:
    check(name, head_major=head_major, options=RunnerOptions(compile=False), chunk=chunk)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_contiguous_tables(name: str) -> None:
    check(name, head_major=True, options=RunnerOptions(compile=False), chunk=16, scattered=False)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_compiled_decode(name: str) -> None:
    check(name, head_major=False, options=RunnerOptions(compile=True), chunk=16)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("head_major", [True, False])
def test_materializing_views(name: str, head_major: bool) -> None:
    check(name, head_major=head_major, options=RunnerOptions(compile=False, materialize=True), chunk=16)


@pytest.mark.parametrize("head_major", [True, False])
def test_single_rows_for_models_that_cannot_batch_masks(head_major: bool) -> None:
    options = RunnerOptions(compile=False, materialize=True, single_rows=True)
    check("gemma2", head_major=head_major, options=options, chunk=16)


@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize("compile", [True, False])
def test_a_step_of_several_forwards_copies_no_pool(head_major: bool, compile: bool) -> None:
    """Prefill forwards of different lengths and a decode forward write what the ones before them read."""
    if head_major and compile:
        pytest.skip("slices are not compiled")
    runner, layout = make_runner(
        tiny_model("llama"),
        vocab_size=VOCAB,
        num_blocks=20000,
        head_major=head_major,
        options=RunnerOptions(compile=compile),
    )
    driver = Driver(runner, layout, 1000)
    sequences = [driver.add(list(range(count)), GREEDY) for count in (20, 20, 5, 60)]
    decoding = sequences[:2]
    runner.launch(SchedulerOutput(0, prefill=tuple(driver.row(seq, 20) for seq in decoding))).result()
    for seq in decoding:
        seq.computed, seq.output = 20, [1]
    steps = [
        SchedulerOutput(
            step,
            decode=tuple(driver.row(seq, 1) for seq in decoding),
            prefill=tuple(driver.row(seq, len(seq.prompt)) for seq in sequences[2:]),
        )
        for step in (1, 2)
    ]
    runner.launch(steps[0]).result()  # traces, compiles
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    first = runner.launch(steps[0])
    second = runner.launch(steps[1])
    first.result()
    second.result()
    array = 20000 * 4 * 2 * 16 * 4  # one of the six arrays
    assert mx.get_peak_memory() - before < array / 2
