"""Run every kind of step once before the worker is ready, so that no request waits for a compiler.

MLX traces a compiled function at its first call with new shapes, and on Linux CPU then starts a C++ compiler for
each fused loop; CUDA captures graphs. Rows point into the null block, so nothing that matters is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from headrace.config import EngineConfig
from headrace.core.layout import KVLayout
from headrace.core.memory_plan import MemoryPlan
from headrace.core.step import ScheduledRow, SchedulerOutput
from headrace.params import SamplingParams
from headrace.runner.attention.gathered_prefill import planned_shapes
from headrace.runner.kv.input_batch import bucket
from headrace.runner.model_runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=1, temperature=0.8, top_k=40, top_p=0.9, seed=1)
# Contexts up to this many tokens are traced before ready; longer buckets are traced when first met.
WARM_CONTEXT_TOKENS = 2048
# Steps of up to this many rows are also recorded before ready, where steps are; larger ones when they are met.
SETTLED_ROWS = 32


def warm_up(
    runner: ModelRunner,
    plan: MemoryPlan,
    layout: KVLayout,
    config: EngineConfig,
    progress: Callable[[str, float], None],
) -> float | None:
    """Execute one step per bucket of shapes, greedy and sampled; seconds per token of the quickest prompts."""
    quickest = math.inf
    steps = list(_steps(layout, runner, config, plan))
    for index, output in enumerate(steps):
        progress("warming up", index / len(steps))
        result = runner.launch(output).result()
        if output.prefill:
            tokens = sum(row.num_tokens for row in output.prefill)
            quickest = min(quickest, result.duration_s / tokens)
    runner.forget_except(set())
    return quickest if quickest < math.inf else None


def _steps(
    layout: KVLayout, runner: ModelRunner, config: EngineConfig, plan: MemoryPlan
) -> Iterator[SchedulerOutput]:
    longest = min(plan.max_model_len, WARM_CONTEXT_TOKENS)
    prompt = min(16, longest - 1)
    for params in (GREEDY, SAMPLED):
        yield SchedulerOutput(0, prefill=(_row(layout, 0, prompt, params),))
        yield SchedulerOutput(
            0, decode=tuple(_row(layout, 0, 1, params) for _ in range(min(2, config.max_num_seqs)))
        )
    for count, length in planned_shapes(min(config.prefill_step_size, longest - 1)):
        for _ in range(runner.prompts_to_settle):
            yield SchedulerOutput(0, prefill=tuple(_row(layout, 0, length, GREEDY) for _ in range(count)))
    if not runner.compiled:
        return
    blocks = range(1, -(-longest // layout.block_size) + 1)
    widths = sorted({runner.decode_width(count) for count in blocks})
    counts = sorted({bucket(count) for count in range(1, config.max_num_seqs + 1)})
    for count in reversed(counts):  # the smallest last: recorded steps that were used last stay longest
        repeat = runner.steps_to_settle if count <= SETTLED_ROWS else 1
        for width in widths:
            context = min(longest, width * layout.block_size) - 1
            rows = tuple(_row(layout, context, 1, GREEDY) for _ in range(count))
            for _ in range(repeat):
                yield SchedulerOutput(0, decode=rows)


def _row(layout: KVLayout, start: int, count: int, params: SamplingParams) -> ScheduledRow:
    blocks = -(-(start + count) // layout.block_size)
    return ScheduledRow(
        seq_id=-1,
        start=start,
        num_tokens=count,
        token_ids=(0,) * count,
        block_tables=((0,) * blocks,) * len(layout.groups),
        samples=True,
        sample_position=start + count,
        seed=0,
        params=params,
        num_prompt_tokens=start + count,
    )
