"""How much device memory a step needs beyond weights and pools: measured, not guessed.

A prefill chunk is run over a pool of a few blocks (what is in them does not matter) and MLX's peak is read. The
largest chunk is run where that takes moments (GPU, small models); else two smaller ones are, and the largest is
extrapolated on the line through them.

On the CPU arrays are freed by the thread that computes. A peak is as high as it gets when MLX runs ahead of that
thread, as it does in any large chunk; in one of a few milliseconds, on a busy machine, it may not, and a third of
the peak is found. So chunks are chosen that take a while, each is tried thrice, and the steepest line counts.

The sampler's rows of logits are added by formula. Attention's scratch is a line of its own in the memory plan
(``attention/reference.py``); a chunk's peak has some of it too.
"""

from __future__ import annotations

import gc
import time

import mlx.core as mx

from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.forwards.logits_head import HeadSelector
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.store import Store
from headrace.runner.model_runner import ModelRunner, RunnerOptions

# On the CPU: tokens whose time is taken, of the larger chunk at least, and seconds it is to take.
_TIMED_TOKENS = 32
_LEAST_TOKENS = 96
_CHUNK_S = 0.3
_TRIES = 3
_SLOW_S = 1.0  # for the timed tokens: from here on each operation takes long
# float32 arrays of [rows, vocabulary] alive at once while rows are sampled with noise and truncation.
_SAMPLER_ARRAYS = 5
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


def measure_activation_bytes(
    model: object,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    options: RunnerOptions,
    *,
    head_major: bool,
    chunk: int,
    max_rows: int,
    store: Store | None = None,
) -> int:
    """Peak bytes of a step with a prefill chunk of ``chunk`` tokens and ``max_rows`` sampled rows."""
    layout = found.layout
    pool = KVPool(found.layers, [2] * len(layout.groups), layout.block_size, head_major=head_major, store=store)
    runner = ModelRunner(model, selector, pool, layout, vocab_size, options)
    forward = (_cpu_peak if head_major else _peak)(runner, pool, layout, chunk)
    return forward + sampler_bytes(vocab_size, max_rows)


def _cpu_peak(runner: ModelRunner, pool: KVPool, layout: KVLayout, chunk: int) -> int:
    """``_peak`` of a chunk, from smaller ones where it would take long."""
    began = time.perf_counter()
    _peak(runner, pool, layout, _TIMED_TOKENS)
    seconds = time.perf_counter() - began
    tries = 1 if seconds > _SLOW_S else _TRIES
    large = max(_LEAST_TOKENS, int(_TIMED_TOKENS * _CHUNK_S / seconds))
    if large >= chunk:
        return max(_peak(runner, pool, layout, chunk) for _ in range(tries))
    small = large // 3
    peaks = [(_peak(runner, pool, layout, small), _peak(runner, pool, layout, large)) for _ in range(tries)]
    low, high = min(low for low, _ in peaks), max(high for _, high in peaks)
    slope = max(0.0, (high - low) / (large - small))
    return int(low + slope * (chunk - small))


def sampler_bytes(vocab_size: int, max_rows: int) -> int:
    """Of the rows of logits that are alive at once."""
    return _SAMPLER_ARRAYS * 4 * max_rows * vocab_size


def _peak(runner: ModelRunner, pool: KVPool, layout: KVLayout, chunk: int) -> int:
    """Bytes by which a prefill of ``chunk`` tokens raises the peak."""
    blocks = -(-chunk // layout.block_size)
    row = ScheduledRow(
        seq_id=-1,
        start=0,
        num_tokens=chunk,
        token_ids=(0,) * chunk,
        block_tables=((1,) * blocks,) * len(layout.groups),
        samples=True,
        sample_position=chunk,
        seed=0,
        params=_PARAMS,
        num_prompt_tokens=chunk,
    )
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(runner.prefill_logits([row]), pool.changes)
    return max(0, mx.get_peak_memory() - before)
