"""Which prompts share one prefill forward, and how much of each.

Rows are right-padded to the longest, so a forward costs rows × longest tokens, padding included: that area has to
stay within the budget, and a row joins only while at least half of the area is real tokens. The first row
takes what it can.
"""

from __future__ import annotations

from headrace.core.prefill_budget import PrefillBudget


class PrefillBatch:
    """The prefill rows of one step. Lives for one ``schedule()``; its sums are kept for the cost model."""

    def __init__(self, budget: PrefillBudget, max_rows: int) -> None:
        self._budget = budget
        self._max_rows = max_rows
        self._work = 0.0
        self._rows = 0
        self._longest = 0
        self._deepest = 0  # largest start of a row: the whole area is priced at that context
        self._tokens = 0
        self._weighted_context = 0.0

    def open(self, decode_rows: int) -> None:
        """Set the budget, once the step's decode rows are known."""
        self._work = self._budget.work(decode_rows)

    @property
    def area(self) -> int:
        """Tokens computed, padding included."""
        return self._rows * self._longest

    @property
    def mean_context(self) -> float:
        return self._weighted_context / self._tokens if self._tokens else 0.0

    @property
    def is_full(self) -> bool:
        """Whether no further row can join."""
        if not self._rows:
            return False
        return self._rows >= self._max_rows or self._row_limit(self._deepest) < self._longest

    def room(self, start: int, remaining: int) -> int:
        """Tokens that a further row, with ``remaining`` to compute behind ``start``, gets; 0: it cannot join."""
        if self._rows >= self._max_rows:
            return 0
        limit = self._row_limit(max(start, self._deepest))
        if self._longest > limit:
            return 0
        tokens = self._budget.round_chunk(min(limit, remaining), remaining)
        is_wasteful = 2 * (self._tokens + tokens) < (self._rows + 1) * max(self._longest, tokens)
        return 0 if is_wasteful else tokens

    def add(self, start: int, tokens: int) -> None:
        self._rows += 1
        self._longest = max(self._longest, tokens)
        self._deepest = max(self._deepest, start)
        self._tokens += tokens
        self._weighted_context += tokens * (start + tokens / 2)

    def _row_limit(self, deepest: int) -> int:
        """Length that every row may have if one more joins."""
        return self._budget.chunk(self._work, deepest) // (self._rows + 1)
