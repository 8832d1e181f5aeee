"""From scheduled rows to the arrays of one forward: tokens, positions, slots, block tables.

Host work only, on small numpy arrays. Two kinds of batch, one per reader of the pool (see
``attention/reference.py``): *slices* carry each row's runs of slots on the host, and the block tables of short
decode rows, which are cheaper to gather together than to read one by one; *gather* carries block tables
as arrays, with rows and table widths rounded up to buckets so that a compiled forward is traced once per bucket.
Padding rows write to the null block and read one slot of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow
from headrace.runner.kv.view import ForwardBatch, GroupBatch, RowBundle

Ints = npt.NDArray[np.int32]


def bucket(count: int) -> int:
    """Smallest of 1, 2, 4, 8, 12, 16, 24, 32, 48, 64 … (steps of one half) that holds ``count``."""
    if count <= 2:
        return max(count, 1)
    power = 1 << (count - 1).bit_length()
    middle = power * 3 // 4
    return middle if power >= 16 and count <= middle else power


def coarse_bucket(count: int) -> int:
    """Smallest of 16, 128, 1024 … that holds ``count``: for readers that a wide table costs nothing."""
    width = 16
    while width < count:
        width *= 8
    return width


def prefill_length(longest: int) -> int:
    """Length of a prefill forward on a GPU whose longest row has so many tokens: 1, or a multiple of 8 … 128.

    Libraries compute in tiles of that size anyway, and plan anew for every length they have not seen.
    """
    if longest == 1:
        return 1
    step = 8 if longest <= 32 else 32 if longest <= 512 else 64 if longest <= 1024 else 128
    return -(-longest // step) * step


@dataclass(frozen=True, slots=True)
class BundleLimits:
    """Positions of a row, and of all rows of a bundle with their padding, at most."""

    row_tokens: int
    total_tokens: int


@dataclass(slots=True)
class HostInts:
    """Integers of a forward, on the host; ``array``: the device's copy, made when it is first wanted."""

    values: Ints
    _array: mx.array | None = None

    @property
    def array(self) -> mx.array:
        if self._array is None:
            self._array = mx.array(self.values)
        return self._array


# A row's block table in one group, and which of its blocks a forward reads: first, last + 1.
_Span = tuple[tuple[int, ...], int, int]


@dataclass(slots=True)
class _Tables:
    """Block tables ``[B, W]`` of one group and the positions ``[B]`` of their first slots.

    Those of decode forwards are kept: from one step to the next hardly a row's changes.
    """

    spans: list[_Span]
    tables: HostInts
    bases: HostInts

    @staticmethod
    def made(spans: list[_Span], total: int, width: int, block_size: int) -> _Tables:
        tables, bases = np.zeros((total, width), np.int32), np.zeros(total, np.int32)
        for index, (table, first, last) in enumerate(spans):
            tables[index, : last - first] = table[first:last]
            bases[index] = first * block_size
        return _Tables(spans, HostInts(tables), HostInts(bases))

    def update(self, spans: list[_Span], block_size: int) -> None:
        """Write the rows that changed; as many spans as before."""
        tables, bases = self.tables.values, self.bases.values
        changed = False
        for index, ((table, first, last), before) in enumerate(zip(spans, self.spans, strict=True)):
            if table is before[0] and first == before[1] and last == before[2]:
                continue
            changed = True
            tables[index] = 0
            tables[index, : last - first] = table[first:last]
            bases[index] = first * block_size
        if changed:
            self.spans = spans
            self.tables, self.bases = HostInts(tables), HostInts(bases)


# Rows are bundled while the longest has at most this many times the blocks of the shortest; below three it does
# not pay.
_SIMILAR = 1.5
_LEAST_ROWS = 3


