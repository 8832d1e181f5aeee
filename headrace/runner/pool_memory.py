"""What the device side does about memory pressure: give freed buffers back, and put the pools into other arrays.

A resize works layer by layer, K and V one after the other, each evaluated and its old array dropped before the
next one is made, so that the peak is one array. Freed memory goes back to the system, not into a cache.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence

import mlx.core as mx

from headrace.core.layout import KVLayout
from headrace.core.machine import read_memory
from headrace.core.pressure import PressureThresholds
from headrace.runner.model_runner import ModelRunner


class PoolMemory:
    """Implements ``headrace.worker.memory_watch.PoolMemory`` for a runner whose pools share the machine's memory.

    Args:
        runner: whose pools are resized.
        layout: of those pools.
        planned: usable blocks per layer group, by the memory plan.
        cache_limit: bytes of freed buffers that may be kept in good times.
        thresholds: free memory of the machine below which something is given back.
    """

    def __init__(
        self,
        runner: ModelRunner,
        layout: KVLayout,
        planned: tuple[int, ...],
        cache_limit: int,
        thresholds: PressureThresholds,
    ) -> None:
        self._runner = runner
        self._cache_limit = cache_limit
        self.planned = planned
        self.thresholds = thresholds
        self.block_bytes = tuple(layout.block_bytes(group) for group in range(len(layout.groups)))

    def available(self) -> int:
        return read_memory().available_bytes

    def keep_buffers(self, keep: bool) -> None:
        mx.set_cache_limit(self._cache_limit if keep else 0)
        if not keep:
            give_back()

    def resize(self, num_blocks: Sequence[int], moves: Sequence[Mapping[int, int]]) -> None:
        self._runner.resize_pools(num_blocks, moves)
        give_back()


def give_back() -> None:
    """Return freed buffers to the system: MLX's own, then what the C library keeps of them."""
    mx.clear_cache()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
        if trim is not None:
            trim(0)
