"""Whether this device samples by kernels of our own: they must choose the tokens that MLX's operations choose, at
no higher cost. Decided at start, on logits that are made up, for the model's vocabulary."""

from __future__ import annotations

import logging
from functools import partial
from itertools import product

import mlx.core as mx
import numpy as np

from headrace.runner.kernel_language import compile_ahead
from headrace.runner.sampler import sample
from headrace.runner.sampling_batch import RandomRows, SamplingBatch, Truncation, random_key
from headrace.runner.sampling_kernel import BATCH_KINDS, SamplingKernel, batch_kind
from headrace.runner.timing import no_slower

log = logging.getLogger("headrace.runner")

# Temperature, top_k, top_p, min_p; 0, 2 and 0 are off. Every top_p with every top_k, flat rows and steep ones.
_GRID = [
    (temperature, top_k, top_p, min_p)
    for (temperature, min_p), top_k, top_p in product(
        ((0.7, 0.0), (1.5, 0.02), (4.0, 0.0)), (0, 1, 40, 2000), (0.1, 0.95, 2.0)
    )
]
TIMED_ROWS = 8


def choose_sampling(
    vocab: int, dtype: mx.Dtype = mx.float32, kernel: SamplingKernel | None = None
) -> SamplingKernel | None:
    """The default device's kernels for logits ``[R, vocab]``; None where MLX's operations sample.

    Args:
        vocab: width of the logits.
        dtype: of a model's logits; checked as float32, which edited and recorded ones are.
        kernel: other kernels than the device's own.
    """
    kernel = kernel or SamplingKernel.for_device()
    if kernel is None:
        return None
    try:
        logits = _logits(len(_GRID), vocab)
        if not kernel.takes(logits, None):
            return None
        compile_ahead(lambda: [kernel(logits.astype(kind), None) for kind in {mx.float32, dtype}])
        fault = first_fault(kernel, logits)
        if fault is None:
            kernel.used_for = frozenset(_gaining(kernel, logits[:TIMED_ROWS]))
    except Exception as error:
        # Whatever a compiler or driver says about a kernel, MLX's operations can serve.
        fault = (str(error).splitlines() or [type(error).__name__])[0][:160]
    if fault is not None:
        log.warning("sampling by MLX's operations: %s", fault)
        return None
    log.info("sampling by own kernels: %s", ", ".join(sorted(kernel.used_for)) or "none is quicker")
    return kernel if kernel.used_for else None


def first_fault(kernel: SamplingKernel, logits: mx.array) -> str | None:
    """The first kind of batch for which the kernels choose another token than MLX's operations do."""
    for kind in BATCH_KINDS:
        batch = batch_of(kind, logits.shape[0], logits.shape[1])
        mine = sample(logits, batch, own=kernel)
        usual = sample(logits, batch)
        differing = int(np.array((mine.tokens != usual.tokens) | (mine.finite != usual.finite)).sum())
        if differing:
            return f"{differing} of {logits.shape[0]} {kind} rows differ"
    return None


def batch_of(kind: str, rows: int, vocab: int) -> SamplingBatch:
    """A batch of one kind: the grid's parameters in turn."""
    if kind == "greedy":
        return SamplingBatch()
    asked = [_GRID[row % len(_GRID)] for row in range(rows)]
    keys = np.array([random_key(row, 7) for row in range(rows)], np.uint32)
    truncation = Truncation(
        np.array([min(k, vocab) or vocab for _, k, _, _ in asked], np.int32),
        np.array([p for _, _, p, _ in asked], np.float32),
        np.array([p for _, _, _, p in asked], np.float32),
        bounded=False,
    )
    temperatures = np.array([temperature for temperature, *_ in asked], np.float32)
    given = truncation if kind == "truncated" else None
    return SamplingBatch(random=RandomRows(None, temperatures, keys[:, 0], keys[:, 1], given))


def _logits(rows: int, vocab: int) -> mx.array:
    logits = mx.random.normal((rows, vocab), key=mx.random.key(11)) * 3
    mx.eval(logits)
    return logits


def _gaining(kernel: SamplingKernel, logits: mx.array) -> list[str]:
    """Kinds of batches for which the kernels are no slower."""
    found = []
    for kind in BATCH_KINDS:
        batch = batch_of(kind, *logits.shape)

        def run(own: SamplingKernel | None, batch: SamplingBatch = batch) -> mx.array:
            return sample(logits, batch, own=own).tokens

        if no_slower(partial(run, kernel), partial(run, None)):
            found.append(batch_kind(batch.random))
    return found