class InputBatchBuilder:
    """Builds forwards' batches; remembers each sequence's table as runs until the table changes.

    Args:
        layout: layer groups and block size.
        slices: whether attention reads slices (see the module docstring).
        bundles: which rows a slicing reader gathers together; None: none.
        coarse_decode: decode tables get a few widths only (a kernel reads what a row has, not the whole table).
    """

    def __init__(
        self, layout: KVLayout, *, slices: bool, bundles: BundleLimits | None = None, coarse_decode: bool = False
    ) -> None:
        self._bundles = bundles
        self._coarse_decode = coarse_decode
        self.layout = layout
        self._slices = slices
        self._runs: dict[tuple[int, int], tuple[tuple[int, ...], list[tuple[int, int]]]] = {}
        self._decode_tables: dict[int, _Tables] = {}

    def forget(self, live: set[int]) -> None:
        """Drop what is remembered of sequences that are not in ``live``."""
        for key in [key for key in self._runs if key[0] not in live]:
            del self._runs[key]

    def build(self, rows: Sequence[ScheduledRow], length: int, *, num_rows: int | None = None) -> ForwardBatch:
        """Batch of one forward ``[num_rows or len(rows), length]``; rows beyond ``rows`` are padding."""
        total = num_rows or len(rows)
        starts, ends = _bounds(rows, total)
        groups = [self._group(group, rows, length, total) for group in range(len(self.layout.groups))]
        return ForwardBatch(
            offsets=mx.array(starts),
            ends=mx.array(ends),
            starts=[row.start for row in rows],
            lengths=[row.num_tokens for row in rows],
            groups=groups,
        )

    def decode_inputs(self, rows: Sequence[ScheduledRow], num_rows: int) -> list[HostInts]:
        """A gathering decode forward ``[num_rows, 1]`` reads offsets and ends, per group slots, tables, bases."""
        inputs = [HostInts(values) for values in _bounds(rows, num_rows)]
        for group, kind in enumerate(self.layout.groups):
            firsts = [self._first_position(row, kind.window) for row in rows]
            found = self._tables(group, rows, firsts, num_rows)
            inputs += [HostInts(self._slots(group, rows, 1, num_rows)), found.tables, found.bases]
        return inputs

    def prompt_inputs(self, rows: Sequence[ScheduledRow], length: int) -> list[HostInts]:
        """What a gathering prefill forward ``[len(rows), length]`` reads.

        Tokens, places of the rows' last ones, offsets, ends; per group slots, tables, bases.
        """
        total = len(rows)
        last = np.array([row.num_tokens - 1 for row in rows], np.int32)
        inputs = [HostInts(values) for values in (token_array(rows, length), last, *_bounds(rows, total))]
        for group, kind in enumerate(self.layout.groups):
            firsts = [self._first_position(row, kind.window) for row in rows]
            found = self._tables(group, rows, firsts, total)
            inputs += [HostInts(self._slots(group, rows, length, total)), found.tables, found.bases]
        return inputs

    def _group(self, group: int, rows: Sequence[ScheduledRow], length: int, total: int) -> GroupBatch:
        window = self.layout.groups[group].window
        slots = mx.array(self._slots(group, rows, length, total))
        firsts = [self._first_position(row, window) for row in rows]
        if self._slices:
            runs = [self._row_runs(group, row, first) for row, first in zip(rows, firsts, strict=True)]
            bundles = self._bundle(group, rows, firsts) if length == 1 and self._bundles is not None else []
            return GroupBatch(window, slots, runs=runs, firsts=firsts, bundles=bundles)
        found = self._tables(group, rows, firsts, total)
        firsts = found.bases.values.tolist()
        return GroupBatch(window, slots, firsts=firsts, tables=found.tables.array, bases=found.bases.array)

    def _slots(self, group: int, rows: Sequence[ScheduledRow], length: int, total: int) -> Ints:
        size = self.layout.block_size
        slots = np.zeros((total, length), np.int32)
        # Pads of one row write to different slots of the null block where they can: equal targets serialize.
        slots[:] = np.arange(length) % size
        if length == 1:
            slots[: len(rows), 0] = [
                row.block_tables[group][row.start // size] * size + row.start % size for row in rows
            ]
            return slots.reshape(-1)
        for index, row in enumerate(rows):
            positions = np.arange(row.start, row.start + row.num_tokens)
            first = row.start // size
            last = (row.start + row.num_tokens - 1) // size
            table = np.array(row.block_tables[group][first : last + 1], np.int32)
            slots[index, : row.num_tokens] = table[positions // size - first] * size + positions % size
        return slots.reshape(-1)

    @staticmethod
    def _first_position(row: ScheduledRow, window: int | None) -> int:
        return 0 if window is None else max(0, row.start - window + 1)

    def _bundle(self, group: int, rows: Sequence[ScheduledRow], firsts: Sequence[int]) -> list[RowBundle]:
        """Rows within the limits, similar lengths together."""
        limits, size = self._bundles, self.layout.block_size
        assert limits is not None
        spans = [(first // size, row.start // size + 1) for row, first in zip(rows, firsts, strict=True)]
        widths = [last - first for first, last in spans]
        short = [index for index in range(len(rows)) if widths[index] * size <= limits.row_tokens]
        found: list[list[int]] = []
        for index in sorted(short, key=widths.__getitem__):
            width = widths[index]
            current = found[-1] if found else []
            fits = (len(current) + 1) * width * size <= limits.total_tokens
            if current and fits and width <= max(_SIMILAR * widths[current[0]], 2):
                current.append(index)
            else:
                found.append([index])
        return [
            self._row_bundle(group, rows, firsts, spans, members)
            for members in found
            if len(members) >= _LEAST_ROWS
        ]

    def _row_bundle(
        self,
        group: int,
        rows: Sequence[ScheduledRow],
        firsts: Sequence[int],
        spans: Sequence[tuple[int, int]],
        members: list[int],
    ) -> RowBundle:
        size = self.layout.block_size
        width = max(spans[index][1] - spans[index][0] for index in members)
        tables = np.zeros((len(members), width), np.int32)
        bounds = np.zeros((2, len(members), 1), np.int32)
        for place, index in enumerate(members):
            first, last = spans[index]
            blocks = rows[index].block_tables[group][first:last]
            tables[place] = blocks[-1]
            tables[place, : last - first] = blocks
            bounds[:, place, 0] = firsts[index] - first * size, rows[index].start + 1 - first * size
        slots = np.arange(width * size)
        visible = (slots >= bounds[0]) & (slots < bounds[1])
        return RowBundle(members, mx.array(members), mx.array(tables), mx.array(visible))

    def _row_runs(self, group: int, row: ScheduledRow, first: int) -> list[tuple[int, int]]:
        """Slot runs of positions ``first`` … end of the row."""
        size = self.layout.block_size
        end = row.start + row.num_tokens
        pieces = []
        position = 0
        for block, blocks in self._block_runs(group, row):
            low, high = max(first, position), min(end, position + blocks * size)
            if low < high:
                pieces.append((block * size + low - position, block * size + high - position))
            position += blocks * size
            if position >= end:
                break
        return pieces

    def _block_runs(self, group: int, row: ScheduledRow) -> list[tuple[int, int]]:
        """``(first block id, count)`` runs of consecutive ids of a table, remembered until the table changes."""
        table = row.block_tables[group]
        key = (row.seq_id, group)
        known = self._runs.get(key)
        if known is not None and known[0] is table:
            return known[1]
        ids = np.array(table, np.int32)
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        starts = np.concatenate(([0], cuts))
        counts = np.diff(np.concatenate((starts, [len(ids)])))
        runs = list(zip(ids[starts].tolist(), counts.tolist(), strict=True))
        self._runs[key] = (table, runs)
        return runs

    def _tables(self, group: int, rows: Sequence[ScheduledRow], firsts: Sequence[int], total: int) -> _Tables:
        size = self.layout.block_size
        spans = [
            (row.block_tables[group], first // size, (row.start + row.num_tokens - 1) // size + 1)
            for row, first in zip(rows, firsts, strict=True)
        ]
        needed = max(last - first for _, first, last in spans)
        if any(row.num_tokens > 1 for row in rows):
            return _Tables.made(spans, total, bucket(needed), size)
        width = coarse_bucket(needed) if self._coarse_decode else bucket(needed)
        kept = self._decode_tables.get(group)
        if kept is None or kept.tables.values.shape != (total, width) or len(kept.spans) != len(spans):
            kept = self._decode_tables[group] = _Tables.made(spans, total, width, size)
        else:
            kept.update(spans, size)
        return kept


def _bounds(rows: Sequence[ScheduledRow], total: int) -> tuple[Ints, Ints]:
    """Position of each row's first token, and its context's length after the forward."""
    starts, ends = np.zeros(total, np.int32), np.ones(total, np.int32)
    starts[: len(rows)] = [row.start for row in rows]
    ends[: len(rows)] = [row.start + row.num_tokens for row in rows]
    return starts, ends


def token_array(rows: Sequence[ScheduledRow], length: int) -> Ints:
    """``[len(rows), length]`` token ids, zero-padded at the right (rows whose token is on the device: zero)."""
    tokens = np.zeros((len(rows), length), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row.token_ids)] = row.token_ids
    return tokens
