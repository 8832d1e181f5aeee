"""Decode steps recorded once per bucket of shapes and replayed: on CUDA the host then launches one graph a step.

Building a step through MLX costs the host some ten microseconds for each of its hundreds of operations, every
step, which is more than a GPU needs to run them. ``native/step_graph.cpp`` keeps the CUDA graph that MLX has built
for one step, and the buffers it touches; a replay copies new inputs into those buffers and launches it.

A bucket goes through four stages, a step each, so that what is seldom used costs nothing and nothing unchecked is
used: the first two steps run as ever (tracing, measuring kernels, filling caches), the third is recorded while it
runs, the fourth runs both ways and is compared bit for bit, and from then on steps are replayed. Running a step a
second time is harmless: it writes the same keys and values to the same slots.

Replayed kernels of our own begin while the ones before them end (``native/graph_overlap.h``).

A recording keeps all its intermediate arrays. Together they are bounded (the memory plan counts the bound); the
recording that was not used for the longest time goes first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.runner.device_arrays import MARK_SHAPE, on_device
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.kv.input_batch import HostInts

log = logging.getLogger("headrace.runner")

# Tokens, the host's integers, marks that writes come after -> logits, the marks of its writes.
Forward = Callable[[mx.array, Sequence[HostInts], list[mx.array]], tuple[mx.array, list[mx.array]]]
_Key = tuple[tuple[int, ...], ...]
# Tokens that a recorded step can be given, whatever number it was recorded with.
MOST_TOKENS = 4096
_RECORD_AT = 3
STEPS_TO_SETTLE = _RECORD_AT + 1


@dataclass(slots=True)
class _Bucket:
    """One bucket of shapes. ``graph``: its recording; ``nbytes``: what it keeps; ``trusted``: it was compared."""

    steps: int = 0
    graph: Any = None
    nbytes: int = 0
    trusted: bool = False
    refused: bool = False


class StepGraphs:
    """The recordings of one model's decode forward.

    Args:
        recorder: of the device.
        limit_bytes: what all recordings may keep together.

    Attributes:
        replayed: steps that were replayed so far.
    """

    def __init__(self, recorder: Recorder, limit_bytes: int) -> None:
        self._recorder = recorder
        self._native = recorder.native
        self._reader = self._native.Reader()
        self._limit_bytes = limit_bytes
        self._buckets: OrderedDict[_Key, _Bucket] = OrderedDict()
        self.replayed = 0

    def read(self, arrays: Sequence[mx.array]) -> list[np.ndarray]:
        """What evaluated arrays hold, the arrays left in the device's memory (see ``device_arrays.py``)."""
        data = self._reader.read(list(arrays))
        if data is None:
            return [np.array(array) for array in arrays]
        found, start = [], 0
        for array in arrays:
            dtype = np.dtype(str(array.dtype).rpartition(".")[2])
            found.append(np.frombuffer(data, dtype, array.size, start).reshape(array.shape))
            start += array.nbytes
        return found

    @property
    def nbytes(self) -> int:
        """What the recordings keep."""
        return sum(bucket.nbytes for bucket in self._buckets.values())

    def clear(self) -> None:
        """Forget all recordings; needed before anything they refer to (pools, weights) is replaced."""
        self._buckets.clear()

    def run(
        self, forward: Forward, tokens: mx.array, sent: Sequence[HostInts], marks: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """One step: ``forward(tokens, sent, marks)``, by replay where a recording is there.

        Args:
            forward: builds the step's operations; given more tokens, those behind matter to nothing.
            tokens: ``[S]`` int32, of the host or the device.
            sent: what the host sends along.
            marks: what the step's writes come after.

        Logits may be the recording's own array, which the next step of the same bucket writes again. They must be
        evaluated, with whatever else reads them, before that is.
        """
        if len(tokens) > MOST_TOKENS:
            return forward(tokens, sent, marks)
        key = tuple(ints.values.shape for ints in sent)
        bucket = self._buckets.setdefault(key, _Bucket())
        self._buckets.move_to_end(key)
        bucket.steps += 1
        if bucket.trusted:
            self.replayed += 1
            return self._replay(bucket, tokens, sent, marks)
        if bucket.refused or bucket.steps < _RECORD_AT:
            return forward(tokens, sent, marks)
        if bucket.graph is None:
            return self._record(bucket, forward, tokens, sent, marks)
        return self._compare(bucket, forward, tokens, sent, marks)

    def _replay(
        self, bucket: _Bucket, tokens: mx.array, sent: Sequence[HostInts], marks: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        after = list({id(mark): mark for mark in marks}.values())
        message = b"".join([ints.values.tobytes() for ints in sent])
        logits, mark = self._native.replay(bucket.graph, tokens, message, after)
        return logits, [mark] * len(marks)

    def _record(
        self,
        bucket: _Bucket,
        forward: Forward,
        tokens: mx.array,
        sent: Sequence[HostInts],
        marks: list[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        # Parts of longer arrays, and none that shared memory was recycled for: see device_arrays.py.
        mx.clear_cache()
        blank = mx.zeros(MOST_TOKENS + MARK_SHAPE[0] - len(tokens), mx.int32)
        fixed = on_device(mx.concatenate([tokens, blank]))[:MOST_TOKENS]
        flat = mx.array(np.concatenate([ints.values.reshape(-1) for ints in sent]))
        packed = on_device(mx.concatenate([flat, mx.zeros(MARK_SHAPE, mx.int32)]))
        ends = list(accumulate(ints.values.size for ints in sent))
        parts = [
            packed[end - ints.values.size : end].reshape(ints.values.shape)
            for ints, end in zip(sent, ends, strict=True)
        ]
        zero = mx.zeros(MARK_SHAPE, mx.int32)
        mx.eval(fixed, parts, zero, marks)
        before = mx.get_active_memory()
        inputs = [HostInts(ints.values, part) for ints, part in zip(sent, parts, strict=True)]

        def build() -> list[mx.array]:
            logits, after = forward(fixed, inputs, marks)
            return [logits, *after]

        graph, (logits, *after) = self._recorder.record(build)
        result = on_device(logits)
        try:
            if graph.error:
                raise RuntimeError(graph.error)
            graph.bind(fixed, packed, parts, [logits], zero)
        except RuntimeError as error:
            self._refuse(bucket, str(error))
        else:
            bucket.graph = graph
            bucket.nbytes = max(0, mx.get_active_memory() - before)
            self._make_room(bucket)
        return result, after

    def _compare(
        self,
        bucket: _Bucket,
        forward: Forward,
        tokens: mx.array,
        sent: Sequence[HostInts],
        marks: list[mx.array],
    ) -> tuple[mx.array, list[mx.array]]:
        logits, after = forward(tokens, sent, marks)
        mx.eval(logits, after)
        replayed, _ = self._replay(bucket, tokens, sent, after)
        if mx.array_equal(replayed, logits, equal_nan=True).item():
            bucket.trusted = True
            graph = bucket.graph
            log.debug(
                "decode step recorded: %d kernels, %d begin early, %d bytes; %s",
                graph.nodes, graph.early, bucket.nbytes, graph.refusal,
            )  # fmt: skip
        else:
            self._refuse(bucket, "its logits are not those of the step")
        return logits, after

    def _refuse(self, bucket: _Bucket, why: str) -> None:
        log.warning("a decode step is not replayed: %s", why)
        bucket.refused, bucket.graph, bucket.nbytes = True, None, 0

    def _make_room(self, newest: _Bucket) -> None:
        if newest.nbytes > self._limit_bytes:
            self._refuse(newest, f"its arrays take {newest.nbytes} bytes, {self._limit_bytes} are planned")
        for key, bucket in list(self._buckets.items()):
            if self.nbytes <= self._limit_bytes:
                return
            if bucket is not newest and bucket.graph is not None:
                del self._buckets[key]
