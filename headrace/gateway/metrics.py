"""Prometheus metrics of one engine; docs/metrics.md defines every name and interval.

Plain counters and histograms owned by one object on the event loop; Prometheus' client library is used for the
exposition only. Gauges are read from the engine's state at scrape time, so they are never stale. Every family and
every label value is there from the first scrape on, with 0; label values come from closed sets, never from users.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.core.pressure import LEVELS
from headrace.gateway.memory_report import prefix_cache_bytes
from headrace.gateway.service import EngineState
from headrace.worker.protocol import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FINISH_REASONS = ("stop", "length", "abort", "error", "timeout")
REJECT_REASONS = (
    "queue_full", "rate_limit", "not_ready", "context_length_exceeded", "invalid_request_error",
    "invalid_prompt", "model_not_found", "not_found", "method_not_allowed", "request_too_large", "invalid_api_key",
    "unsupported_encoding", "invalid_grammar", "request_not_found", "response_not_found",
    "previous_response_not_found", "reload_failed", "timeout", "queue_timeout", "internal_error", "other",
)  # fmt: skip
LONG_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 600.0,
)  # fmt: skip
SHORT_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0,
    600.0,
)  # fmt: skip
BATCH_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)

# Request intervals: vLLM's names with vLLM's meaning.
_REQUEST_INTERVALS = {
    "vllm:time_to_first_token_seconds": "From the arrival of a request to its first output token.",
    "vllm:inter_token_latency_seconds": "Between two successive output tokens of one sequence.",
    "vllm:e2e_request_latency_seconds": "From the arrival of a request to its last output token.",
    "vllm:request_queue_time_seconds": "From submission to the first scheduled prefill of a request.",
    "vllm:request_prefill_time_seconds": "From the first scheduled prefill to the first output token.",
    "vllm:request_decode_time_seconds": "From the first to the last output token of a request.",
}


class EngineTotals(Protocol):
    """Counts over all workers of one engine; a worker's own begin at 0 with each start."""

    prompt_tokens_total: int
    generation_tokens_total: int
    replayed_total: int

    @property
    def held(self) -> int:
        """Requests waiting in the gateway for a worker."""
        ...

    def lifetime_stats(self) -> EngineStats:
        """Stats whose ``_total`` fields cover all workers so far."""
        ...

    def state(self) -> EngineState: ...


