"""Prompts over token-major pools: own keys and values, prefixes, calls on a grid, few heads at a time."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from paged_driver import make_runner
from test_reference_attention import SIZE, Case, peak
from tiny_models import VOCAB, tiny_model

from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow, SchedulerOutput
from headrace.params import SamplingParams
from headrace.runner.attention import gather, gathered_prefill
from headrace.runner.attention.gathered_prefill import attend_prefill
from headrace.runner.kv.input_batch import prefill_length
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.model_runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def hand_over(case: Case) -> None:
    """Give the view the rows' keys and values as a model would, with finite pads."""
    length = max(case.new)
    made = []
    for pool in (case.pool.keys[0], case.pool.values[0]):
        rows = []
        for end, table in zip(case.ends, case.tables, strict=True):
            slots = (table[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:end]
            taken = pool[mx.array(slots)].swapaxes(0, 1)
            rows.append(mx.pad(taken, [(0, 0), (0, length - end), (0, 0)], constant_values=3.0))
        made.append(mx.stack(rows))
    case.view.new = made[0], made[1]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    ends=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    dims=st.sampled_from([(64, 64), (80, 96), (32, 32)]),
    dtype=st.sampled_from([mx.float32, mx.bfloat16]),
    shared=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 7, 30, 100]),
    sinks=st.booleans(),
    tile=st.sampled_from([1 << 20, 20_000]),
    planned=st.booleans(),
)
def test_own_keys_and_values(
    seed: int,
    ends: list[int],
    dims: tuple[int, int],
    dtype: mx.Dtype,
    shared: int,
    window: int | None,
    sinks: bool,
    tile: int,
    planned: bool,
) -> None:
    """Nothing before the chunks; the pool itself is not looked at."""
    ends = [2, *ends]  # one query a row is no prompt
    shape = LayerShape(0, 2, *dims, dtype)
    case = Case(shape, ends, ends, heads=2 * shared, head_major=False, window=window, seed=seed)
    hand_over(case)
    expected = case.expected(sinks=sinks)
    for arrays in (case.pool.keys, case.pool.values):
        arrays[0] = mx.full(arrays[0].shape, mx.nan, dtype)
    bound = {4: 1e-4, 2: 0.03}[dtype.size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "SCORE_BYTES", tile)
        if planned:  # padded to few shapes
            patch.setattr(gathered_prefill, "shape_grid", lambda context: 256)
            patch.setattr(gathered_prefill, "is_fused", lambda dtype, *dims: True)
        out = attend_prefill(case.queries, case.view, case.scale, window, case.sinks if sinks else None)
    assert out is not None and out.dtype == dtype
    for got, wanted, count in zip(np.array(out.astype(mx.float32)), expected, case.new, strict=True):
        assert np.abs(got[:, :count] - wanted).max() < bound


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.lists(st.tuples(st.sampled_from([0, 3, 8, 33, 40]), st.integers(1, 30)), min_size=1, max_size=6),
    bits=st.sampled_from([None, 8, 4]),
    heads=st.sampled_from([1, 2, 4]),
    shared=st.sampled_from([1, 3]),
    sinks=st.booleans(),
    grid=st.sampled_from([1, 8, 16]),
    limit=st.sampled_from([1 << 27, 400_000, 130_000]),
    score_bytes=st.sampled_from([1 << 26, 20_000]),
)
def test_behind_prefixes(
    seed: int,
    rows: list[tuple[int, int]],
    bits: int | None,
    heads: int,
    shared: int,
    sinks: bool,
    grid: int,
    limit: int,
    score_bytes: int,
) -> None:
    """Equal and different starts, calls cut to a grid, heads in parts; nothing behind a row's end is seen."""
    rows = [(5, 2), *rows]
    ends, new = [start + count for start, count in rows], [count for _, count in rows]
    shape = LayerShape(0, heads, 64, 64, mx.float32, bits)
    case = Case(shape, ends, new, heads=heads * shared, head_major=False, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered_prefill, "SHAPE_GRID", grid)
        patch.setattr(gathered_prefill, "shape_grid", lambda context: grid)
        patch.setattr(gather, "GATHER_BYTES", limit)
        patch.setattr(gather, "SCORE_BYTES", score_bytes)
        out = attend_prefill(case.queries, case.view, case.scale, None, case.sinks if sinks else None)
    assert out is not None
    for got, wanted, count in zip(np.array(out), case.expected(sinks=sinks), new, strict=True):
        assert np.abs(got[:, :count] - wanted).max() < 1e-4


