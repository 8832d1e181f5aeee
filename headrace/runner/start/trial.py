"""A short run of a model over a small pool, to be compared with something that is known to be right.

Two rows of different lengths: a prompt in two chunks, then decode steps, with interleaved block tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.forwards.logits_head import HeadSelector
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.store import Store
from headrace.runner.model_runner import ModelRunner, RunnerOptions

# Largest difference of a logit, as a share of the logits' spread, by bytes of the dtype.
TOLERANCE = {4: 0.01, 2: 0.08}
BLOCK_SIZE = 4
# Blocks of each row, in every layer group.
TABLES = ((1, 5, 2), (4, 3, 7))
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """Two rows: prompts, and the tokens decoded after them."""

    prompts: tuple[tuple[int, ...], ...]
    decoded: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(vocab_size: int) -> Trial:
        def tokens(first: int, count: int) -> tuple[int, ...]:
            return tuple((first + 7919 * i) % vocab_size for i in range(count))

        return Trial((tokens(11, 9), tokens(5, 6)), (tokens(3, 3), tokens(8, 3)))

    @property
    def rows(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return list(zip(self.prompts, self.decoded, strict=True))


@dataclass(frozen=True, slots=True)
class TrialRun:
    """What came of it: per row, float32 logits ``[1 + decode steps, V]``; and the pool as it was left."""

    logits: list[mx.array]
    pool: KVPool


def run_trial(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    options: RunnerOptions,
    *,
    head_major: bool,
    store: Store | None,
) -> TrialRun:
    trial = Trial.of(vocab_size)
    layout = KVLayout(BLOCK_SIZE, found.layout.groups)
    pool = KVPool(found.layers, [16] * len(layout.groups), BLOCK_SIZE, head_major=head_major, store=store)
    runner = ModelRunner(model, selector, pool, layout, vocab_size, options)
    logits: list[list[mx.array]] = [[], []]
    first = [_row(layout, index, trial, 0, 4) for index in range(2)]
    rest = [_row(layout, index, trial, 4, len(trial.prompts[index])) for index in range(2)]
    for rows in (*[first] * runner.prompts_to_settle, rest):
        groups = [[row] for row in rows] if options.single_rows else [rows]
        found_logits = mx.concatenate([runner.prefill_logits(group) for group in groups])
        mx.eval(found_logits, pool.changes)
    for index in range(2):
        logits[index].append(found_logits[index])
    for step in range(len(trial.decoded[0])):
        ends = [len(prompt) + step + 1 for prompt in trial.prompts]
        decode = [_row(layout, index, trial, end - 1, end) for index, end in enumerate(ends)]
        found_logits = runner.decode_logits(decode)
        mx.eval(found_logits, pool.changes)
        for index in range(2):
            logits[index].append(found_logits[index])
    return TrialRun([mx.stack(row).astype(mx.float32) for row in logits], pool)


def _row(layout: KVLayout, index: int, trial: Trial, start: int, end: int) -> ScheduledRow:
    known = trial.prompts[index] + trial.decoded[index]
    return ScheduledRow(
        seq_id=index,
        start=start,
        num_tokens=end - start,
        token_ids=known[start:end],
        block_tables=tuple(TABLES[index][: -(-end // layout.block_size)] for _ in layout.groups),
        samples=True,
        sample_position=end,
        seed=0,
        params=_PARAMS,
        num_prompt_tokens=len(trial.prompts[index]),
    )


def difference(expected: mx.array, got: mx.array) -> float:
    """Largest difference as a share of the spread of the expected logits; infinite when not finite."""
    spread = mx.max(expected) - mx.min(expected)
    worst = mx.max(mx.abs(expected - got)) / mx.maximum(spread, 1e-6)
    value = float(np.array(worst))
    return value if math.isfinite(value) else math.inf
