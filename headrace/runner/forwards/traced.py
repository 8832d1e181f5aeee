"""Forwards of the model over token-major pools, traced once per shapes and then rebuilt without Python.

Building a forward by the model's code takes Python tens of microseconds per operation, which is as much as a large
GPU needs for a short prompt. A decode forward has a few shapes (``kv/input_batch.py``). A prompt's forward is
traced on such a device (CUDA) and where nothing is before its chunks: then it needs nothing of the host's but
shapes, and those are on a grid (``prefill_length``); the traces that were used last are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.runner.device_arrays import split_on_device
from headrace.runner.forwards.logits_head import HeadSelector
from headrace.runner.kv.input_batch import HostInts
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.view import ForwardBatch, GroupBatch

# Traces of prompts that are kept; the host holds 5 KB for each of their few hundred operations.
MOST_PROMPTS = 48
# Prompts of one shape until its trace is used: tracing costs several forwards.
PROMPTS_TO_TRACE = 2

# Tokens [B, L], and where they live -> logits [B, positions, V].
Forward = Callable[[mx.array, ForwardBatch], mx.array]
_Shapes = tuple[tuple[int, ...], ...]


class TracedForwards:
    """The traced forwards of one model over one pool.

    Args:
        forward: the model's.
        selector: which positions its head computes logits for.
        pool: which the forward reads and writes.
        windows: of the layer groups.
    """

    def __init__(
        self, forward: Forward, selector: HeadSelector, pool: KVPool, windows: Sequence[int | None]
    ) -> None:
        self._forward = forward
        self._selector = selector
        self._pool = pool
        self._windows = tuple(windows)
        self._decode: Any = mx.compile(self._decode_over)
        # By shapes: prompts so far, and the traced forward.
        self._prompts: OrderedDict[_Shapes, tuple[int, Any]] = OrderedDict()

    def decode(
        self, tokens: mx.array, inputs: Sequence[HostInts], marks: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """Logits ``[B, V]`` of ``tokens [B]``, and what the forward changes in the pool.

        Args:
            tokens: int32.
            inputs: as ``InputBatchBuilder.decode_inputs`` gives them.
            marks: what its writes come after.
        """
        self._selector.all_positions()
        arrays = [ints.array for ints in inputs]
        logits, changes = self._decode(self._pool.state, marks, tokens, arrays)
        return logits, changes

    def prompt(self, inputs: Sequence[HostInts]) -> mx.array:
        """Logits ``[B, V]`` at each row's last position; nothing is before the rows. The pool holds the writes.

        ``inputs``: as ``InputBatchBuilder.prompt_inputs`` gives them.
        """
        forward = self._prompt_of(tuple(ints.values.shape for ints in inputs))
        message = mx.array(np.concatenate([ints.values.reshape(-1) for ints in inputs]))
        logits: mx.array
        logits, self._pool.changes = forward(self._pool.state, self._pool.marks, message)
        self._selector.all_positions()
        return logits

    def _prompt_of(self, shapes: _Shapes) -> Any:
        """The prompt's forward of these shapes, traced once there were enough of them."""
        forward = partial(self._prompt_over, shapes)
        prompts, traced = self._prompts.pop(shapes, (0, None))
        prompts += 1
        if traced is None and prompts >= PROMPTS_TO_TRACE:
            traced = mx.compile(forward)
        self._prompts[shapes] = prompts, traced
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)
        return traced or forward

    def _decode_over(
        self, state: list[mx.array], marks: list[mx.array], tokens: mx.array, inputs: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        return self._over(state, marks, tokens[:, None], self._batch(inputs))

    def _prompt_over(
        self, shapes: _Shapes, state: list[mx.array], marks: list[mx.array], message: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        tokens, last, *inputs = split_on_device(message, shapes)
        rows, length = tokens.shape
        # Pads are behind a row's end: they see what nobody reads, and write to the null block.
        batch = self._batch(inputs, starts=(0,) * rows, lengths=(length,) * rows)
        self._selector.take(last)
        return self._over(state, marks, tokens, batch)

    def _batch(
        self, inputs: Sequence[mx.array], starts: Sequence[int] = (), lengths: Sequence[int] = ()
    ) -> ForwardBatch:
        offsets, ends, *rest = inputs
        per_group = zip(rest[0::3], rest[1::3], rest[2::3], strict=True)
        groups = [
            GroupBatch(window, slots, tables=tables, bases=bases, firsts=starts)
            for window, (slots, tables, bases) in zip(self._windows, per_group, strict=True)
        ]
        return ForwardBatch(offsets=offsets, ends=ends, starts=starts, lengths=lengths, groups=groups)

    def _over(
        self, state: list[mx.array], marks: list[mx.array], tokens: mx.array, batch: ForwardBatch
    ) -> tuple[mx.array, list[mx.array]]:
        """The forward over ``state`` instead of the pool's arrays."""
        pool = self._pool
        kept, kept_marks = pool.state, pool.marks
        pool.state, pool.marks = state, list(marks)
        logits = self._forward(tokens, batch)
        if logits.shape[1] > 1:  # a model without a selective head
            logits = self._selector.select(logits)
        changes = pool.changes
        pool.state, pool.marks = kept, kept_marks
        return logits[:, 0], changes