class Histogram:
    """Counts per bucket; ``bounds`` are inclusive upper limits, the last bucket is open."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, text: str, labels: dict[str, str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(name, text, labels=list(labels))
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


class Metrics(Collector):
    """Implements ``headrace.gateway.service.RequestMetrics``; ``step`` is called by the worker client.

    Args:
        model: the served name; label ``model`` on everything, and ``model_name`` (vLLM's dashboards) on ``vllm:``.
        keys: names of the API keys.
    """

    def __init__(self, model: str, engine: EngineTotals, keys: Iterable[str] = ()) -> None:
        self._engine = engine
        self._own = {"model": model}
        self._vllm = {"model_name": model, "model": model}
        self._intervals = {
            name: Histogram(SHORT_BUCKETS_S if "inter_token" in name else LONG_BUCKETS_S)
            for name in _REQUEST_INTERVALS
        }
        self._finished = dict.fromkeys(FINISH_REASONS, 0)
        self._rejected = dict.fromkeys(REJECT_REASONS, 0)
        self._key_tokens: dict[tuple[str, str], int] = {}
        self.add_keys(keys or ("",))
        self._unknown_fields = 0
        self._forced_tokens = 0
        self._step_s = Histogram(SHORT_BUCKETS_S)
        self._stall_s = Histogram(SHORT_BUCKETS_S)
        self._batch = Histogram(BATCH_BUCKETS)
        self._last_step_at: float | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def add_keys(self, keys: Iterable[str]) -> None:
        """Count the tokens of these API keys from now on."""
        for key in keys:
            for kind in ("prompt", "generation"):
                self._key_tokens.setdefault((key, kind), 0)

    # -- events of requests (RequestMetrics)

    def rejected(self, reason: str) -> None:
        self._rejected[reason if reason in self._rejected else "other"] += 1

    def scheduled(self, queue_s: float) -> None:
        self._intervals["vllm:request_queue_time_seconds"].observe(queue_s)

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        self._intervals["vllm:time_to_first_token_seconds"].observe(ttft_s)
        self._intervals["vllm:request_prefill_time_seconds"].observe(prefill_s)

    def inter_token(self, gap_s: float, tokens: int) -> None:
        self._intervals["vllm:inter_token_latency_seconds"].observe(gap_s, tokens)

    def forced_tokens(self, count: int) -> None:
        self._forced_tokens += count

    def sequence_finished(self, reason: str) -> None:
        self._finished[reason if reason in self._finished else "error"] += 1

    def ended(
        self, *, e2e_s: float | None, decode_s: float | None, prompt_tokens: int, completion_tokens: int, key: str
    ) -> None:
        if e2e_s is not None:
            self._intervals["vllm:e2e_request_latency_seconds"].observe(e2e_s)
        if decode_s is not None:
            self._intervals["vllm:request_decode_time_seconds"].observe(decode_s)
        for kind, tokens in (("prompt", prompt_tokens), ("generation", completion_tokens)):
            if (key, kind) in self._key_tokens:
                self._key_tokens[key, kind] += tokens

    def unknown_field(self, count: int = 1) -> None:
        self._unknown_fields += count

    # -- events of steps

    def step(self, stats: EngineStats, now: float) -> None:
        """One step's outputs arrived at ``now`` (monotonic)."""
        if stats.step_s:
            self._step_s.observe(stats.step_s)
        if stats.running:
            self._batch.observe(stats.running)
            if self._last_step_at is not None:
                self._stall_s.observe(now - self._last_step_at)
        self._last_step_at = now if stats.running else None

    # -- exposition

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._request_families()
        yield from self._engine_families()
        yield from self._memory_families()

    def _request_families(self) -> Iterator[Metric]:
        for name, text in _REQUEST_INTERVALS.items():
            yield self._intervals[name].family(name, text, self._vllm)
        yield _family(
            CounterMetricFamily, "vllm:request_success", "Sequences that ended, by reason.", self._vllm,
            "finished_reason", self._finished,
        )  # fmt: skip
        yield _family(
            CounterMetricFamily, "headrace:requests_rejected", "Requests refused before any output.", self._own,
            "reason", self._rejected,
        )  # fmt: skip
        yield _family(
            CounterMetricFamily, "headrace:unknown_fields", "Request fields that no known API has.", self._own,
            value=self._unknown_fields,
        )  # fmt: skip
        tokens = CounterMetricFamily(
            "headrace:key_tokens", "Tokens of ended requests per API key.", labels=["model", "key", "kind"]
        )
        for (key, kind), count in self._key_tokens.items():
            tokens.add_metric([self._own["model"], key, kind], count)
        yield tokens

    def _engine_families(self) -> Iterator[Metric]:
        state, totals = self._engine.state(), self._engine.lifetime_stats()
        stats = state.stats
        generated = self._engine.generation_tokens_total + self._forced_tokens
        usage = stats.blocks_held / stats.blocks_total if stats.blocks_total else 0.0
        for name, text, value in (
            ("num_requests_running", "Requests being prefilled or decoded.", float(stats.running)),
            ("num_requests_waiting", "Requests waiting to run.", float(stats.waiting + self._engine.held)),
            ("kv_cache_usage_perc", "Share of the KV blocks that requests hold, 0 to 1.", usage),
        ):
            yield _family(GaugeMetricFamily, f"vllm:{name}", text, self._vllm, value=value)
        for name, text, count in (
            ("prompt_tokens", "Prompt tokens of requests that began to answer.", self._engine.prompt_tokens_total),
            ("generation_tokens", "Output tokens given to clients.", generated),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prefix_queries_total),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.prefix_hits_total),
            (
                "num_preemptions",
                "Sequences that lost their blocks and were computed again.",
                totals.preemptions_total,
            ),
        ):
            yield _family(CounterMetricFamily, f"vllm:{name}", text, self._vllm, value=count)
        for name, text, count in (
            ("steps", "Steps of all workers.", totals.steps_total),
            ("worker_restarts", "Workers started in the place of one that died.", state.restarts),
            ("worker_reloads", "Workers started in the place of one that was told to go.", state.reloads),
            ("quarantined_requests", "Replays of a request alone, as a suspect of a death.", state.quarantined),
            ("replayed_requests", "Requests continued by another worker.", self._engine.replayed_total),
        ):
            yield _family(CounterMetricFamily, f"headrace:{name}", text, self._own, value=count)
        up = float(state.status == "ready")
        yield _family(GaugeMetricFamily, "headrace:worker_up", "1 while a worker steps.", self._own, value=up)
        yield self._step_s.family("headrace:step_seconds", "Device time of a step.", self._own)
        yield self._batch.family("headrace:batch_size", "Running sequences, once per step.", self._own)
        yield self._stall_s.family(
            "headrace:decode_stall_seconds", "Between two successive steps while sequences run.", self._own
        )

    def _memory_families(self) -> Iterator[Metric]:
        state = self._engine.state()
        stats, ready = state.stats, state.ready
        free = stats.blocks_total - stats.blocks_held - stats.blocks_cached
        blocks = {"held": stats.blocks_held, "cached": stats.blocks_cached, "free": free}
        yield _family(GaugeMetricFamily, "headrace:kv_blocks", "KV blocks by state.", self._own, "state", blocks)
        groups = GaugeMetricFamily(
            "headrace:kv_group_blocks", "KV blocks by layer group and state.", labels=["model", "group", "state"]
        )
        for group in stats.groups:
            for name, count in (("held", group.held), ("cached", group.cached), ("free", group.free)):
                groups.add_metric([self._own["model"], group.name, name], count)
        yield groups
        plan = {} if ready is None else {k: v for k, v in ready.plan.items() if not isinstance(v, str)}
        yield _family(
            GaugeMetricFamily, "headrace:prefix_cache_bytes", "KV that only the prefix cache keeps.", self._own,
            value=prefix_cache_bytes(state),
        )  # fmt: skip
        yield _family(
            GaugeMetricFamily, "headrace:memory_headroom_bytes", "Planned for everybody else.", self._own,
            value=plan.get("headroom_bytes", 0),
        )  # fmt: skip
        yield _family(
            GaugeMetricFamily, "headrace:process_memory_bytes", "Physical memory of the worker.", self._own,
            value=stats.process_bytes,
        )  # fmt: skip
        memory = {"active": stats.active_bytes, "peak": stats.peak_bytes, "cache": stats.cache_bytes}
        yield _family(
            GaugeMetricFamily, "headrace:device_memory_bytes", "Memory of the worker's arrays and buffer cache.",
            self._own, "kind", memory,
        )  # fmt: skip
        yield _family(
            GaugeMetricFamily,
            "headrace:memory_plan",
            "The memory plan in force, by item.",
            self._own,
            "item",
            plan,
        )
        yield _family(
            GaugeMetricFamily, "headrace:memory_available_bytes", "What the machine has free.", self._own,
            value=stats.available_bytes,
        )  # fmt: skip
        yield _family(
            GaugeMetricFamily, "headrace:memory_pressure", "Measures in force: 0 none to 4 preempting.", self._own,
            value=LEVELS.index(stats.pressure) if stats.pressure in LEVELS else 0,
        )  # fmt: skip
        implementation = {} if ready is None else {ready.attention: 1}
        yield _family(
            GaugeMetricFamily, "headrace:attention_info", "1 for the attention implementation in use.", self._own,
            "implementation", implementation,
        )  # fmt: skip


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    text: str,
    labels: dict[str, str],
    by: str = "",
    values: dict[str, int] | dict[str, float] | dict[str, int | float] | None = None,
    value: float = 0.0,
) -> Metric:
    """One family with fixed ``labels``: a single ``value``, or ``values`` by one more label."""
    if not by:
        family = kind(name, text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
    family = kind(name, text, labels=[*labels, by])
    for key, amount in (values or {}).items():
        family.add_metric([*labels.values(), key], amount)
    return family
