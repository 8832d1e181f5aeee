"""Figures of a run: rates and latency percentiles over the requests that succeeded.

TTFT = first text - sent. E2E = end - sent. ITL: gaps between events with text. TPOT = (last text - first text) /
(output tokens - 1). A figure nothing was measured for is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.bench.load import LoadResult, Sample


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The ``percent``-th percentile, linear between ranks; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Seconds; all None when nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        measured = list(values)
        mean = sum(measured) / len(measured) if measured else None
        return cls(mean, *(percentile(measured, percent) for percent in (50, 90, 95, 99)))


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one run. Rates are over the whole duration and count successful requests' tokens only."""

    streams: int
    completed: int
    failed: dict[str, int]
    duration_s: float
    prompt_tokens: int | None
    output_tokens: int
    estimated: bool
    output_tokens_per_s: float | None
    requests_per_s: float | None
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    client_cpu_share: float | None


def summarize(result: LoadResult) -> Summary:
    good = [sample for sample in result.samples if sample.failure is None]
    failed = Counter(str(sample.failure) for sample in result.samples if sample.failure is not None)
    duration_s = result.duration_s
    tokens = sum(sample.output_tokens for sample in good)
    prompts = [sample.prompt_tokens for sample in good if sample.prompt_tokens is not None]

    def rate(count: float) -> float | None:
        return count / duration_s if duration_s > 0 else None

    return Summary(
        streams=result.streams,
        completed=len(good),
        failed=dict(sorted(failed.items())),
        duration_s=duration_s,
        prompt_tokens=sum(prompts) if prompts else None,
        output_tokens=tokens,
        estimated=any(sample.estimated for sample in good),
        output_tokens_per_s=rate(tokens),
        requests_per_s=rate(len(good)),
        ttft_s=Distribution.of(first - sample.sent_s for sample in good for first in sample.text_times_s[:1]),
        itl_s=Distribution.of(b - a for sample in good for a, b in pairwise(sample.text_times_s)),
        tpot_s=Distribution.of(tpot for sample in good if (tpot := _tpot(sample)) is not None),
        e2e_s=Distribution.of(sample.end_s - sample.sent_s for sample in good),
        client_cpu_share=rate(result.client_cpu_s),
    )


def _tpot(sample: Sample) -> float | None:
    if sample.output_tokens < 2 or len(sample.text_times_s) < 2:
        return None
    return (sample.text_times_s[-1] - sample.text_times_s[0]) / (sample.output_tokens - 1)
