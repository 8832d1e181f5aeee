"""What a model that computes attention itself holds of one layer: measured, or estimated without its weights.

Measured: a forward of one query over a long context whose blocks are all the same one, and one of a few more
queries; the context is long enough that everything else disappears beside it. MLX holds more or less of it from
run to run, so the most of some runs counts, with a margin.
"""

from __future__ import annotations

import gc

import mlx.core as mx
import mlx.nn as nn

from headrace.core.context_scratch import ContextCost
from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.attention.dispatch import install
from headrace.runner.forwards.logits_head import HeadSelector
from headrace.runner.kv.input_batch import InputBatchBuilder, bucket
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.view import LayerView
from headrace.runner.model_runner import ModelRunner, RunnerOptions

_CONTEXT, _QUERIES, _RUNS = 2048, 17, 3
_MARGIN = 1.25
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


def measure_context_cost(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    options: RunnerOptions,
    *,
    head_major: bool,
) -> ContextCost:
    """By the peaks of forwards over contexts of up to ``_CONTEXT`` positions."""
    size = found.layout.block_size
    windows = [group.window for group in found.layout.groups]
    pool = KVPool(found.layers, [2] * len(windows), size, head_major=head_major)
    runner = ModelRunner(model, selector, pool, found.layout, vocab_size, options)

    def peak(context: int, queries: int) -> int:
        row = _row(context - queries, queries, size, len(windows))
        most = 0
        for _ in range(_RUNS):
            gc.collect()
            mx.clear_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            mx.eval(runner.prefill_logits([row]), pool.changes)
            most = max(most, mx.get_peak_memory() - before)
        return most

    seen = max(_CONTEXT if window is None else min(_CONTEXT, window) for window in windows)
    if not head_major:
        seen = bucket(-(-seen // size)) * size
    nothing, one, several = peak(_QUERIES, 1), peak(_CONTEXT, 1), peak(_CONTEXT, _QUERIES)
    context = max(_least_bytes(found.layers), (one - nothing) / seen)
    query = max(1.0, (several - one) / (seen * (_QUERIES - 1)))
    return ContextCost(int(_MARGIN * context), int(_MARGIN * query) + 1)


def estimate_context_cost(found: ModelLayout, num_heads: int) -> ContextCost:
    """Twice what is copied, and per query and head two scores or weights, and the mask."""
    dtype_bytes = max(layer.dtype.size for layer in found.layers)
    return ContextCost(int(_MARGIN * _least_bytes(found.layers)), int(_MARGIN * (2 * dtype_bytes * num_heads + 2)))


def _least_bytes(layers: tuple[LayerShape, ...]) -> int:
    """Of one position, padded and as the rows' arrays, keys and values."""
    return max(2 * layer.kv_heads * (layer.key_dim + layer.value_dim) * layer.dtype.size for layer in layers)


def computes_own_attention(model: nn.Module, found: ModelLayout) -> bool:
    """Whether the model's code does arithmetic on keys itself; nothing is evaluated, weights may be missing."""
    install()
    pool = KVPool(found.layers, [2] * len(found.layout.groups), found.layout.block_size, head_major=True)
    batch = InputBatchBuilder(found.layout, slices=True).build([_row(0, 2, 2, len(found.layout.groups))], 2)
    try:
        model(mx.zeros((1, 2), mx.int32), cache=[LayerView(pool, i, batch) for i in range(len(found.layers))])
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return True
    return False


def _row(start: int, count: int, block_size: int, num_groups: int) -> ScheduledRow:
    """``count`` queries behind ``start`` positions, all in the first block."""
    return ScheduledRow(
        seq_id=-1,
        start=start,
        num_tokens=count,
        token_ids=(0,) * count,
        block_tables=((1,) * -(-(start + count) // block_size),) * num_groups,
        samples=True,
        sample_position=start + count,
        seed=0,
        params=_PARAMS,
        num_prompt_tokens=start + count,
    )
