"""A server's Prometheus metrics during a run: read before, while and after, and what follows from that.

Counters and histograms are differences between after and before; gauges are watched. Names are vLLM's, with older
spellings behind them, and Headrace's own for device memory. What a server does not export is None.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.bench.server import Api, BenchFault
from headrace.bench.stats import PERCENTS, Distribution

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = Mapping[str, str]
Series = Mapping[str, Sequence[tuple[Labels, float]]]


def parse(text: str) -> dict[str, list[tuple[Labels, float]]]:
    """Samples by name; comments, timestamps and lines that are no samples are passed over."""
    series: dict[str, list[tuple[Labels, float]]] = {}
    for line in text.split("\n"):
        found = _LINE.match(line.rstrip("\r"))
        if not found:
            continue
        name, labels, number = found.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        pairs = {
            key: re.sub(r'\\[\\"n]', lambda m: _ESCAPES[m[0]], raw) for key, raw in _LABEL.findall(labels or "")
        }
        series.setdefault(name, []).append((pairs, value))
    return series


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading; series of other models are left out where a label tells."""

    series: Series
    model: str

    def __call__(self, *names: str, **labels: str) -> float | None:
        """Sum of the samples of the first of ``names`` that is there; None when none is."""
        for name in names:
            found = [value for own, value in self.series.get(name, ()) if self._fits(own, labels)]
            if found:
                return sum(found)
        return None

    def buckets(self, name: str) -> dict[float, float]:
        """Cumulative counts of a histogram by upper bound."""
        counts: dict[float, float] = {}
        for own, value in self.series.get(name + "_bucket", ()):
            if self._fits(own, {}) and "le" in own:
                bound = float(own["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return counts

    def _fits(self, own: Labels, wanted: Labels) -> bool:
        model = own.get("model_name", own.get("model"))
        return all(own.get(key) == value for key, value in wanted.items()) and model in (None, self.model)


@dataclass(frozen=True, slots=True)
class Moment:
    """Gauges at one time, seconds since the watching began."""

    at_s: float
    kv_usage: float | None
    running: float | None
    waiting: float | None
    memory_bytes: float | None


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """What the server counted during one run.

    Attributes:
        prefix_queries, prefix_hits: prompt tokens looked up, and found.
        preemptions: sequences that were computed again.
        queue_sum_s, queue_count, queue_buckets: the histogram of queue waits; pairs (upper bound s, count up to
            it), the open bucket's bound None.
        peak_memory_bytes: the server's own highest so far, since its start.
        moments: gauges over time.
    """

    prefix_queries: float | None = None
    prefix_hits: float | None = None
    preemptions: float | None = None
    queue_sum_s: float | None = None
    queue_count: float | None = None
    queue_buckets: tuple[tuple[float | None, float], ...] = ()
    peak_memory_bytes: float | None = None
    moments: tuple[Moment, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of a cell from the server's metrics; every one None without them.

    ``queue_wait_s``: its mean is exact, its percentiles are interpolated in the server's buckets.
    """

    cache_hit_rate: float | None
    kv_usage_mean: float | None
    kv_usage_max: float | None
    running_max: float | None
    waiting_max: float | None
    preemptions: float | None
    peak_memory_bytes: float | None
    memory_max_bytes: float | None
    queue_wait_s: Distribution


QUEUE = "vllm:request_queue_time_seconds"


@dataclass
class Watcher:
    """Reads the metrics of one model; ``interval_s`` between readings while a run is on."""

    api: Api
    model: str
    interval_s: float = 0.5
    clock: Callable[[], float] = time.perf_counter
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    async def scrape(self) -> Scrape | None:
        """None where there are no metrics (or none for us)."""
        try:
            status, body = await self.api.call("GET", "/metrics")
        except BenchFault:
            return None
        scrape = Scrape(parse(body.decode("utf-8", "replace")), self.model) if status == 200 else None
        return scrape if scrape and scrape.series else None

    async def watch(self, moments: list[Moment]) -> None:
        """Appends moments until cancelled."""
        while True:
            scrape = await self.scrape()
            if scrape is not None:
                moments.append(self.moment(scrape))
            await asyncio.sleep(self.interval_s)

    def moment(self, scrape: Scrape) -> Moment:
        return Moment(
            at_s=self.clock() - self._began_s,
            kv_usage=scrape("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            running=scrape("vllm:num_requests_running"),
            waiting=scrape("vllm:num_requests_waiting"),
            memory_bytes=scrape("headrace:device_memory_bytes", kind="active"),
        )


def record(before: Scrape | None, after: Scrape | None, moments: Sequence[Moment]) -> ServerRecord | None:
    """None when the metrics could not be read at both ends."""
    if before is None or after is None:
        return None

    def grown(*names: str) -> float | None:
        old, new = before(*names), after(*names)
        return None if new is None else new - (old or 0.0)

    old = before.buckets(QUEUE)
    buckets = [(bound, count - old.get(bound, 0.0)) for bound, count in sorted(after.buckets(QUEUE).items())]
    return ServerRecord(
        prefix_queries=grown("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        prefix_hits=grown("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        preemptions=grown("vllm:num_preemptions_total"),
        queue_sum_s=grown(QUEUE + "_sum"),
        queue_count=grown(QUEUE + "_count"),
        queue_buckets=tuple((None if bound == float("inf") else bound, count) for bound, count in buckets),
        peak_memory_bytes=after("headrace:device_memory_bytes", kind="peak"),
        moments=tuple(moments),
    )


def server_figures(records: Sequence[ServerRecord]) -> ServerFigures:
    """Figures over all runs of a cell."""
    moments = [moment for one in records for moment in one.moments]
    queries, hits = _total(records, "prefix_queries"), _total(records, "prefix_hits")
    usage = [moment.kv_usage for moment in moments if moment.kv_usage is not None]
    return ServerFigures(
        cache_hit_rate=hits / queries if queries and hits is not None else None,
        kv_usage_mean=sum(usage) / len(usage) if usage else None,
        kv_usage_max=max(usage, default=None),
        running_max=_highest(moment.running for moment in moments),
        waiting_max=_highest(moment.waiting for moment in moments),
        preemptions=_total(records, "preemptions"),
        peak_memory_bytes=_highest(one.peak_memory_bytes for one in records),
        memory_max_bytes=_highest(moment.memory_bytes for moment in moments),
        queue_wait_s=_queue_wait(records),
    )


def _total(records: Sequence[ServerRecord], name: str) -> float | None:
    known = [value for one in records if (value := getattr(one, name)) is not None]
    return float(sum(known)) if known else None


def _highest(values: object) -> float | None:
    known = [value for value in values if value is not None]  # type: ignore[attr-defined]
    return max(known, default=None)


def _queue_wait(records: Sequence[ServerRecord]) -> Distribution:
    count, total_s = _total(records, "queue_count"), _total(records, "queue_sum_s")
    mean = total_s / count if count and total_s is not None else None
    counts: dict[float, float] = {}
    for one in records:
        for bound, value in one.queue_buckets:
            key = float("inf") if bound is None else bound
            counts[key] = counts.get(key, 0.0) + value
    return Distribution(mean, *(bucket_percentile(counts, percent) for percent in PERCENTS))


def bucket_percentile(counts: Mapping[float, float], percent: float) -> float | None:
    """Percentile of cumulative bucket counts, linear inside a bucket; None when empty or in the open bucket."""
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    wanted = counts[bounds[-1]] * percent / 100
    low, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted and counts[bound] > below:
            if bound == float("inf"):
                return None
            return low + (bound - low) * (wanted - below) / (counts[bound] - below)
        low, below = bound, counts[bound]
    return None
