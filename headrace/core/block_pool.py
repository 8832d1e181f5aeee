"""The blocks of one layer group: who holds them, which are free, which are kept for their prefixes.

Every block but the null block is in exactly one state, so free + cached + held == num_blocks:

    free    holds nothing anybody could ask for; kept as runs of consecutive ids
    cached  held by nobody, findable in the prefix index; in a list in the order of last use
    held    in at least one block table (its reference count); findable once full and computed

Free blocks are used before cached ones are evicted, least recently used first. The list is doubly linked through
two arrays with the null block as its sentinel: any block leaves it in O(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.core.free_runs import FreeRuns
from headrace.core.prefix_index import BlockContent, PrefixIndex

NULL_BLOCK = 0  # padding writes there; stands in tables where a window has left a block behind


class BlockPool:
    """Reference counts and states of blocks 1 … num_blocks."""

    def __init__(self, num_blocks: int, max_cached: int | None) -> None:
        """``max_cached``: cached blocks above this number are dropped; None: no cap."""
        self.num_blocks = num_blocks
        self.num_cached = 0
        self.index = PrefixIndex()
        self._max_cached = num_blocks if max_cached is None else max_cached
        self._free = FreeRuns(num_blocks)
        self._refs = [0] * (num_blocks + 2)
        self._older = [0] * (num_blocks + 1)  # towards the least recently used
        self._newer = [0] * (num_blocks + 1)
        # Evicting a few at once lets their ids form runs again; a tiny pool gives up no more than it must.
        self._evict_at_once = max(1, min(16, num_blocks // 64))

    @property
    def num_free(self) -> int:
        return self._free.count

    @property
    def num_available(self) -> int:
        """Blocks that ``allocate`` can hand out."""
        return self._free.count + self.num_cached

    @property
    def num_held(self) -> int:
        return self.num_blocks - self._free.count - self.num_cached

    def is_held(self, block: int) -> bool:
        return self._refs[block] > 0

    def count_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these (null blocks aside) would stop being available if they were held."""
        return sum(1 for block in blocks if block != NULL_BLOCK and not self._refs[block])

    def allocate(self, count: int, after: int | None) -> list[int]:
        """Hold ``count`` blocks that belong to nobody else, next to ``after`` where possible.

        The caller made sure that ``num_available`` suffices.
        """
        if self._free.count < count:
            self._evict(count - self._free.count)
        blocks: list[int] = []
        while len(blocks) < count:
            taken = self._take_run(count - len(blocks), after)
            blocks.extend(taken)
            after = taken[-1]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to held or cached blocks; null blocks are skipped."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if not self._refs[block]:
                self._unlink(block)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each; of those that become cached, the first is evicted first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self.index:
                self._link(block)
            else:
                self._free.add(block)
        if self.num_cached > self._max_cached:
            self._drop_oldest(self.num_cached - self._max_cached)

    def touch(self, block: int) -> None:
        """Note that a cached block was of use."""
        if not self._refs[block]:
            self._unlink(block)
            self._link(block)

    def make_findable(self, block: int, content: BlockContent) -> None:
        """Offer a held block to the prefix index; without effect when the same can already be found."""
        if block in self.index:
            return
        superseded = self.index.superseded_by(content)
        if self.index.add(block, content):
            for other in superseded:
                if not self._refs[other]:
                    self._forget(other)

    def make_unfindable(self, blocks: Iterable[int]) -> None:
        """Take held blocks out of the prefix index; null blocks are skipped."""
        for block in blocks:
            if block != NULL_BLOCK:
                self.index.discard(block)

    def clear_cached(self) -> None:
        self._drop_oldest(self.num_cached)

    def resize(self, num_blocks: int) -> dict[int, int]:
        """Have ``num_blocks`` blocks, at least as many as are held; cached ones go as far as they must.

        Returns the moves, old id -> new id, of held and cached blocks that lay beyond the new end. Every new id
        was free, so the copies may be made in any order.
        """
        if num_blocks < self.num_held:
            raise ValueError(f"{self.num_held} blocks are held, {num_blocks} would be left")
        self._drop_oldest(max(0, self.num_held + self.num_cached - num_blocks))
        cached = self._cached_blocks()
        live = sorted([block for block, refs in enumerate(self._refs) if refs] + cached)
        room = (block for block in self._free if block <= num_blocks)
        moves = {block: next(room) for block in live if block > num_blocks}
        free = set(range(1, num_blocks + 1)) - {moves.get(block, block) for block in live}
        refs = [0] * (num_blocks + 2)
        for block in live:
            refs[moves.get(block, block)] = self._refs[block]
        self.index.rename(moves)
        self.num_blocks, self.num_cached = num_blocks, 0
        self._refs, self._free = refs, FreeRuns(num_blocks, sorted(free))
        self._older, self._newer = [0] * (num_blocks + 1), [0] * (num_blocks + 1)
        for block in cached:
            self._link(moves.get(block, block))
        return moves

    def _cached_blocks(self) -> list[int]:
        """The least recently used first."""
        cached: list[int] = []
        block = self._newer[NULL_BLOCK]
        while block != NULL_BLOCK and len(cached) <= self.num_blocks:
            cached.append(block)
            block = self._newer[block]
        return cached

    def _take_run(self, count: int, after: int | None) -> Sequence[int]:
        if after is not None and after + 1 in self._free:
            return self._free.take_at(after + 1, count)
        first, length = self._free.longest()
        count = min(count, length)
        # A held block in front may be the end of a growing table: leave it half of the room that remains.
        skip = (length - count) // 2 if self._refs[first - 1] else 0
        return self._free.take(first, skip, count)

    def _evict(self, count: int) -> None:
        self._drop_oldest(min(self.num_cached, max(count, self._evict_at_once)))

    def _drop_oldest(self, count: int) -> None:
        for _ in range(count):
            self._forget(self._newer[NULL_BLOCK])

    def _forget(self, block: int) -> None:
        self.index.discard(block)
        self._unlink(block)
        self._free.add(block)

    def _link(self, block: int) -> None:
        newest = self._older[NULL_BLOCK]
        self._newer[newest] = block
        self._older[block] = newest
        self._newer[block] = NULL_BLOCK
        self._older[NULL_BLOCK] = block
        self.num_cached += 1

    def _unlink(self, block: int) -> None:
        older, newer = self._older[block], self._newer[block]
        self._newer[older] = newer
        self._older[newer] = older
        self.num_cached -= 1

    def check_integrity(self, references: dict[int, int]) -> None:
        """Raise RuntimeError on any violated equation; ``references``: block -> tables that hold it."""
        self._free.check_integrity()
        self.index.check_integrity()
        cached = self._cached_blocks()
        held = {block for block, refs in enumerate(self._refs) if refs}
        if held != set(references) or any(self._refs[block] != references[block] for block in held):
            raise RuntimeError("reference counts differ from the block tables")
        if len(cached) != self.num_cached or self.num_cached > self._max_cached:
            raise RuntimeError(f"{len(cached)} cached blocks listed, {self.num_cached} counted")
        states = [*self._free, *cached, *held]
        if sorted(states) != list(range(1, self.num_blocks + 1)):
            raise RuntimeError(
                f"{self.num_free} free + {len(cached)} cached + {len(held)} held != {self.num_blocks}"
            )
        if any(block not in self.index for block in cached):
            raise RuntimeError("a cached block cannot be found")
        if any(block in self.index for block in self._free):
            raise RuntimeError("a free block can be found")
