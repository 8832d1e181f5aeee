"""The exposition: complete from the first scrape, parseable, bounded, and right."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.scheduler_types import GroupBlocks
from headrace.gateway.metrics import Metrics
from headrace.gateway.service import EngineState
from headrace.worker.protocol import EngineStats, Ready

READY = Ready(
    pid=1, device="cpu", max_model_len=10, block_size=16, num_blocks=100, vocab_size=10, attention="reference",
    plan={"pool_bytes": 101_000, "blocks_full": 100, "weights_bytes": 5, "note": "text"},
)  # fmt: skip


class Engine:
    prompt_tokens_total = 0
    generation_tokens_total = 0
    replayed_total = 0
    held = 0

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def lifetime_stats(self) -> EngineStats:
        return self._state.stats

    def state(self) -> EngineState:
        return self._state


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert family.documentation and family.type != "unknown", family.name
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"twice: {key}"
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    hits = [v for (n, have), v in samples(metrics).items() if n == name and set(labels.items()) <= have]
    assert len(hits) == 1, (name, labels, hits)
    return hits[0]


NAMES = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count",
    "vllm:inter_token_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:request_queue_time_seconds_count",
    "vllm:request_prefill_time_seconds_count",
    "vllm:request_decode_time_seconds_count",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "headrace:kv_blocks",
    "headrace:prefix_cache_bytes",
    "headrace:requests_rejected_total",
    "headrace:unknown_fields_total",
    "headrace:worker_restarts_total",
    "headrace:replayed_requests_total",
    "headrace:device_memory_bytes",
    "headrace:step_seconds_count",
    "headrace:batch_size_count",
    "headrace:key_tokens_total",
    "headrace:decode_stall_seconds_count",
    "headrace:worker_up",
]


def test_all_families_are_there_at_the_first_scrape_with_zero() -> None:
    found = samples(Metrics("m", Engine(EngineState(status="starting"))))
    for name in NAMES:
        values = [v for (n, _), v in found.items() if n == name]
        assert values and not any(values), name


def test_labels() -> None:
    for (name, labels), _ in samples(Metrics("m", Engine(EngineState(status="starting")))).items():
        assert ("model", "m") in labels, name
        if name.startswith("vllm:"):
            assert ("model_name", "m") in labels, name
        else:
            assert name.startswith("headrace:")


def test_users_cannot_add_series() -> None:
    metrics = Metrics("m", Engine(EngineState(status="ready", ready=READY)), ["alice"])
    before = len(samples(metrics))
    for i in range(200):
        metrics.rejected(f"reason {i}")
        metrics.sequence_finished("stop")
        metrics.ended(e2e_s=1.0, decode_s=1.0, prompt_tokens=1, completion_tokens=1, key=f"key {i}")
    assert len(samples(metrics)) == before
    assert value(metrics, "headrace:requests_rejected_total", reason="other") == 200
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 200


def test_tokens_that_no_engine_sampled_are_output_too() -> None:
    engine = Engine(EngineState(status="ready"))
    engine.generation_tokens_total = 7
    metrics = Metrics("m", engine)
    metrics.forced_tokens(3)
    assert value(metrics, "vllm:generation_tokens_total") == 10


def test_a_request_without_output_has_no_times_but_its_prompt_counts() -> None:
    metrics = Metrics("m", Engine(EngineState(status="ready")), ["alice"])
    metrics.ended(e2e_s=None, decode_s=None, prompt_tokens=5, completion_tokens=0, key="alice")
    assert value(metrics, "headrace:key_tokens_total", key="alice", kind="prompt") == 5
    for interval in ("e2e_request_latency", "request_decode_time"):
        assert value(metrics, f"vllm:{interval}_seconds_count") == 0


def test_histograms_are_cumulative_and_reach_600_s() -> None:
    metrics = Metrics("m", Engine(EngineState(status="ready")))
    metrics.inter_token(0.02, 3)
    metrics.inter_token(700.0, 1)
    name = "vllm:inter_token_latency_seconds"
    assert value(metrics, f"{name}_bucket", le="0.015") == 0
    assert value(metrics, f"{name}_bucket", le="0.025") == 3
    assert value(metrics, f"{name}_bucket", le="600.0") == 3
    assert value(metrics, f"{name}_bucket", le="+Inf") == 4
    assert value(metrics, f"{name}_count") == 4
    assert value(metrics, f"{name}_sum") == pytest.approx(700.06)


def test_gauges_follow_the_engine() -> None:
    groups = (GroupBlocks("full", 60, 20, 30, 1000), GroupBlocks("sliding_64", 40, 5, 20, 1500))
    stats = EngineStats(
        running=3, waiting=2, blocks_total=100, blocks_held=25, blocks_cached=50, active_bytes=9, groups=groups
    )
    engine = Engine(EngineState(status="ready", ready=READY, stats=stats, restarts=2))
    engine.held = 4
    metrics = Metrics("m", engine)
    assert value(metrics, "vllm:num_requests_running") == 3
    assert value(metrics, "vllm:num_requests_waiting") == 6
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "headrace:kv_blocks", state="free") == 25
    assert value(metrics, "headrace:kv_group_blocks", group="sliding_64", state="free") == 15
    assert value(metrics, "headrace:prefix_cache_bytes") == 30 * 1000 + 20 * 1500
    assert value(metrics, "headrace:device_memory_bytes", kind="active") == 9
    assert value(metrics, "headrace:worker_restarts_total") == 2
    assert value(metrics, "headrace:memory_plan", item="weights_bytes") == 5
    assert value(metrics, "headrace:attention_info", implementation="reference") == 1


def test_stalls_are_gaps_between_steps_while_sequences_run() -> None:
    metrics = Metrics("m", Engine(EngineState(status="ready")))
    for now, running in ((0.0, 1), (0.1, 1), (0.2, 0), (50.0, 1), (50.1, 1)):
        metrics.step(EngineStats(running=running, step_s=0.05), now)
    assert value(metrics, "headrace:decode_stall_seconds_count") == 2
    assert value(metrics, "headrace:decode_stall_seconds_sum") == pytest.approx(0.2)
    assert value(metrics, "headrace:step_seconds_count") == 5
