"""Free blocks as maximal runs of consecutive ids, so that a sequence's blocks can lie side by side.

The CPU attention reads consecutive blocks as one slice, without a gather. Every maximal run of free blocks is
known by its first and by its last block (boundary tags), so that taking a run's front and merging a freed block
with its neighbours cost O(1); a heap with stale entries finds the longest run in O(log n) amortized.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator


class FreeRuns:
    """The free blocks of one pool, ids 1 … num_blocks; all of them at first, or those of ``free``."""

    def __init__(self, num_blocks: int, free: Iterable[int] | None = None) -> None:
        self._length = [0] * (num_blocks + 2)  # at a run's first block: its length, elsewhere 0
        self._first = [0] * (num_blocks + 2)  # at a run's last block: its first block
        self._is_free = bytearray(num_blocks + 2)
        self._heap: list[tuple[int, int]] = []  # (-length, first block); stale where the lengths disagree
        self.count = 0
        if free is not None:
            for block in free:
                self.add(block)
        elif num_blocks:
            self._is_free[1 : num_blocks + 1] = b"\x01" * num_blocks
            self.count = num_blocks
            self._set_run(1, num_blocks)

    def __contains__(self, block: int) -> bool:
        return bool(self._is_free[block])

    def __iter__(self) -> Iterator[int]:
        return (block for block, free in enumerate(self._is_free) if free)

    def add(self, block: int) -> None:
        """Make a block free; it must not be free already."""
        first, length = block, 1
        if self._is_free[block - 1]:
            first = self._first[block - 1]
            length += self._length[first]
        if self._is_free[block + 1]:
            length += self._length[block + 1]
            self._length[block + 1] = 0
        self._is_free[block] = 1
        self.count += 1
        self._set_run(first, length)

    def longest(self) -> tuple[int, int]:
        """First block and length of a longest run; there must be a free block."""
        while True:
            negative_length, first = self._heap[0]
            if self._length[first] == -negative_length:
                return first, -negative_length
            heapq.heappop(self._heap)

    def take(self, first: int, skip: int, count: int) -> range:
        """Take ``count`` blocks of the run that begins at ``first``, after its first ``skip`` ones."""
        length = self._length[first]
        self._length[first] = 0
        taken = range(first + skip, first + skip + count)
        self._is_free[taken.start : taken.stop] = bytes(count)
        self.count -= count
        if skip:
            self._set_run(first, skip)
        behind = length - skip - count
        if behind:
            self._set_run(taken.stop, behind)
        return taken

    def take_at(self, block: int, at_most: int) -> range:
        """Take up to ``at_most`` consecutive blocks from ``block`` on, which must be the first of a run."""
        return self.take(block, 0, min(at_most, self._length[block]))

    def _set_run(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        heapq.heappush(self._heap, (-length, first))
        if len(self._heap) > len(self._length) + 64:
            self._heap = [(-n, block) for block, n in enumerate(self._length) if n]
            heapq.heapify(self._heap)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the runs are exactly the maximal runs of free blocks."""
        free = set(self)
        covered: set[int] = set()
        for first, length in enumerate(self._length):
            run = set(range(first, first + length))
            if not length:
                continue
            if not run <= free or first - 1 in free or first + length in free:
                raise RuntimeError(f"free run at block {first} of {length} blocks is not maximal")
            if self._first[first + length - 1] != first:
                raise RuntimeError(f"free run at block {first} is not found from its end")
            if (-length, first) not in self._heap:
                raise RuntimeError(f"free run at block {first} is missing in the heap")
            covered |= run
        if covered != free or len(free) != self.count:
            raise RuntimeError(f"{len(free)} free blocks, {len(covered)} in runs, {self.count} counted")
