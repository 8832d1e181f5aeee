"""Splits forwards of models that compute attention themselves, so that none holds more than the plan sets aside.

Rows of a decode are cut into runs, a prefill first into its rows, then a row into pieces of few enough queries.
Sizes are counted as in ``core/context_scratch.py``; a window shortens a row's context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headrace.core.context_scratch import ContextCost
from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow
from headrace.runner.kv.input_batch import bucket


@dataclass(frozen=True, slots=True)
class ForwardLimit:
    """What one forward may hold.

    Attributes:
        cost: of a forward.
        nbytes: at most.
        slices: contexts are as long as they are; else as wide as the block table's bucket.
    """

    cost: ContextCost
    nbytes: int
    slices: bool

    def decode_parts(self, rows: Sequence[ScheduledRow], layout: KVLayout) -> list[Sequence[ScheduledRow]]:
        """``rows`` in order, in runs that fit; a row that does not fit is alone."""
        parts: list[Sequence[ScheduledRow]] = []
        first, longest = 0, 0
        for index, row in enumerate(rows):
            longest = max(longest, self._positions(row.start + 1, 1, layout))
            if index > first and self.cost.of(index + 1 - first, 1, longest) > self.nbytes:
                parts.append(rows[first:index])
                first, longest = index, self._positions(row.start + 1, 1, layout)
        return [*parts, rows[first:]]

    def prefill_parts(self, rows: list[ScheduledRow], layout: KVLayout) -> list[list[ScheduledRow]]:
        """One prefill forward as several that fit, each row's in order."""
        length = max(row.num_tokens for row in rows)
        longest = max(self._positions(row.start + row.num_tokens, length, layout) for row in rows)
        if self.cost.of(len(rows), length, longest) <= self.nbytes:
            return [rows]
        return [[part] for row in rows for part in self._row_parts(row, layout)]

    def _row_parts(self, row: ScheduledRow, layout: KVLayout) -> list[ScheduledRow]:
        parts: list[ScheduledRow] = []
        first = 0
        while first < row.num_tokens:
            count = row.num_tokens - first
            # The context grows with the queries: a first guess at the whole length, then what that leaves.
            for _ in range(2):
                positions = self._positions(row.start + first + count, count, layout)
                count = min(row.num_tokens - first, self.cost.queries(self.nbytes, positions))
            while count > 1 and self._bytes(row.start + first, count, layout) > self.nbytes:
                count = count * 3 // 4
            parts.append(part_of(row, first, count))
            first += count
        return parts

    def _bytes(self, start: int, count: int, layout: KVLayout) -> int:
        return self.cost.of(1, count, self._positions(start + count, count, layout))

    def _positions(self, end: int, length: int, layout: KVLayout) -> int:
        """Width of the widest layer group's arrays for a row that ends at ``end``."""
        widest = max(end if group.window is None else min(end, group.window + length) for group in layout.groups)
        if self.slices:
            return widest
        return bucket(-(-widest // layout.block_size) + 1) * layout.block_size


def part_of(row: ScheduledRow, first: int, count: int) -> ScheduledRow:
    """``count`` of a row's tokens from its ``first`` on, as a row; only the part with the last one samples."""
    is_last = first + count == row.num_tokens
    return msgspec.structs.replace(
        row,
        start=row.start + first,
        num_tokens=count,
        token_ids=row.token_ids[first : first + count],
        samples=is_last and row.samples,
        prompt_targets=row.prompt_targets[first : first + count],
    )
