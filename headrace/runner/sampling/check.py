"""Whether this device samples by kernels of our own: their tokens must be those of the definition. Decided at
start, on logits that are made up, for the model's vocabulary.

The definition is computed on the host. MLX's own operations are not asked, nor is time taken beside them: most of
them would be compiled for that alone, tens of seconds of a first start. They are several passes and a sort where
the kernels read the logits once or twice; ``tests/runner/gpu_sampling.py`` times both.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np

from headrace.errors import one_line
from headrace.runner.kernels.language import compile_ahead
from headrace.runner.sampling.batch import SamplingBatch, random_key
from headrace.runner.sampling.definition import Asked, fault, random_rows
from headrace.runner.sampling.kernel import SamplingKernel
from headrace.runner.sampling.sampler import sample

log = logging.getLogger("headrace.runner")

# Every top_p with every top_k, flat rows and steep ones.
_GRID = [
    Asked(temperature, top_k, top_p, min_p)
    for (temperature, min_p), top_k, top_p in product(
        ((0.7, 0.0), (1.5, 0.02), (4.0, 0.0)), (0, 1, 40, 2000), (0.1, 0.95, 1.0)
    )
]
# By the costliest row.
BATCH_KINDS = ("greedy", "random", "truncated")


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
        logits = mx.random.normal((len(_GRID), vocab), key=mx.random.key(11)) * 3
        if not kernel.takes(logits):
            return None
        compile_ahead(lambda: [kernel(logits.astype(kind), None) for kind in {mx.float32, dtype}])
        found = first_fault(kernel, logits)
    except Exception as error:
        # Whatever a compiler or driver says about a kernel, MLX's operations can serve.
        found = one_line(error)
    if found is not None:
        log.warning("sampling by MLX's operations: %s", found)
        return None
    log.info("sampling by own kernels")
    return kernel


def first_fault(kernel: SamplingKernel, logits: mx.array) -> str | None:
    """The first row of float32 ``logits [R, V]`` whose token is not the definition's, of any kind of batch."""
    read = np.array(logits)
    for kind in BATCH_KINDS:
        asked = asked_of(kind, logits.shape[0])
        drawn = sample(logits, SamplingBatch(random_rows(asked, logits.shape[1])), own=kernel)
        tokens, finite = np.array(drawn.tokens).tolist(), np.array(drawn.finite).tolist()
        for row, (one, token) in enumerate(zip(asked, tokens, strict=True)):
            found = fault(read[row], one, token) if finite[row] else "said not to be finite"
            if found is not None:
                return f"{kind} rows differ: {found}"
    return None


def asked_of(kind: str, rows: int) -> list[Asked]:
    """Rows of one kind of batch: the grid's parameters in turn."""
    if kind == "greedy":
        return [Asked(temperature=0.0)] * rows
    made = []
    for row in range(rows):
        add, multiply = random_key(row, 7)
        one = replace(_GRID[row % len(_GRID)], add=add, multiply=multiply)
        made.append(one if kind == "truncated" else Asked(one.temperature, add=add, multiply=multiply))
    return made
