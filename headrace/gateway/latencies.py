"""Latencies for people who watch: fine histograms beside those that Prometheus scrapes.

Buckets of Prometheus' histograms are wide, so that there are few. Here a bucket is 9 % wide, and a percentile over
the last seconds is the difference of two copies. An observation costs one logarithm and one addition, whether
anybody watches or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.gateway.service import RequestMetrics

SHORTEST_S = 1e-4
LONGEST_S = 600.0
BUCKETS_PER_DOUBLING = 8
NUM_BUCKETS = math.ceil(math.log2(LONGEST_S / SHORTEST_S) * BUCKETS_PER_DOUBLING)


class FineHistogram:
    """Counts of durations; bucket ``i`` begins at ``SHORTEST_S * 2 ** (i / BUCKETS_PER_DOUBLING)``."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS

    def observe(self, duration_s: float, times: int = 1) -> None:
        position = 0
        if duration_s > SHORTEST_S:
            position = min(NUM_BUCKETS - 1, int(math.log2(duration_s / SHORTEST_S) * BUCKETS_PER_DOUBLING))
        self._counts[position] += times

    def counts(self) -> tuple[int, ...]:
        """A copy."""
        return tuple(self._counts)


def percentiles(old: Sequence[int], new: Sequence[int], shares: Sequence[float]) -> list[float] | None:
    """Of what was observed between two copies, seconds, for each share (ascending, 0 to 1); None: nothing was.

    Each is the middle of its bucket, so within 5 % of an observed value.
    """
    counts = [after - before for before, after in zip(old, new, strict=True)]
    total = sum(counts)
    if not total:
        return None
    found: list[float] = []
    seen, position = counts[0], 0
    for share in shares:
        while seen < share * total:
            position += 1
            seen += counts[position]
        found.append(SHORTEST_S * 2.0 ** ((position + 0.5) / BUCKETS_PER_DOUBLING))
    return found


class WatchedMetrics:
    """``RequestMetrics`` that passes everything on, and keeps times to the first token and between tokens."""

    def __init__(self, inner: RequestMetrics) -> None:
        self._first_token, self._inter_token = inner.first_token, inner.inter_token
        self.rejected = inner.rejected
        self.scheduled = inner.scheduled
        self.forced_tokens = inner.forced_tokens
        self.sequence_finished = inner.sequence_finished
        self.ended = inner.ended
        self.unknown_field = inner.unknown_field
        self.render = inner.render
        self.ttft = FineHistogram()
        self.itl = FineHistogram()

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        self.ttft.observe(ttft_s)
        self._first_token(ttft_s, prefill_s)

    def inter_token(self, gap_s: float, tokens: int) -> None:
        self.itl.observe(gap_s, tokens)
        self._inter_token(gap_s, tokens)
