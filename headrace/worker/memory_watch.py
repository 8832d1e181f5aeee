"""Between steps: is the machine short of memory, and what is done about it (``headrace.core.pressure``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from headrace.core.pressure import LEVELS, Measures, PressureControl, PressureThresholds
from headrace.core.scheduler import Scheduler

CHECK_EVERY_S = 0.5
CHECK_IDLE_S = 1.0

log = logging.getLogger("headrace.worker")


class PoolMemory(Protocol):
    """The device side of memory pressure.

    Attributes:
        thresholds: of free memory.
        planned: usable blocks per layer group, by the memory plan.
        block_bytes: of one block of each group.
    """

    thresholds: PressureThresholds
    planned: tuple[int, ...]
    block_bytes: tuple[int, ...]

    def available(self) -> int:
        """Free memory of the machine in bytes."""
        ...

    def keep_buffers(self, keep: bool) -> None:
        """Whether freed buffers are kept for reuse; False also gives back those that are kept."""
        ...

    def resize(self, num_blocks: Sequence[int], moves: Sequence[Mapping[int, int]]) -> None:
        """Put the pools into arrays of ``num_blocks`` usable blocks, blocks copied by ``moves`` per group."""
        ...


class MemoryWatch:
    """Asks the policy and obeys it. Main thread only."""

    def __init__(
        self, memory: PoolMemory, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._clock = clock
        self._control = PressureControl(memory.thresholds)
        self._keeps = True
        self._due = 0.0
        self.available_bytes = memory.available()

    @property
    def level(self) -> str:
        return LEVELS[self._control.level]

    def check(self) -> tuple[int, ...] | None:
        """Look, when it is time to. Returns sizes for ``resize``, which wants no step outstanding; None: none."""
        now = self._clock()
        if now < self._due:
            return None
        self._due = now + CHECK_EVERY_S
        self.available_bytes = self._memory.available()
        before, sizes = self._control.level, self._scheduler.pool_sizes
        measures = self._control.update(
            self.available_bytes, now, self._bytes(sizes), self._bytes(self._memory.planned)
        )
        if measures.level != before:
            log.warning(
                "memory pressure: %s",
                LEVELS[measures.level],
                extra={"available_bytes": self.available_bytes, "pool_bytes": self._bytes(sizes)},
            )
        return self._obey(measures, sizes)

    def _obey(self, measures: Measures, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
        if measures.keep_buffers != self._keeps:
            self._keeps = measures.keep_buffers
            self._memory.keep_buffers(self._keeps)
        self._scheduler.set_admission(measures.admit)
        if measures.preempt:
            self._scheduler.preempt_last()
        wanted = self._sizes(sizes, measures.resize_bytes)
        return wanted if wanted != sizes else None

    def resize(self, sizes: tuple[int, ...]) -> None:
        """Have pools of these sizes, or the nearest that what is held by now allows."""
        smallest = self._scheduler.smallest_pools()
        sizes = tuple(map(max, sizes, smallest))
        self._memory.resize(sizes, self._scheduler.resize_pools(sizes))
        log.warning("KV pool resized", extra={"blocks": list(sizes), "pool_bytes": self._bytes(sizes)})

    def _sizes(self, sizes: tuple[int, ...], delta_bytes: int) -> tuple[int, ...]:
        """Pools larger or smaller by about ``delta_bytes``, in proportion to what each may lose or regain."""
        smallest, planned = self._scheduler.smallest_pools(), self._memory.planned
        limits = planned if delta_bytes > 0 else smallest
        room = [abs(limit - size) for limit, size in zip(limits, sizes, strict=True)]
        room_bytes = sum(map(int.__mul__, room, self._memory.block_bytes))
        share = min(1.0, abs(delta_bytes) / room_bytes) if room_bytes else 0.0
        sign = 1 if delta_bytes > 0 else -1
        return tuple(size + sign * round(blocks * share) for size, blocks in zip(sizes, room, strict=True))

    def _bytes(self, sizes: tuple[int, ...]) -> int:
        return sum(map(int.__mul__, sizes, self._memory.block_bytes))
