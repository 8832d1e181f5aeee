"""Drives a ModelRunner without the scheduler: scattered block tables, chunks, several rows, one step ahead."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow, SchedulerOutput, StepResult
from headrace.params import SamplingParams
from headrace.runner.attention.dispatch import install
from headrace.runner.forwards.logits_head import substitute_head
from headrace.runner.kv.layout import read_layout
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.store import Store
from headrace.runner.model_runner import ModelRunner, RunnerOptions
from headrace.runner.sampling.kernel import SamplingKernel


def reference_tokens(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens from mlx-lm's own one-sequence cache."""
    cache = make_prompt_cache(model)
    logits = model(mx.array([prompt]), cache=cache)[:, -1]
    tokens = []
    for _ in range(count):
        token = int(mx.argmax(logits[0]).item())
        tokens.append(token)
        logits = model(mx.array([[token]]), cache=cache)[:, -1]
    return tokens


def make_runner(
    model: nn.Module,
    *,
    vocab_size: int,
    num_blocks: int = 400,
    block_size: int = 4,
    head_major: bool = True,
    options: RunnerOptions | None = None,
    kv_cache_dtype: str = "auto",
    sampling: SamplingKernel | None = None,
    store: Store | None = None,
) -> tuple[ModelRunner, KVLayout]:
    """A runner over ``model``, which gets a selective head."""
    install()
    found = read_layout(model, block_size, kv_cache_dtype)
    selector, _ = substitute_head(model)
    blocks = [num_blocks] * len(found.layout.groups)
    pool = KVPool(found.layers, blocks, block_size, head_major=head_major, store=store)
    options = options or RunnerOptions(compile=False)
    runner = ModelRunner(model, selector, pool, found.layout, vocab_size, options, sampling=sampling)
    return runner, found.layout


@dataclass
class Sequence:
    seq_id: int
    prompt: list[int]
    params: SamplingParams
    tables: tuple[tuple[int, ...], ...]
    computed: int = 0
    output: list[int] = field(default_factory=list)
    in_flight: int = 0


class Driver:
    """Plays scheduler for a fixed set of sequences."""

    def __init__(self, runner: ModelRunner, layout: KVLayout, num_blocks: int, *, seed: int = 0) -> None:
        self.runner = runner
        self.layout = layout
        self.random = random.Random(seed)
        self.free = [self.random.sample(range(1, num_blocks), num_blocks - 1) for _ in layout.groups]
        self.sequences: list[Sequence] = []
        self.step_id = 0

    def add(self, prompt: list[int], params: SamplingParams, *, scattered: bool = True) -> Sequence:
        total = len(prompt) + params.max_tokens
        count = -(-total // self.layout.block_size)
        tables = []
        for free in self.free:
            taken = [free.pop() for _ in range(count)]
            tables.append(tuple(taken if scattered else sorted(taken)))
        sequence = Sequence(len(self.sequences), prompt, params, tuple(tables))
        self.sequences.append(sequence)
        return sequence

    def row(self, sequence: Sequence, count: int) -> ScheduledRow:
        known = sequence.prompt + sequence.output
        start = sequence.computed
        end = start + count
        size = self.layout.block_size
        return ScheduledRow(
            seq_id=sequence.seq_id,
            start=start,
            num_tokens=count,
            token_ids=tuple(known[start:end]),
            block_tables=tuple(table[: -(-end // size)] for table in sequence.tables),
            samples=end == len(known) + sequence.in_flight,
            sample_position=end,
            seed=sequence.params.seed,
            params=sequence.params,
            num_prompt_tokens=len(sequence.prompt),
            history=tuple(known) if sequence.params.uses_history else (),
        )

    def run(self, chunk: int, *, prefill_rows: int = 2) -> list[list[int]]:
        """Run everything to its max_tokens, launching one step ahead; the outputs in order."""
        handle = None
        while True:
            output = self._schedule(chunk, prefill_rows)
            launched = None if output.is_empty else self.runner.launch(output)
            if handle is not None:
                self._update(handle.result())
            handle = launched
            if handle is None and self._schedule(chunk, prefill_rows, dry=True).is_empty:
                return [sequence.output for sequence in self.sequences]

    def _schedule(self, chunk: int, prefill_rows: int, *, dry: bool = False) -> SchedulerOutput:
        decode, prefill = [], []
        for sequence in self.sequences:
            known = len(sequence.prompt) + len(sequence.output) + sequence.in_flight
            left = known - sequence.computed
            if len(sequence.output) + sequence.in_flight >= sequence.params.max_tokens or left == 0:
                continue
            if left == 1:
                decode.append(self.row(sequence, 1))
            elif len(prefill) < prefill_rows:
                prefill.append(self.row(sequence, min(left, self.random.randint(1, chunk))))
        if not dry:
            for row in (*decode, *prefill):
                sequence = self.sequences[row.seq_id]
                sequence.computed += row.num_tokens
                sequence.in_flight += int(row.samples)
        self.step_id += 1
        return SchedulerOutput(self.step_id, tuple(decode), tuple(prefill))

    def _update(self, result: StepResult) -> None:
        assert not result.failed
        for seq_id, token in result.sampled.items():
            sequence = self.sequences[seq_id]
            sequence.output.append(token.token_id)
            sequence.in_flight -= 1
