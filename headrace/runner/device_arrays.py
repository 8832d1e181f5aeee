"""Small arrays that kernels read, in the GPU's own memory.

MLX puts an array that the host made into memory that host and GPU share, and so whatever has at most eight bytes.
On CUDA a kernel that reads such memory waits for it, every time: with constants of eight bytes an attention kernel
of 5 us took 27 (one H200). So constants are made by an operation of the device, padded, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn

# Elements of four bytes below which MLX would take shared memory, doubled.
LEAST_ELEMENTS = 4
# Marks of writes (``kv/store.py``) carry no data; they are this long so that no kernel writes shared memory.
MARK_SHAPE = (LEAST_ELEMENTS,)
# Parameters up to this size are copied at load.
_SMALL_BYTES = 1 << 20


def on_device(array: mx.array) -> mx.array:
    """A copy that an operation of the default device has made, evaluated."""
    copy = array + mx.zeros_like(array)
    mx.eval(copy)
    return copy


def sent_together(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Int32 arrays of the host as parts of one array that an operation of the device makes; lazy."""
    flat = mx.concatenate([*(array.reshape(-1) for array in arrays), mx.zeros(MARK_SHAPE, mx.int32)])
    return _parts(flat, [array.shape for array in arrays])


def split_on_device(message: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    """Parts of these shapes of an int32 ``message`` of the host that an operation of the device copies; lazy."""
    return _parts(mx.concatenate([message, mx.zeros(MARK_SHAPE, mx.int32)]), shapes)


def _parts(flat: mx.array, shapes: Sequence[tuple[int, ...]]) -> list[mx.array]:
    sizes = [math.prod(shape) for shape in shapes]
    ends = accumulate(sizes)
    return [flat[end - size : end].reshape(shape) for size, end, shape in zip(sizes, ends, shapes, strict=True)]


class DeviceConstants:
    """Constants of kernels, each made once; make one per kernel and keep it."""

    def __init__(self) -> None:
        self._made: dict[tuple[mx.Dtype, tuple[float, ...]], mx.array] = {}

    def get(self, values: Sequence[float], dtype: mx.Dtype) -> mx.array:
        """``values`` as an array of at least ``LEAST_ELEMENTS``, zeros behind them."""
        key = dtype, tuple(values)
        if key not in self._made:
            padded = [*values, *[0] * (LEAST_ELEMENTS - len(values))]
            self._made[key] = on_device(mx.array(padded, dtype))
        return self._made[key]


def settle_small_parameters(model: nn.Module) -> None:
    """Copy small parameters, which were read from files by the host, into the device's memory."""

    def settled(parameter: mx.array) -> mx.array:
        return on_device(parameter) if 0 < parameter.nbytes <= _SMALL_BYTES else parameter

    model.apply(settled)
