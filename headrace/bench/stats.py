"""Figures of runs: rates and latency percentiles over the requests that succeeded.

TTFT = first text - sent. E2E = end - sent. ITL: gaps between events with text. TPOT = (last text - first text) /
(output tokens - 1); a request's decode rate is the inverse of its TPOT. Several runs are pooled: latencies over
all requests, rates over the sum of durations. A figure nothing was measured for is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.bench.load import LoadResult
from headrace.bench.observe import Sample

PERCENTS = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The ``percent``-th percentile, linear between ranks; None of no values."""
    return _at(sorted(values), percent)


def _at(ordered: Sequence[float], percent: float) -> float | None:
    if not ordered:
        return None
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles; all None when nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        measured = sorted(values)
        mean = sum(measured) / len(measured) if measured else None
        return cls(mean, *(_at(measured, percent) for percent in PERCENTS))


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request, or the 95th percentile of many, has to keep; None: no bound."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None

    def kept_by(self, sample: Sample) -> bool:
        """Whether a request succeeded within the bounds; its ITL is the mean of its gaps."""
        first = ttft_s(sample)
        if sample.failure is not None or first is None:
            return False
        gaps = gaps_s(sample)
        itl = sum(gaps) / len(gaps) if gaps else 0.0
        return (self.ttft_s is None or first <= self.ttft_s) and (self.itl_s is None or itl <= self.itl_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one or several runs. Rates count successful requests only, over the whole duration.

    Attributes:
        streams: of a closed loop.
        completed: requests that count; ``failed``: the others, by kind.
        estimated: of ``completed``, how many sent no usage, so that their output tokens are estimates.
        offered_per_s: rate at which requests were sent, where arrivals were scheduled.
        goodput_per_s: requests within the objectives per second; None without objectives.
        decode_tokens_per_s: output rate of single requests behind their first token.
        client_cpu_share: CPU time of this client over the duration.
    """

    streams: int | None
    completed: int
    failed: dict[str, int]
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    reasoning_tokens: int | None
    estimated: int
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    requests_per_s: float | None
    offered_per_s: float | None
    goodput_per_s: float | None
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    decode_tokens_per_s: Distribution
    client_cpu_share: float | None


def summarize(result: LoadResult, objectives: Objectives | None = None) -> Summary:
    return summarize_runs([result], objectives)


def summarize_runs(results: Sequence[LoadResult], objectives: Objectives | None = None) -> Summary:
    samples = [sample for result in results for sample in result.samples]
    good = [sample for sample in samples if sample.failure is None]
    failed = Counter(str(sample.failure) for sample in samples if sample.failure is not None)
    tokens = sum(sample.output_tokens for sample in good)
    prompts = _sum(sample.prompt_tokens for sample in good)
    # rates are of whole runs: of one that was cut short, what was under way is not known
    whole = [result for result in results if not result.interrupted]
    rated = [sample for result in whole for sample in result.samples if sample.failure is None]
    rated_s = sum(result.duration_s for result in whole)
    rated_tokens = sum(sample.output_tokens for sample in rated)
    rated_prompts = _sum(sample.prompt_tokens for sample in rated)
    all_s = sum(result.duration_s for result in results)

    def rate(count: float | None) -> float | None:
        return count / rated_s if rated_s > 0 and count is not None else None

    return Summary(
        streams=results[0].streams if results else None,
        completed=len(good),
        failed=dict(sorted(failed.items())),
        duration_s=all_s,
        prompt_tokens=prompts,
        cached_tokens=_sum(sample.cached_tokens for sample in good),
        output_tokens=tokens,
        reasoning_tokens=_sum(sample.reasoning_tokens for sample in good),
        estimated=sum(sample.estimated for sample in good),
        output_tokens_per_s=rate(rated_tokens) if rated else None,
        total_tokens_per_s=rate(None if rated_prompts is None else rated_prompts + rated_tokens),
        requests_per_s=rate(len(rated)) if rated else None,
        offered_per_s=_offered_per_s(results),
        goodput_per_s=rate(sum(map(objectives.kept_by, rated))) if objectives else None,
        ttft_s=Distribution.of(value for sample in good if (value := ttft_s(sample)) is not None),
        itl_s=Distribution.of(gap for sample in good for gap in gaps_s(sample)),
        tpot_s=Distribution.of(value for sample in good if (value := tpot_s(sample)) is not None),
        e2e_s=Distribution.of(sample.end_s - sample.sent_s for sample in good),
        decode_tokens_per_s=Distribution.of(1 / value for sample in good if (value := tpot_s(sample))),
        client_cpu_share=sum(result.client_cpu_s for result in results) / all_s if all_s > 0 else None,
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """Of requests that all told theirs; None when one did not (a part would look like the whole)."""
    told = list(counts)
    known = [count for count in told if count is not None]
    return sum(known) if told and len(known) == len(told) else None


def _offered_per_s(results: Sequence[LoadResult]) -> float | None:
    """Arrivals per second between the first and the last, over runs whose arrivals were scheduled."""
    gaps, span_s = 0, 0.0
    for result in results:
        sent = [sample.sent_s for sample in result.samples if sample.due_s is not None]
        if len(sent) > 1:
            gaps += len(sent) - 1
            span_s += max(sent) - min(sent)
    return gaps / span_s if span_s > 0 else None


def ttft_s(sample: Sample) -> float | None:
    first = sample.first_text_s
    return None if first is None else first - sample.sent_s


def gaps_s(sample: Sample) -> list[float]:
    return [after - before for before, after in pairwise(sample.text_times_s)]


def tpot_s(sample: Sample) -> float | None:
    """None for fewer than two tokens or events: there is nothing between them."""
    if sample.output_tokens < 2 or len(sample.text_times_s) < 2:
        return None
    return (sample.text_times_s[-1] - sample.text_times_s[0]) / (sample.output_tokens - 1)