def test_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gathered_prefill.planned_shapes(2048) == []
    monkeypatch.setattr(gathered_prefill, "shape_grid", lambda context: 256)
    shapes = gathered_prefill.planned_shapes(2048)
    assert (1, 32) in shapes and (1, 2048) in shapes and (8, 256) in shapes and (8, 512) not in shapes
    for rows in range(1, 9):
        for length in range(2, 2048 // rows + 1, 61):
            padded = 1 << (rows - 1).bit_length(), gathered_prefill.padded_length(length)
            assert padded in shapes or padded[0] * padded[1] > 2048
    assert [gathered_prefill.padded_length(length) for length in (1, 33, 2048, 2049, 5000)] == [
        32, 64, 2048, 4096, 6144,
    ]  # fmt: skip


def test_what_is_left_to_others() -> None:
    shape = LayerShape(0, 2, 64, 64, mx.float32)
    decode = Case(shape, [9, 5], [1, 1], heads=2, head_major=False)
    behind_window = Case(shape, [9, 40], [4, 20], heads=2, head_major=False, window=16)
    for case in (decode, behind_window):
        assert attend_prefill(case.queries, case.view, case.scale, case.window, None) is None
    inside_window = Case(shape, [9, 16], [4, 10], heads=2, head_major=False, window=16)
    inside_window.check()
    assert attend_prefill(inside_window.queries, inside_window.view, inside_window.scale, 16, None) is not None


@pytest.mark.parametrize("bits", [None, 8])
def test_long_contexts_stay_within_their_scratch(monkeypatch: pytest.MonkeyPatch, bits: int | None) -> None:
    """16,000 positions of 4 heads are 33 MB, their scores for 64 queries 16 MB."""
    monkeypatch.setattr(gather, "GATHER_BYTES", 18 << 20)
    monkeypatch.setattr(gather, "SCORE_BYTES", 2 << 20)
    case = Case(LayerShape(0, 4, 64, 64, mx.float32, bits), [16000], [64], heads=4, head_major=False)
    assert attend_prefill(case.queries, case.view, case.scale, None, None) is not None
    assert peak(case) < 2 * (18 << 20) + 3 * (2 << 20)


def test_the_pool_is_written_although_nobody_reads_it() -> None:
    """Attention over own keys waits for the write: here for a mark that cannot be computed."""
    case = Case(LayerShape(0, 1, 64, 64, mx.float32), [6], [6], heads=1, head_major=False)
    hand_over(case)
    one = mx.ones((1, 2, 2), mx.bfloat16)
    faulty = mx.gather_mm(one, one, mx.array([0]), mx.array([0]))  # not for this dtype, as evaluation finds out

    class Marked(KVPool):
        in_place = True

    case.pool.__class__ = Marked
    case.pool.marks = [faulty]
    out = attend_prefill(case.queries, case.view, case.scale, None, None)
    with pytest.raises(RuntimeError, match="float32"):
        mx.eval(out)


# -- whole models ------------------------------------------------------------------------------------------


def row(seq_id: int, prompt: list[int], start: int, end: int, layout: KVLayout) -> ScheduledRow:
    """Blocks of different sequences alternate."""
    count = -(-end // layout.block_size)
    table = tuple(1 + seq_id + 9 * block for block in range(count))
    tables, samples = (table,) * len(layout.groups), end == len(prompt)
    tokens = tuple(prompt[start:end])
    return ScheduledRow(seq_id, start, end - start, tokens, tables, samples, end, 0, GREEDY, len(prompt))


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(VOCAB) for _ in range(length)]


def logits(runner: ModelRunner, rows: list[ScheduledRow]) -> np.ndarray:
    found = np.array(runner.prefill_logits(rows).astype(mx.float32))
    mx.eval(runner._pool.changes)
    return found


@pytest.mark.parametrize(
    ("name", "kv"), [("llama", "auto"), ("llama", "int8"), ("llama", "int4"), ("gemma3_text", "auto")]
)
def test_a_cached_prefix_gives_what_a_cold_run_gives(name: str, kv: str) -> None:
    """At every edge of blocks and of the forwards' padded lengths, one more and one less."""
    # A product's last bit may depend on its number of rows, and decide how a packed value is rounded.
    allowed = 1e-4 if kv == "auto" else 1e-2
    runner, layout = make_runner(tiny_model(name), vocab_size=VOCAB, head_major=False, kv_cache_dtype=kv)
    for length in (31, 32, 33, 41):
        prompt = prompt_of(length)
        cold = logits(runner, [row(0, prompt, 0, length, layout)])
        for start in (3, 4, 5, 15, 16, 17, length - 2):
            runner.prefill_logits([row(1, prompt, 0, start, layout)])
            mx.eval(runner._pool.changes)
            warm = logits(runner, [row(1, prompt, start, length, layout)])
            assert np.abs(warm - cold).max() < allowed * max(1.0, np.abs(cold).max())


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_several_prompts_in_one_pass(name: str) -> None:
    """Prompts side by side, cold and behind prefixes of equal and of different lengths, as each one alone."""
    runner, layout = make_runner(tiny_model(name), vocab_size=VOCAB, head_major=False)
    prompts = [prompt_of(length) for length in (30, 33, 36, 36, 29)]
    for starts in ((0, 0, 0, 0, 0), (4, 4, 4, 4, 4), (0, 8, 8, 5, 4)):
        alone = [logits(runner, [row(i, p, 0, len(p), layout)])[0] for i, p in enumerate(prompts)]
        rows = [row(i, p, start, len(p), layout) for i, (p, start) in enumerate(zip(prompts, starts, strict=True))]
        together = logits(runner, rows)
        for got, wanted in zip(together, alone, strict=True):
            assert np.abs(got - wanted).max() < 1e-4 * max(1.0, np.abs(wanted).max())


def test_short_prompts_of_a_step_are_one_forward() -> None:
    runner, layout = make_runner(tiny_model("llama"), vocab_size=VOCAB, head_major=False)
    forwards: list[tuple[int, ...]] = []
    forward = runner._forward

    def counted(tokens: mx.array, *words: object) -> mx.array:
        forwards.append(tuple(tokens.shape))
        return forward(tokens, *words)  # type: ignore[arg-type]

    runner._forward = counted  # type: ignore[method-assign,assignment]
    rows = [row(i, prompt_of(60 + i), 0, 60 + i, layout) for i in range(5)]
    result = runner.launch(SchedulerOutput(1, prefill=tuple(rows))).result()
    assert len(result.sampled) == 5 and forwards == [(5, 64)]


@pytest.mark.parametrize("head_major", [True, False])
def test_a_chunk_that_does_not_sample_computes_kv_only(head_major: bool) -> None:
    """Its logits, here ones that cannot be computed, are not asked for; the pool does not grow."""
    runner, layout = make_runner(tiny_model("llama"), vocab_size=VOCAB, head_major=head_major, num_blocks=20000)
    prompt = prompt_of(60)
    expected = runner.launch(SchedulerOutput(1, prefill=(row(0, prompt, 0, 60, layout),))).result().sampled[0]
    forward = runner._forward
    one = mx.ones((1, 1, 1), mx.bfloat16)
    faulty = mx.gather_mm(one, one, mx.array([0]), mx.array([0]))

    def without_logits(*words: Any) -> mx.array:
        return mx.depends(forward(*words), faulty)

    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    runner._forward = without_logits  # type: ignore[method-assign]
    first = runner.launch(SchedulerOutput(2, prefill=(row(1, prompt, 0, 40, layout),)))
    runner._forward = forward  # type: ignore[method-assign]
    second = runner.launch(SchedulerOutput(3, prefill=(row(1, prompt, 40, 60, layout),)))
    assert not first.result().sampled
    assert second.result().sampled[1].token_id == expected.token_id
    array = 20000 * 4 * 2 * 16 * 4  # one of the pool's
    assert mx.get_peak_memory() - before < array / 2


def test_padded_lengths() -> None:
    lengths = [prefill_length(count) for count in range(1, 5000)]
    assert lengths[0] == 1 and lengths == sorted(lengths) and len(set(lengths)) < 75
    assert all(count <= length for count, length in enumerate(lengths, 1))
    assert all(length <= 1.13 * count for count, length in enumerate(lengths, 1) if count > 256)
    assert all(prefill_length(count) == count for count in (1, 8, 32, 256, 512, 2048, 4096))
