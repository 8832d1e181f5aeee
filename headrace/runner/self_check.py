"""At load: find the way this model can be run over the pools, and prove it on the model itself.

A short prompt and a few decode steps of two rows go through a small pool, and every logit is compared with
mlx-lm's own one-sequence cache. The ways are tried from fast to general: handles (attention reads the pools),
materialized arrays, and materialized arrays one sequence at a time. A model that passes none is refused: a
wrong token is worse than no token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow
from headrace.errors import StartupError
from headrace.params import SamplingParams
from headrace.runner.kv_layout import ModelLayout
from headrace.runner.kv_pool import KVPool
from headrace.runner.logits_head import HeadSelector
from headrace.runner.mlx_lm_adapter import one_sequence_cache
from headrace.runner.model_runner import ModelRunner, RunnerOptions
from headrace.runner.pool_store import PoolStore

# Largest difference of a logit, as a share of the logits' spread, by bytes of the dtype.
TOLERANCE = {4: 0.01, 2: 0.08}
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Two rows of different lengths: prompts, and the tokens decoded after them."""

    prompts: tuple[tuple[int, ...], ...]
    decoded: tuple[tuple[int, ...], ...]


def choose_options(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    *,
    head_major: bool,
    wanted: RunnerOptions,
    store: PoolStore | None = None,
) -> RunnerOptions:
    """The first of the ways to run ``model`` that gives its own logits.

    Raises:
        StartupError: none does.
    """
    trial = _trial(vocab_size)
    expected = [_reference(model, selector, prompt, steps) for prompt, steps in _rows(trial)]
    faults: list[str] = []
    general = replace(wanted, materialize=True, compile=False, decode_kernel=False)
    for options in (
        wanted,
        general,
        replace(general, single_rows=True),
    ):
        try:
            got = _paged(model, selector, found, vocab_size, trial, head_major, options, store)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            faults.append(f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
            continue
        worst = max(_difference(a, b) for a, b in zip(expected, got, strict=True))
        if worst <= TOLERANCE.get(found.layers[0].dtype.size, 0.08):
            return options
        faults.append(f"logits differ by {worst:.3f} of their spread")
    raise StartupError(
        "this model cannot be run over a paged KV cache: its batched logits are not its own "
        f"({'; '.join(faults)}); use a model of another architecture"
    )


def _trial(vocab_size: int) -> _Trial:
    def tokens(first: int, count: int) -> tuple[int, ...]:
        return tuple((first + 7919 * i) % vocab_size for i in range(count))

    return _Trial((tokens(11, 9), tokens(5, 6)), (tokens(3, 3), tokens(8, 3)))


def _rows(trial: _Trial) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return list(zip(trial.prompts, trial.decoded, strict=True))


def _reference(
    model: nn.Module, selector: HeadSelector, prompt: tuple[int, ...], steps: tuple[int, ...]
) -> mx.array:
    """Logits ``[1 + len(steps), V]`` after the prompt and after each step, from mlx-lm's own cache."""
    selector.all_positions()
    cache = one_sequence_cache(model)
    logits = [model(mx.array([prompt]), cache=cache)[0, -1]]
    logits += [model(mx.array([[token]]), cache=cache)[0, -1] for token in steps]
    return mx.stack(logits).astype(mx.float32)


def _paged(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    trial: _Trial,
    head_major: bool,
    options: RunnerOptions,
    store: PoolStore | None,
) -> list[mx.array]:
    """The same logits through a small pool, with interleaved tables, a chunked prefill and batched decode."""
    layout = KVLayout(4, found.layout.groups)
    pool = KVPool(found.layers, [16] * len(layout.groups), 4, head_major=head_major, store=store)
    runner = ModelRunner(model, selector, pool, layout, vocab_size, options)
    tables = ((1, 5, 2), (4, 3, 7))
    logits: list[list[mx.array]] = [[], []]
    first = [_row(layout, tables, index, trial, 0, 4) for index in range(2)]
    rest = [_row(layout, tables, index, trial, 4, len(trial.prompts[index])) for index in range(2)]
    for rows in (first, rest):
        groups = [[row] for row in rows] if options.single_rows else [rows]
        found_logits = mx.concatenate([runner.prefill_logits(group) for group in groups])
        mx.eval(found_logits, pool.changes)
    for index in range(2):
        logits[index].append(found_logits[index])
    for step in range(len(trial.decoded[0])):
        ends = [len(prompt) + step + 1 for prompt in trial.prompts]
        decode = [_row(layout, tables, index, trial, end - 1, end) for index, end in enumerate(ends)]
        found_logits = runner.decode_logits(decode)
        mx.eval(found_logits, pool.changes)
        for index in range(2):
            logits[index].append(found_logits[index])
    return [mx.stack(row).astype(mx.float32) for row in logits]


def _row(
    layout: KVLayout, tables: tuple[tuple[int, ...], ...], index: int, trial: _Trial, start: int, end: int
) -> ScheduledRow:
    known = trial.prompts[index] + trial.decoded[index]
    return ScheduledRow(
        seq_id=index,
        start=start,
        num_tokens=end - start,
        token_ids=known[start:end],
        block_tables=tuple(tables[index][: -(-end // layout.block_size)] for _ in layout.groups),
        samples=True,
        sample_position=end,
        seed=0,
        params=_PARAMS,
        num_prompt_tokens=len(trial.prompts[index]),
    )


def _difference(expected: mx.array, got: mx.array) -> float:
    """Largest difference as a share of the spread of the expected logits; infinite when not finite."""
    spread = mx.max(expected) - mx.min(expected)
    worst = mx.max(mx.abs(expected - got)) / mx.maximum(spread, 1e-6)
    value = float(np.array(worst))
    return value if math.isfinite(value) else math.inf
