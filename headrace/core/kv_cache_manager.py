"""Block tables of all sequences over the block pools of all layer groups: reuse, growth, windows, release.

Reuse. A prompt is looked up from its beginning: a hit of n tokens needs, in every full-attention group, all blocks
before n, and in every sliding group those that the window of position n reaches. Full blocks are shared; of
the block in which the hit ends a copy is made, because its owner, or somebody else, goes on differently.

    0 ............................ num_full · bs ..... n ......... num_tokens
    | shared full blocks           | copy of one block | computed by this sequence
    | (null where no window reaches)

Who may read what. A block can be found only after the step that wrote it has finished and did not fail for that
row, so no sequence ever depends on KV that may yet turn out wrong. The other direction needs no waiting: a block
may be freed and handed out again while a launched step still uses it, because the device runs steps in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from headrace.core.block_pool import NULL_BLOCK, BlockPool
from headrace.core.layout import KVLayout
from headrace.core.prefix_index import BlockContent
from headrace.core.scheduler_types import GroupBlocks
from headrace.core.sequence import Sequence
from headrace.core.step import BlockCopy

# Of a prompt's chunk in a sliding group whose pool has been made as small as it may be.
SMALL_CHUNK_BLOCKS = 4
# A block that is shared in part is copied where that spares one token in so many. Few tokens (the beginnings that
# a chat template gives to all prompts) are not worth a copy and a place of one's own in attention.
WORTH_A_COPY = 16


class PrefixHit(NamedTuple):
    """KV that a sequence can take over, valid until the manager is changed.

    Attributes:
        num_tokens: leading tokens that need not be computed.
        shared: per group, the blocks of the full blocks among them (null where no window reaches).
        sources: per group, the block to copy the tokens behind the last full block from; empty: there are none.
    """

    num_tokens: int
    shared: tuple[list[int], ...]
    sources: tuple[int, ...]


class KVCacheManager:
    """Owns the block pools and every block table."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: tuple[int, ...],
        enable_prefix_cache: bool,
        max_cached: tuple[int | None, ...],
    ) -> None:
        self._layout = layout
        self.block_size = layout.block_size
        self.pools = tuple(BlockPool(n, cap) for n, cap in zip(num_blocks, max_cached, strict=True))
        self._windows = tuple(group.window for group in layout.groups)
        self._full = [g for g, window in enumerate(self._windows) if window is None]
        self._sliding = [(g, window) for g, window in enumerate(self._windows) if window is not None]
        self._caching = enable_prefix_cache

    @property
    def num_groups(self) -> int:
        return len(self.pools)

    @property
    def max_tokens(self) -> int | None:
        """Tokens that one sequence alone can hold; None: no bound (sliding groups only)."""
        limits = []
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is None or pool.num_blocks < self._blocks_of_window(window):
                limits.append(pool.num_blocks * self.block_size)
        return min(limits, default=None)

    def _blocks_of_window(self, window: int) -> int:
        """Most blocks that a position and the window before it can lie in."""
        return (window - 1 + self.block_size - 1) // self.block_size + 1

    # -- reuse ---------------------------------------------------------------------------------------------

    def no_hit(self) -> PrefixHit:
        return PrefixHit(0, tuple([] for _ in self.pools), ())

    def lookup(self, seq: Sequence) -> PrefixHit:
        """The longest usable prefix of the sequence's tokens in the cache or in running sequences."""
        limit = seq.reuse_limit
        if not self._caching or limit <= 0:
            return self.no_hit()
        found = self._full_blocks(seq, limit // self.block_size)
        num_full = self._usable(found)
        shared = tuple(blocks[:num_full] for blocks in found)
        num_tokens = num_full * self.block_size
        rest = seq.token_ids[num_tokens : min(limit, num_tokens + self.block_size)]
        sources: list[int] = []
        common = len(rest)
        parent = seq.parent_hash(num_full, self.block_size)
        for pool in self.pools:
            child = pool.index.longest_child(parent, rest)
            if child is None:
                sources, common = [], 0
                break
            sources.append(child[0])
            common = min(common, child[1])
        if common * WORTH_A_COPY < seq.num_tokens - num_tokens:
            sources, common = [], 0
        num_tokens += common
        for g, window in self._sliding:
            first = max(0, num_tokens - window + 1) // self.block_size
            shared[g][:first] = [NULL_BLOCK] * min(first, num_full)
        return PrefixHit(num_tokens, shared, tuple(sources))

    def _full_blocks(self, seq: Sequence, at_most: int) -> tuple[list[int], ...]:
        """Per group, the blocks found for the first full blocks; sliding groups may have gaps (null)."""
        size = self.block_size
        hashes = seq.hashes(at_most, size)
        found: tuple[list[int], ...] = tuple([] for _ in self.pools)
        for i in range(at_most):
            parent = seq.parent_hash(i, size)
            tokens = tuple(seq.token_ids[i * size : (i + 1) * size])
            row = [pool.index.full_block(parent, tokens, hashes[i]) for pool in self.pools]
            if any(row[g] is None for g in self._full):
                break
            for blocks, block in zip(found, row, strict=True):
                blocks.append(block or NULL_BLOCK)
        return found

    def _usable(self, found: tuple[list[int], ...]) -> int:
        """Most leading full blocks such that each sliding group has those of the last window."""
        best = 0
        present = [0] * len(self._sliding)  # consecutive blocks present just before position i
        for i in range(1, len(found[0]) + 1):
            usable = True
            for j, (g, window) in enumerate(self._sliding):
                present[j] = present[j] + 1 if found[g][i - 1] != NULL_BLOCK else 0
                first = max(0, i * self.block_size - window + 1) // self.block_size
                usable = usable and present[j] >= i - first
            if usable:
                best = i
        return best

    def fork_hit(self, parent: Sequence, num_tokens: int) -> PrefixHit | None:
        """The first ``num_tokens`` of a running sequence, to be taken over by a sibling with the same prompt.

        None when the parent has left some of them behind already.
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        if parent.num_confirmed < num_tokens or num_tokens <= 0:
            return None
        shared: tuple[list[int], ...] = tuple(table[:num_full] for table in parent.tables)
        sources = tuple(table[num_full] for table in parent.tables) if rest else ()
        for g, window in self._sliding:
            first = max(0, num_tokens - window + 1) // self.block_size
            shared[g][:first] = [NULL_BLOCK] * min(first, num_full)
            needed = [*shared[g][first:], *([sources[g]] if rest and first <= num_full else [])]
            if NULL_BLOCK in needed:
                return None
        return PrefixHit(num_tokens, shared, sources)

    # -- admission and growth ------------------------------------------------------------------------------

    def blocks_to_start(self, seq: Sequence, hit: PrefixHit, chunk: int) -> tuple[int, ...]:
        """Per group, available blocks that ``start`` would make unavailable."""
        return tuple(
            self._blocks_to_start(g, seq, hit, chunk) - len(hit.shared[g]) + pool.count_unheld(hit.shared[g])
            for g, pool in enumerate(self.pools)
        )

    def are_available(self, blocks: tuple[int, ...]) -> bool:
        return all(count <= pool.num_available for count, pool in zip(blocks, self.pools, strict=True))

    def _blocks_to_start(self, group: int, seq: Sequence, hit: PrefixHit, chunk: int) -> int:
        """Table length at the start: full groups cover all known tokens, sliding ones the first chunk."""
        end = len(seq.token_ids)
        if self._windows[group] is not None:
            end = min(end, hit.num_tokens + chunk)
        return -(-end // self.block_size)

    def start(self, seq: Sequence, hit: PrefixHit, chunk: int) -> list[BlockCopy]:
        """Give a waiting sequence its tables (see ``blocks_to_start``). Returns copies for this step."""
        for pool, shared in zip(self.pools, hit.shared, strict=True):
            pool.hold(shared)
        copies: list[BlockCopy] = []
        for g, pool in enumerate(self.pools):
            table = [*hit.shared[g]]
            if hit.sources:
                pool.touch(hit.sources[g])
            missing = self._blocks_to_start(g, seq, hit, chunk) - len(table)
            table.extend(pool.allocate(missing, table[-1] if table else None))
            seq.tables[g] = table
            seq.trimmed[g] = next((i for i, block in enumerate(hit.shared[g]) if block), len(hit.shared[g]))
            if hit.sources and table[len(hit.shared[g])] != hit.sources[g]:
                copies.append(BlockCopy(g, hit.sources[g], table[len(hit.shared[g])]))
        seq.num_computed = seq.num_confirmed = hit.num_tokens
        seq.num_committed = len(hit.shared[0])
        self._tables_changed(seq)
        return copies

    def grow(self, seq: Sequence, end: int) -> bool:
        """Cover positions before ``end``; False, and nothing changes, when there is no room.

        Blocks that the window has left go back first: gently (what finished steps wrote stays findable), then
        all that the next query cannot see.
        """
        if end <= seq.capacity:
            return True
        if self._sliding:
            self.trim(seq, self._settled(seq))
        wanted = -(-end // self.block_size)
        if not self._has_room(seq, wanted) and self._sliding:
            self.trim(seq, seq.num_computed)
        if not self._has_room(seq, wanted):
            return False
        for pool, table in zip(self.pools, seq.tables, strict=True):
            if wanted > len(table):
                after = table[-1] if table and table[-1] != NULL_BLOCK else None
                table.extend(pool.allocate(wanted - len(table), after))
        self._tables_changed(seq)
        return True

    def growable(self, seq: Sequence) -> int:
        """Positions that ``grow`` can cover now at most."""
        if self._sliding:
            self.trim(seq, seq.num_computed)
        blocks = min(len(table) + pool.num_available for pool, table in zip(self.pools, seq.tables, strict=True))
        return blocks * self.block_size

    def _has_room(self, seq: Sequence, wanted: int) -> bool:
        return all(
            wanted - len(table) <= pool.num_available for pool, table in zip(self.pools, seq.tables, strict=True)
        )

    def trim(self, seq: Sequence, position: int) -> None:
        """Free the blocks of sliding groups that no query at ``position`` or later sees."""
        for g, window in self._sliding:
            first = min(max(0, position - window + 1) // self.block_size, len(seq.tables[g]))
            if first > seq.trimmed[g]:
                old = seq.tables[g][seq.trimmed[g] : first]
                seq.tables[g][seq.trimmed[g] : first] = [NULL_BLOCK] * len(old)
                self.pools[g].release(old)
                seq.trimmed[g] = first
                seq.table_tuples = None

    def _settled(self, seq: Sequence) -> int:
        """Position up to which windows may leave blocks behind without loss for anybody else."""
        if seq.group.unforked and seq is seq.group.leader:
            return min(seq.num_confirmed, seq.num_prompt_tokens - 1)  # the siblings' first query
        return seq.num_confirmed

    def _tables_changed(self, seq: Sequence) -> None:
        seq.capacity = min(len(table) for table in seq.tables) * self.block_size
        seq.table_tuples = None

    def table_tuples(self, seq: Sequence, end: int) -> tuple[tuple[int, ...], ...]:
        """Tables that cover exactly the positions before ``end``."""
        wanted = -(-end // self.block_size)
        tuples = seq.table_tuples
        if tuples is None or len(tuples[0]) != wanted:
            tuples = seq.table_tuples = tuple(tuple(table[:wanted]) for table in seq.tables)
        return tuples

    # -- caching and release -------------------------------------------------------------------------------

    def commit(self, seq: Sequence) -> None:
        """Make full blocks findable whose KV was written by finished steps."""
        size = self.block_size
        num_full = seq.num_confirmed // size
        if not self._caching or num_full <= seq.num_committed:
            return
        hashes = seq.hashes(num_full, size)
        parent = seq.parent_hash(seq.num_committed, size)
        for i in range(seq.num_committed, num_full):
            tokens = tuple(seq.token_ids[i * size : (i + 1) * size])
            self._offer(seq, i, BlockContent(parent, tokens, hashes[i]))
            parent = hashes[i]
        seq.num_committed = num_full

    def _offer(self, seq: Sequence, block: int, content: BlockContent) -> None:
        for pool, table in zip(self.pools, seq.tables, strict=True):
            if table[block] != NULL_BLOCK:
                pool.make_findable(table[block], content)

    def discard(self, seq: Sequence) -> None:
        """Take all blocks from a sequence whose KV is in doubt; nobody finds them in the prefix cache again."""
        for pool, table in zip(self.pools, seq.tables, strict=True):
            pool.make_unfindable(table)
        self._give_back(seq)

    def release(self, seq: Sequence) -> None:
        """Take all blocks from a sequence; what finished steps computed may serve others."""
        size = self.block_size
        if self._caching:
            self.commit(seq)
            num_full, rest = divmod(seq.num_confirmed, size)
            tail = tuple(seq.token_ids[num_full * size : num_full * size + rest])
            if tail and num_full * size < seq.capacity:
                self._offer(seq, num_full, BlockContent(seq.parent_hash(num_full, size), tail, None))
        self._give_back(seq)

    def _give_back(self, seq: Sequence) -> None:
        for g, pool in enumerate(self.pools):
            pool.release(reversed(seq.tables[g]))  # tails are evicted before the heads they depend on
            seq.tables[g] = []
            seq.trimmed[g] = 0
        seq.num_computed = seq.num_confirmed = seq.num_committed = 0
        self._tables_changed(seq)

    # -- size ----------------------------------------------------------------------------------------------

    def smallest_sizes(self, sequence_tokens: int) -> tuple[int, ...]:
        """Per group, blocks that a pool must keep: what is held, and room for a sequence of this length alone.

        In a sliding group that is its window and a small chunk: longer chunks of prompts are cut to what there is.
        """
        longest = -(-sequence_tokens // self.block_size)
        needed = (
            longest if window is None else min(longest, self._blocks_of_window(window) + SMALL_CHUNK_BLOCKS)
            for window in self._windows
        )
        return tuple(
            max(pool.num_held, min(blocks, pool.num_blocks))
            for pool, blocks in zip(self.pools, needed, strict=True)
        )

    def resize(self, num_blocks: tuple[int, ...], sequences: Iterable[Sequence]) -> tuple[dict[int, int], ...]:
        """Have pools of these sizes (see ``smallest_sizes``); returns per group where blocks must be copied to.

        ``sequences``: all that hold blocks; their tables are rewritten.
        """
        moves = tuple(pool.resize(count) for pool, count in zip(self.pools, num_blocks, strict=True))
        for seq in sequences:
            pairs = zip(moves, seq.tables, strict=True)
            seq.tables = [[moved.get(block, block) for block in table] for moved, table in pairs]
            seq.table_tuples = None
        return moves

    def group_blocks(self) -> tuple[GroupBlocks, ...]:
        """Blocks of each layer group by state."""
        return tuple(
            GroupBlocks(group.name, pool.num_blocks, pool.num_held, pool.num_cached, self._layout.block_bytes(g))
            for g, (group, pool) in enumerate(zip(self._layout.groups, self.pools, strict=True))
        )

    def clear_cached(self) -> None:
        for pool in self.pools:
            pool.clear_cached()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError on any violated equation between the tables of running sequences and the pools."""
        seqs = list(sequences)
        for g, pool in enumerate(self.pools):
            references = Counter(block for seq in seqs for block in seq.tables[g] if block != NULL_BLOCK)
            pool.check_integrity(references)
            for seq in seqs:
                writable = seq.tables[g][seq.num_computed // self.block_size :]
                if any(block != NULL_BLOCK and references[block] != 1 for block in writable):
                    raise RuntimeError(f"sequence {seq.seq_id} would write to a block that others hold")
                if any(block != NULL_BLOCK for block in seq.tables[g][: seq.trimmed[g]]):
                    raise RuntimeError(f"sequence {seq.seq_id} holds blocks that its window left")
                if NULL_BLOCK in seq.tables[g][seq.trimmed[g] :]:
                    raise RuntimeError(f"sequence {seq.seq_id} misses a block inside its window")
