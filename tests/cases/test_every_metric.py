"""Every metric is provoked on one real server and has the value that what was done demands.

The names are closed: what is exposed, what docs/metrics.md lists and what is tested here are the same sets.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.scripted import expected_prompt_tokens
from support.server import Metrics, Server, ServerRoom, await_ready, is_idle, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
SERVE = (sys.executable, str(ROOT / "tests" / "resilience" / "faulty_serve.py"))
NUM_BLOCKS = 1200
PRESSING_TOKENS = 4650
QUEUE_TIMEOUT_S = 5
LIMITS = ("--max-num-seqs", "4", "--max-queue", "2", "--max-cache-blocks", str(NUM_BLOCKS))
INTERVALS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "decode": "vllm:request_decode_time_seconds",
}
ITL = "vllm:inter_token_latency_seconds"

NAMED = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total", ITL, *INTERVALS.values(), "vllm:request_success_total",
    "vllm:num_preemptions_total", "headrace:kv_blocks", "headrace:prefix_cache_bytes",
    "headrace:device_memory_bytes", "headrace:memory_headroom_bytes", "headrace:memory_plan",
    "headrace:worker_restarts_total", "headrace:replayed_requests_total", "headrace:step_seconds",
    "headrace:batch_size", "headrace:decode_stall_seconds", "headrace:attention_info",
    "headrace:requests_rejected_total", "headrace:unknown_fields_total", "headrace:key_tokens_total",
}  # fmt: skip
"""What a user is promised: vLLM's names, and ours for the rest."""

NAME = re.compile(r"(?:vllm|headrace):\w+")


class Metered:
    """The server, and differences between two scrapes of it."""

    def __init__(self, server: Server, fault_file: Path) -> None:
        self.server = server
        self.fault_file = fault_file
        self.before = server.metrics()

    def delta(self, name: str, **labels: str) -> float:
        """Since ``before``, of the newest scrape."""
        return self.server.metrics()(name, **labels) - self.before(name, **labels)

    def settled(self) -> Metrics:
        """The first scrape with nothing running."""
        return self.server.wait_idle()

    def arm(self, kind: str, after: int) -> None:
        draft = self.fault_file.with_suffix(".draft")
        draft.write_text(json.dumps({"kind": kind, "after": after}))
        draft.rename(self.fault_file)


