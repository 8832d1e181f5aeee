"""The native operations of the CPU (``native/cpu_operations.cpp``), where they can be built.

They share the threads of the products (``native/sgemm.cpp``) and are optional: without a compiler, Python's
headers or nanobind everything has a way through MLX's own operations.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, cast

import mlx.core as mx

from headrace.runner.kernels import native_extension
from headrace.runner.kernels.native_extension import Extension

log = logging.getLogger("headrace.runner")

_SOURCES = (
    "cpu_operations.cpp",
    "cpu_attention.cpp",
    "cpu_elementwise.cpp",
    "cpu_attention.h",
    "cpu_elementwise.h",
    "cpu_functions.h",
    "cpu_vectors.h",
)


class CpuOperations(Protocol):
    """The extension module."""

    def attend(
        self,
        queries: mx.array,
        tables: mx.array,
        bases: mx.array,
        offsets: mx.array,
        ends: mx.array,
        mark: mx.array,
        sinks: mx.array,
        pools: Sequence[mx.array],
        block_size: int,
        scale: float,
        window: int,
        softcap: float,
        bits: int,
        key_dim: int,
        value_dim: int,
        key_group: int,
        value_group: int,
    ) -> mx.array:
        """``[B, H, L, value_dim]`` of float32 ``queries [B, H, L, key_dim]``; 0 for no window, cap or bits."""

    def store(
        self, pools: Sequence[mx.array], rows: Sequence[mx.array], slots: mx.array, mark: mx.array
    ) -> mx.array:
        """Write ``rows[i] [B, heads, L, width]`` into ``pools[i] [heads, slots, width]``; the mark of it."""

    def norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        """RMS norm of float32 ``x [..., D]``."""

    def rotate(self, x: mx.array, cosine: mx.array, sine: mx.array) -> mx.array:
        """``[x1 * c - x2 * s | x1 * s + x2 * c]`` of float32 ``x [B, H, L, D]``; tables ``[B, 1, L, D / 2]``."""

    def gate(self, gate: mx.array, up: mx.array, gelu: bool) -> mx.array:
        """``silu(gate) * up``, or with tanh-GELU; float32 of one shape."""

    def functions(self) -> int:
        """Address of what ``native/cpu_functions.h`` names, for another extension."""

    def threads(self) -> int:
        """How many take part."""


def extension() -> Extension:
    """The operations, for this machine's processor."""
    return Extension("cpu_operations", _SOURCES, (*native_extension.own_processor(), "-ffp-contract=fast"))


def load_operations() -> CpuOperations | None:
    """The operations, built when they have not been; None, with one line in the log, where that cannot be."""
    try:
        module = native_extension.load(extension())
    except native_extension.ExtensionError as error:
        log.warning("no native operations of the CPU, attention is slower: %s", error)
        return None
    return cast(CpuOperations, module)
