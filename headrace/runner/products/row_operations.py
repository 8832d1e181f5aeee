"""What is done to rows before and after a library product: RMS norm and SiLU gate, by MLX or by CUDA kernels.

In a replayed step a kernel of our own begins while the one before it ends (``forwards/step_graphs.py``); MLX's own
cannot.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.runner.kernels.language import cuda_kernel
from headrace.runner.products import row_operations_source as source

KINDS = (mx.bfloat16, mx.float16)
_VECTOR = 8
_NORM_WARPS = 16
_GATE_WARPS = 8
# Vectors of a row that one thread holds.
_MOST_CHUNKS = 8


class RowOperations:
    """MLX's operations."""

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        """``x [..., K]`` over the root of its rows' mean squares, times ``weight [K]``."""
        return mx.fast.rms_norm(x, weight, eps)

    def silu_gate(self, both: mx.array) -> mx.array:
        """``[M, 2 H]`` -> ``[M, H]``: SiLU(first half) * second half."""
        half = both.shape[1] // 2
        gated: mx.array = nn.silu(both[:, :half]) * both[:, half:]
        return gated


MLX_ROWS = RowOperations()


class RowKernels(RowOperations):
    """CUDA kernels, for 16-bit rows of whole vectors; MLX's operations for others."""

    def __init__(self) -> None:
        self._norm = cuda_kernel(
            name="row_norm",
            input_names=["x", "weight"],
            output_names=["y"],
            source=source.NORM_BODY,
            header=source.VECTORS,
        )
        self._gate = cuda_kernel(
            name="row_gate",
            input_names=["both"],
            output_names=["y"],
            source=source.GATE_BODY,
            header=source.VECTORS,
        )

    @staticmethod
    def for_device() -> RowOperations:
        """The kernels on a CUDA device, MLX's operations elsewhere."""
        if mx.default_device() != mx.gpu or mx.metal.is_available():
            return MLX_ROWS
        return RowKernels()

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        width = weight.size
        warps = min(_NORM_WARPS, -(-width // (_VECTOR * 32)))
        chunks = -(-width // (_VECTOR * 32 * warps))
        if x.dtype not in KINDS or weight.dtype != x.dtype or width % _VECTOR or chunks > _MOST_CHUNKS:
            return super().rms_norm(x, weight, eps)
        return self._run(
            self._norm,
            [x, weight],
            [("W", warps), ("CHUNKS", chunks), ("EPS", int(np.float32(eps).view(np.int32)))],
            (x.size // width * warps * 32, 1, 1),
            x.shape,
        )

    def silu_gate(self, both: mx.array) -> mx.array:
        rows, half = both.shape[0], both.shape[1] // 2
        if both.dtype not in KINDS or half % _VECTOR:
            return super().silu_gate(both)
        blocks = -(-half // (_VECTOR * 32 * _GATE_WARPS))
        return self._run(
            self._gate, [both], [("W", _GATE_WARPS)], (blocks * _GATE_WARPS * 32, rows, 1), (rows, half)
        )

    @staticmethod
    def _run(
        kernel: Any,
        inputs: list[mx.array],
        constants: list[tuple[str, int]],
        grid: tuple[int, int, int],
        shape: tuple[int, ...],
    ) -> mx.array:
        dtype = inputs[0].dtype
        y: mx.array = kernel(
            inputs=inputs,
            template=[("T", dtype), *constants],
            grid=grid,
            threadgroup=(dict(constants)["W"] * 32, 1, 1),
            output_shapes=[shape],
            output_dtypes=[dtype],
        )[0]
        return y