@pytest.fixture(scope="module")
def metered_server(
    server_room: ServerRoom, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("metered")
    keys = ("--api-key", "alice:secret-a", "--api-key", "bob:secret-b")
    words = [server_room.path("plain"), "--port", "0", "--served-model-name", "m", "--memory-headroom", "0.02"]
    words += [*LIMITS, *keys, "--queue-timeout", str(QUEUE_TIMEOUT_S)]
    environment = {**server_room.environment, "HEADRACE_TEST_FAULT": str(folder / "fault")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*SERVE, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    try:
        server = await_ready(process, "m", folder / "log", "secret-a")
        server.client.check_control()
        yield server, folder / "fault"
        server.end()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, server.log()[-3000:]


@pytest.fixture
def metered(metered_server: tuple[Server, Path]) -> Metered:
    server, fault_file = metered_server
    server.wait_idle()
    server.client.http.delete("/v1/cache/prefix")
    wait_until(lambda: server.metrics()("headrace:kv_blocks", state="cached") == 0, 20, "an empty cache")
    return Metered(server, fault_file)


@contextmanager
def streams(server: Server, count: int, **fields: Any) -> Iterator[list[Iterator[dict[str, Any]]]]:
    """So many endless streams, each of which has begun."""
    with ExitStack() as stack:
        found = [stack.enter_context(server.client.streaming("<|s01|>", **fields)) for _ in range(count)]
        for chunks in found:
            for _ in range(3):
                next(chunks)
        yield found


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """The worker stands still."""
    worker = psutil.Process(server.worker_pid)
    worker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send_signal(signal.SIGCONT)
    wait_until(lambda: server.metrics()("headrace:worker_up") == 1, 30, "the worker to be heard again")


# -- requests and their times --------------------------------------------------------------------------


def test_one_request(metered: Metered) -> None:
    answer = metered.server.client.chat("<|s05|>", nonsense=1, more_nonsense=2)
    prompt, output = expected_prompt_tokens("<|s05|>"), 9
    assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (prompt, output)
    metered.settled()
    delta = metered.delta
    assert delta("vllm:prompt_tokens_total") == prompt
    assert delta("vllm:generation_tokens_total") == output
    assert delta("vllm:request_success_total", finished_reason="stop") == delta("vllm:request_success_total") == 1
    for kind, tokens in (("prompt", prompt), ("generation", output)):
        assert delta("headrace:key_tokens_total", key="alice", kind=kind) == tokens
        assert delta("headrace:key_tokens_total", key="bob", kind=kind) == 0
    assert delta("headrace:unknown_fields_total") == 2
    times = {short: delta(f"{name}_sum") for short, name in INTERVALS.items()}
    assert all(delta(f"{name}_count") == 1 for name in INTERVALS.values())
    assert min(times[name] for name in ("ttft", "e2e", "queue", "prefill")) > 0
    assert times["decode"] >= 0  # a gateway that was busy has all tokens at once
    assert times["queue"] + times["prefill"] <= times["ttft"] + 1e-6
    assert times["ttft"] + times["decode"] == pytest.approx(times["e2e"], abs=1e-6)
    # the end token has no text, but is an output token like any other
    assert delta(f"{ITL}_count") == output - 1
    assert delta(f"{ITL}_sum") == pytest.approx(times["decode"], abs=1e-6)
    assert delta("headrace:requests_rejected_total") == 0


def test_a_prompt_that_is_only_scored_counts_for_its_key(metered: Metered) -> None:
    answer = metered.server.client.complete("ab<|s05|>", max_tokens=0, echo=True, logprobs=1)
    assert answer.usage["prompt_tokens"] == 3
    metered.settled()
    delta = metered.delta
    assert delta("vllm:prompt_tokens_total") == delta("headrace:key_tokens_total", key="alice", kind="prompt") == 3
    assert delta("vllm:request_success_total", finished_reason="length") == 1
    assert all(delta(f"{INTERVALS[name]}_count") == 0 for name in ("ttft", "e2e", "decode"))


def test_steps_of_one_request(metered: Metered) -> None:
    """Alone: a step samples the first token, each further one samples one more, and one may run too far."""
    metered.server.client.chat("<|s05|>")
    metered.settled()

    def observed_once() -> bool:  # the step that ran too far may be reported between two looks
        return metered.delta("headrace:step_seconds_count") == metered.delta("headrace:steps_total")

    wait_until(observed_once, 20, "a step observed once")
    assert 9 <= metered.delta("headrace:steps_total") <= 10
    assert metered.delta("headrace:step_seconds_sum") > 0
    batches = metered.delta("headrace:batch_size_count")
    assert batches >= 8  # nothing runs any more when the ninth is counted
    assert metered.delta("headrace:batch_size_sum") == batches  # one sequence in each
    assert 0 < metered.delta("headrace:decode_stall_seconds_count") <= batches
    assert metered.delta("headrace:decode_stall_seconds_sum") > 0


def test_a_batch_of_four(metered: Metered) -> None:
    with streams(metered.server, 4):
        wait_until(lambda: metered.delta("headrace:batch_size_bucket", le="4.0") > 40, 30, "steps of four")
    metered.settled()
    assert metered.delta("headrace:batch_size_sum") / metered.delta("headrace:batch_size_count") > 1
    assert metered.delta("headrace:batch_size_count") == metered.delta("headrace:batch_size_bucket", le="4.0")


def test_the_other_ways_to_end(metered: Metered) -> None:
    server = metered.server
    server.client.chat("<|s05|>", max_tokens=3)
    assert metered.delta("vllm:request_success_total", finished_reason="length") == 1
    with streams(server, 2):
        pass
    wait_until(lambda: metered.delta("vllm:request_success_total", finished_reason="abort") == 2, 20, "two aborts")
    with stopped(server):
        assert server.client.chat("<|s05|>").status == 504  # it waits for too long
    assert metered.delta("vllm:request_success_total", finished_reason="timeout") == 1
    assert metered.delta("vllm:request_success_total", finished_reason="error") == 0


def test_what_runs_and_what_waits(metered: Metered) -> None:
    server = metered.server
    with streams(server, 4), ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(server.client.streaming("<|s01|>"))
        wait_until(lambda: server.metrics()("vllm:num_requests_waiting") == 2, 20, "two that wait")
        scrape = server.metrics()
        assert scrape("vllm:num_requests_running") == 4
        assert server.client.chat("<|s05|>").status == 429
        assert metered.delta("headrace:requests_rejected_total", reason="queue_full") == 1
        held, cached, free = (scrape("headrace:kv_blocks", state=state) for state in ("held", "cached", "free"))
        assert held >= 4 and held + cached + free == NUM_BLOCKS
        assert scrape("vllm:kv_cache_usage_perc") == held / NUM_BLOCKS
        assert scrape("headrace:kv_group_blocks", group="full", state="held") == held
    assert is_idle(metered.settled())


def test_refusals_by_reason(metered: Metered) -> None:
    client = metered.server.client
    client.chat(model="other")
    client.get("/nowhere")
    client.get("/v1/chat/completions")
    client.chat("x" * 9000)
    client.chat(temperature="hot")
    client.get("/v1/models", headers={"authorization": "Bearer wrong"})
    expected = {
        "model_not_found": 1, "not_found": 1, "method_not_allowed": 1, "context_length_exceeded": 1,
        "invalid_request_error": 1, "invalid_api_key": 1,
    }  # fmt: skip
    for reason, count in expected.items():
        assert metered.delta("headrace:requests_rejected_total", reason=reason) == count, reason
    assert metered.delta("headrace:requests_rejected_total") == len(expected)
    assert metered.delta("vllm:request_success_total") == 0


# -- cache and memory ----------------------------------------------------------------------------------


def test_the_prefix_cache(metered: Metered) -> None:
    server = metered.server
    prompt = "<|s05|>" + "x" * 150
    tokens = expected_prompt_tokens(prompt)
    cached = [server.client.chat(prompt).cached_tokens for _ in range(2)]
    scrape = metered.settled()
    block = server.status()["engine"]["block_size"]
    assert cached == [0, tokens - 1]  # the last one is computed: its logits are needed
    assert metered.delta("vllm:prefix_cache_queries_total") == 2 * tokens
    assert metered.delta("vllm:prefix_cache_hits_total") == cached[1]
    blocks = scrape("headrace:kv_blocks", state="cached")
    assert blocks >= cached[1] // block
    (group,) = server.status()["memory"]["kv_blocks"]
    assert scrape("headrace:prefix_cache_bytes") == blocks * group["block_bytes"]
    assert scrape("headrace:kv_group_blocks", group="full", state="cached") == blocks


def test_preemptions(metered: Metered) -> None:
    """Four endless streams with long prompts outgrow the pool: one loses its blocks."""
    with ExitStack() as stack:
        for letter in "abcd":
            stack.enter_context(metered.server.client.streaming(f"{letter * PRESSING_TOKENS}<|s01|>"))
        wait_until(lambda: metered.delta("vllm:num_preemptions_total") >= 1, 120, "a preemption")
    metered.settled()


def test_memory(metered: Metered) -> None:
    server = metered.server
    status, scrape = server.status(), server.metrics()
    plan = {item: value for item, value in status["engine"]["plan"].items() if not isinstance(value, str)}
    assert plan
    for item, value in plan.items():
        assert scrape("headrace:memory_plan", item=item) == pytest.approx(value)
    assert scrape("headrace:memory_headroom_bytes") == plan["headroom_bytes"] > 0
    active, peak = (scrape("headrace:device_memory_bytes", kind=kind) for kind in ("active", "peak"))
    assert plan["weights_bytes"] <= active <= peak
    assert scrape("headrace:device_memory_bytes", kind="cache") >= 0
    resident = psutil.Process(server.worker_pid).memory_info().rss
    assert scrape("headrace:process_memory_bytes") == pytest.approx(resident, rel=0.25)
    assert 0 < scrape("headrace:memory_available_bytes") < psutil.virtual_memory().total
    assert scrape("headrace:memory_pressure") == 0
    (sample,) = scrape.families["headrace:attention_info"].samples
    assert sample.labels["implementation"] == status["engine"]["attention"] and sample.value == 1


# -- the worker's fate ---------------------------------------------------------------------------------


def die(metered: Metered, deaths: int) -> None:
    """The worker ends in the next step but ``deaths``; all in all so often."""
    metered.arm("exit", 1)
    restarts = "headrace:worker_restarts_total"
    wait_until(lambda: metered.delta(restarts) >= deaths, 60, f"death number {deaths}")


def test_a_request_that_kills_workers(metered: Metered) -> None:
    """Alone in the step of a death twice: replayed once, then given up."""
    server = metered.server
    with streams(server, 1) as (chunks,):
        die(metered, 1)
        die(metered, 2)
        assert list(chunks)[-1]["error"]["code"] == "internal_error"
    wait_until(lambda: server.metrics()("headrace:worker_up") == 1, 60, "the new worker")
    assert metered.delta("headrace:replayed_requests_total") == 1
    assert metered.delta("vllm:request_success_total", finished_reason="error") == 1
    assert metered.delta("headrace:worker_restarts_total") == 2
    assert (
        metered.delta("headrace:worker_reloads_total") == metered.delta("headrace:quarantined_requests_total") == 0
    )
    server.client.check_control()


def test_suspects_run_alone(metered: Metered) -> None:
    """Two in the step of two deaths: both are replayed twice, the second time one after the other."""
    server = metered.server
    with streams(server, 2):
        die(metered, 1)
        die(metered, 2)
        wait_until(lambda: server.metrics()("vllm:num_requests_running") == 2, 60, "both to run again")
    assert metered.delta("headrace:replayed_requests_total") == 4
    assert metered.delta("headrace:quarantined_requests_total") == 2
    assert metered.delta("headrace:worker_restarts_total") == 2
    assert metered.delta("vllm:request_success_total", finished_reason="error") == 0


def test_a_worker_that_stands_still_and_one_that_is_exchanged(metered: Metered) -> None:
    server = metered.server
    assert metered.before("headrace:worker_up") == 1
    with stopped(server):
        wait_until(lambda: server.metrics()("headrace:worker_up") == 0, 30, "the silence to be seen")
    assert server.client.post("/v1/models/reload").status_code == 200
    assert metered.delta("headrace:worker_reloads_total") == 1
    assert metered.delta("headrace:worker_restarts_total") == 0


# -- the names -----------------------------------------------------------------------------------------


def exposed(scrape: Metrics) -> set[str]:
    """Names as people write them in queries: counters with their ending, histograms without theirs."""
    return {name + ("_total" if family.type == "counter" else "") for name, family in scrape.families.items()}


def test_what_is_exposed_is_what_is_documented_and_holds_what_is_promised(metered: Metered) -> None:
    names = exposed(metered.server.metrics())
    assert names >= NAMED
    assert names == set(NAME.findall((ROOT / "docs" / "metrics.md").read_text()))


def test_every_name_is_provoked_here(metered: Metered) -> None:
    """In this file, as a literal: a metric that is added comes with its test."""
    text = Path(__file__).read_text().partition("NAMED = {")
    used = set(NAME.findall(text[0])) | set(NAME.findall(text[2].partition('"""What a user')[2]))
    endings = re.compile(r"_(count|sum|bucket)$")
    missing = exposed(metered.server.metrics()) - {endings.sub("", name) for name in used}
    assert not missing


def test_labels_and_endings(metered: Metered) -> None:
    for name, family in metered.server.metrics().families.items():
        assert family.type in ("counter", "gauge", "histogram"), name
        for sample in family.samples:
            assert sample.labels["model"] == "m"
            assert sample.labels.get("model_name") == ("m" if name.startswith("vllm:") else None)
        if family.type == "histogram":
            bounds = [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
            assert max(bounds[:-1]) >= (512 if name == "headrace:batch_size" else 600)


def test_reading_needs_a_key(metered: Metered) -> None:
    assert metered.server.client.get("/metrics", headers={"authorization": ""}).status_code == 401
