"""Free runs, reference counts, eviction order and where blocks are placed."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block_pool import BlockPool
from headrace.core.free_runs import FreeRuns
from headrace.core.prefix_index import BlockContent, PrefixIndex, block_digest, root_digest

ROOT = root_digest("")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(0, 2**32))
def test_runs_stay_maximal(size: int, seed: int) -> None:
    rng = random.Random(seed)
    runs, taken = FreeRuns(size), list[int]()
    for _ in range(60):
        if runs.count and (not taken or rng.random() < 0.5):
            first, length = runs.longest()
            count = rng.randint(1, length)
            got = runs.take(first, rng.randint(0, length - count), count)
            assert len(got) == count and not set(got) & set(taken)
            taken.extend(got)
        elif taken:
            runs.add(taken.pop(rng.randrange(len(taken))))
        runs.check_integrity()
    assert sorted([*runs, *taken]) == list(range(1, size + 1))


def test_a_longest_run_is_found_among_many() -> None:
    runs = FreeRuns(30)
    runs.take(1, 0, 30)
    for block in (2, 3, 9, 12, 13, 14, 15, 20):
        runs.add(block)
    assert runs.longest() == (12, 4)


def full(parent: bytes, tokens: tuple[int, ...]) -> BlockContent:
    return BlockContent(parent, tokens, block_digest(parent, tokens))


def test_tables_grow_side_by_side() -> None:
    pool = BlockPool(100, None)
    tables = [pool.allocate(3, None) for _ in range(5)]
    for _ in range(8):
        for table in tables:
            table.extend(pool.allocate(1, table[-1]))
    for table in tables:
        assert table == list(range(table[0], table[0] + 11))


def test_free_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(10, None)
    blocks = pool.allocate(4, None)
    pool.make_findable(blocks[0], full(ROOT, (1, 2)))
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (9, 1)
    assert blocks[0] not in pool.allocate(9, None)
    assert pool.allocate(1, None) == [blocks[0]]


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(3, None)
    blocks = pool.allocate(3, None)
    for i, block in enumerate(blocks):
        pool.make_findable(block, full(ROOT, (i, i)))
    pool.release(blocks)
    pool.touch(blocks[0])
    assert pool.allocate(1, None) == [blocks[1]]
    assert pool.allocate(1, None) == [blocks[2]]


def test_shared_blocks_are_free_with_their_last_holder() -> None:
    pool = BlockPool(4, None)
    blocks = pool.allocate(2, None)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_held == 2
    pool.release(reversed(blocks))
    assert pool.num_free == 4


def test_a_hit_is_verified() -> None:
    index = PrefixIndex()
    digest = block_digest(ROOT, (1, 2))
    index.add(7, BlockContent(ROOT, (1, 2), digest))
    assert index.full_block(ROOT, (1, 2), digest) == 7
    assert index.full_block(ROOT, (1, 3), digest) is None
    assert index.full_block(root_digest("salt"), (1, 2), digest) is None


def test_the_child_with_most_in_common() -> None:
    index = PrefixIndex()
    index.add(1, full(ROOT, (5, 6, 7, 8)))
    index.add(2, BlockContent(ROOT, (5, 6, 9), None))
    assert index.longest_child(ROOT, (5, 6, 9, 9)) == (2, 3)
    assert index.longest_child(ROOT, (5, 6, 7)) == (1, 3)
    assert index.longest_child(ROOT, (6,)) is None
    assert not index.add(3, BlockContent(ROOT, (5, 6), None))
    assert index.superseded_by(full(ROOT, (5, 6, 9, 1))) == [2]
    index.check_integrity()


def test_few_runs_under_churn() -> None:
    """Best effort, but a real one: after many arrivals and departures tables still consist of few runs."""
    rng = random.Random(5)
    pool = BlockPool(2000, 400)
    tables: list[list[int]] = []
    runs = blocks = 0
    for _ in range(4000):
        if len(tables) < 24:
            tables.append(pool.allocate(rng.randint(1, 40), None))
        elif rng.random() < 0.02:
            pool.release(reversed(tables.pop(rng.randrange(len(tables)))))
        for table in tables:
            if rng.random() < 0.1 and pool.num_available:
                table.extend(pool.allocate(1, table[-1]))
            if len(table) > 60:
                pool.release(reversed(table))
                table[:] = pool.allocate(rng.randint(1, 40), None)
    for table in tables:
        runs += 1 + sum(b != a + 1 for a, b in pairwise(table))
        blocks += len(table)
    assert blocks / runs > 8
