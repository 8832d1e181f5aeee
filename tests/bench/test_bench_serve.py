"""``bench-serve`` end to end against a stub: it reports what happened, and says what it could not measure."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_runs import ROUTES, Bench, quick
from scripted_http import DONE, HEADERS, Script, event, good_stream, scripted_thread, text_event

from headrace.bench.report import runs_of
from headrace.cli.main import main


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(tmp_path, capsys)


def messages(log: Any) -> list[Any]:
    return [body["messages"] for body in log.bodies]


# -- failures and figures --------------------------------------------------------------------------------


FAULTS = (
    [Script([(0.0, b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n")])] * 10
    + [Script([(0.0, HEADERS + b"\r\n"), (0.0, text_event("a")), (0.01, b"")], abort=True)] * 5
    + [Script([(0.0, HEADERS + b"\r\n" + DONE)])] * 5
    + [Script([(0.0, HEADERS + b"\r\n" + event({"error": {"message": "no"}}))])] * 5
)


def test_failed_requests_are_counted_apart_and_named(bench: Bench) -> None:
    """Of 100 requests 10 answer 500, 5 drop in mid-stream, 5 are empty, 5 send an error event."""
    report = bench(
        lambda index: FAULTS[index // 4] if index % 4 == 0 else good_stream(0.01, 0.0, 4),
        *("--concurrency", "8", "--num-requests", "100"),
    )
    (cell,) = report["cells"]
    assert bench.code == 1 and "25 of 100 requests failed" in bench.err
    figures = cell["figures"]
    assert figures["completed"] == 75
    assert figures["failed"] == {"cut": 5, "empty": 5, "error_event": 5, "status": 10}
    assert figures["output_tokens"] == 75 * 4
    check_figures(cell)


def check_figures(cell: dict[str, Any]) -> None:
    """Every figure again, from the samples in the file."""
    figures = cell["figures"]
    good = [sample for sample in cell["samples"] if sample["failure"] is None]
    duration = sum(run["duration_s"] for run in cell["runs"])
    tokens = sum(sample["output_tokens"] for sample in good)
    prompts = sum(sample["prompt_tokens"] for sample in good)
    times = [sample["text_times_s"] for sample in good]
    tpot = [
        (sample["text_times_s"][-1] - sample["text_times_s"][0]) / (sample["output_tokens"] - 1)
        for sample in good
        if len(sample["text_times_s"]) > 1  # on a busy machine all tokens may come in one event
    ]
    assert figures["completed"] == len(good)
    assert sum(figures["failed"].values()) == len(cell["samples"]) - len(good)
    assert figures["duration_s"] == pytest.approx(duration)
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (tokens, prompts)
    assert figures["estimated"] == sum(sample["estimated"] for sample in good)
    assert figures["output_tokens_per_s"] == pytest.approx(tokens / duration)
    assert figures["total_tokens_per_s"] == pytest.approx((tokens + prompts) / duration)
    assert figures["requests_per_s"] == pytest.approx(len(good) / duration)
    assert figures["client_cpu_share"] == pytest.approx(
        sum(run["client_cpu_s"] for run in cell["runs"]) / duration
    )
    for name, values in {
        "ttft_s": [first[0] - sample["sent_s"] for sample, first in zip(good, times, strict=True)],
        "itl_s": [b - a for one in times for a, b in pairwise(one)],
        "e2e_s": [sample["end_s"] - sample["sent_s"] for sample in good],
        "tpot_s": tpot,
        "decode_tokens_per_s": [1 / value for value in tpot if value],
    }.items():
        if not values:
            assert set(figures[name].values()) == {None}, name
            continue
        assert figures[name]["mean"] == pytest.approx(np.mean(values)), name
        for percent in (50, 90, 95, 99):
            assert figures[name][f"p{percent}"] == pytest.approx(np.percentile(values, percent)), name
    for run in cell["runs"]:
        own = sum(sample["output_tokens"] for sample in good if sample["repetition"] == run["repetition"])
        assert run["output_tokens_per_s"] == pytest.approx(own / run["duration_s"])


@pytest.mark.parametrize("streams", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_scripted_delays_come_out_as_they_were(bench: Bench, streams: int) -> None:
    """20 requests, TTFT 100 … 290 ms in steps of 10, ten tokens 20 ms apart."""
    report = bench(
        lambda index: good_stream(0.1 + 0.01 * index, 0.02, 10),
        *("--concurrency", str(streams), "--num-requests", "20"),
    )
    (cell,) = report["cells"]
    figures = cell["figures"]
    # a request is never faster than scripted; a busy machine may delay both sides
    assert 0.194 <= figures["ttft_s"]["p50"] < 0.4 and 0.28 <= figures["ttft_s"]["p99"] < 0.7
    assert 0.019 <= figures["itl_s"]["mean"] < 0.05
    assert figures["tpot_s"]["mean"] == pytest.approx(figures["itl_s"]["mean"], rel=0.05)
    assert bench.log.open_most == streams
    served_s = max(bench.log.ends_s) - min(bench.log.arrivals_s)
    assert figures["duration_s"] == pytest.approx(served_s, rel=0.05, abs=0.1)
    assert cell["client"]["cpu_share"] < 0.9
    check_figures(cell)


def test_arrivals_come_at_the_rate_asked_for(bench: Bench) -> None:
    report = bench(lambda index: good_stream(0.5, 0.0, 2), "--request-rate", "20", "--num-requests", "40")
    (cell,) = report["cells"]
    span_s = bench.log.arrivals_s[-1] - bench.log.arrivals_s[0]
    assert 39 / span_s == pytest.approx(20, rel=0.1)
    assert cell["figures"]["offered_per_s"] == pytest.approx(20, rel=0.1)
    assert bench.log.open_most > 4  # nobody waited for an answer
    assert cell["client"]["late_s"]["p50"] is not None
    gaps = [b - a for a, b in pairwise(bench.log.arrivals_s)]
    assert max(gaps) > 2 * (span_s / 39)  # not at even distances


def test_an_infinite_rate_sends_everything_at_once(bench: Bench) -> None:
    report = bench(lambda index: good_stream(0.5, 0.0, 2), "--request-rate", "inf", "--num-requests", "12")
    assert report["cells"][0]["load"] == {"kind": "rate", "value": "inf"}
    assert bench.log.open_most == 12


def test_what_was_not_measured_is_null(bench: Bench) -> None:
    report = bench(quick, "--model", "other", routes={})
    (cell,) = report["cells"]
    server = cell["server"]
    assert all(value is None for name, value in server.items() if name != "queue_wait_s")
    assert set(server["queue_wait_s"].values()) == {None}
    assert cell["figures"]["cached_tokens"] is None and cell["figures"]["goodput_per_s"] is None
    assert cell["figures"]["offered_per_s"] is None and cell["prompt_tokens_exact"] is False
    assert report["meta"]["server"]["device"] is None and report["cost"] is None
    assert "not exact" in bench.err and bench.code == 0


def test_without_usage_tokens_are_counted_by_the_tokenizer_and_marked(bench: Bench) -> None:
    words = [
        (0.0, HEADERS + b"\r\n"),
        (0.0, text_event("one two three ")),
        (0.0, text_event("four", "stop") + DONE),
    ]
    report = bench(lambda index: Script(words), "--num-requests", "3")
    figures = report["cells"][0]["figures"]
    assert (figures["output_tokens"], figures["estimated"]) == (12, 3)
    assert figures["total_tokens_per_s"] is None and "estimates" in bench.err


def test_thinking_counts_as_output(bench: Bench) -> None:
    def delta(name: str, finish: str | None = None) -> bytes:
        return event({"choices": [{"delta": {name: "hm "}, "finish_reason": finish}]})

    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3,
                                      "completion_tokens_details": {"reasoning_tokens": 2}}}  # fmt: skip
    pieces = [
        (0.0, HEADERS + b"\r\n" + delta("reasoning_content")), (0.05, delta("reasoning_content")),
        (0.05, delta("content", "stop")), (0.0, event(usage) + DONE),
    ]  # fmt: skip
    cell = bench(lambda index: Script(pieces), "--num-requests", "1")["cells"][0]
    figures, (sample,) = cell["figures"], cell["samples"]
    assert (figures["output_tokens"], figures["reasoning_tokens"]) == (3, 2)
    first, second, third = sample["text_times_s"]
    assert figures["e2e_s"]["mean"] - figures["ttft_s"]["mean"] >= third - first - 1e-6  # from the first thought
    assert figures["itl_s"]["mean"] == pytest.approx((third - first) / 2) and first < second < third


# -- what is sent ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_walk_through(bench: Bench, tmp_path: Path) -> None:
    """The documented command's flags, word for word but for the URL."""
    output = tmp_path / "bench.json"
    with scripted_thread(lambda index: good_stream(0.02, 0.005, 3), ROUTES) as (url, log):
        words = (
            f"bench-serve --url {url} --model llama-3b --prompts short,medium,long --concurrency 1,2,4,8 "
            f"--max-tokens 256 --repetitions 5 --scrape-metrics true --format json --output {output}"
        )
        assert main(words.split()) == 0
    report = json.loads(output.read_text())
    assert len(report["cells"]) == 12
    assert {len(cell["runs"]) for cell in report["cells"]} == {5}
    assert {cell["prompt_tokens_exact"] for cell in report["cells"]} == {True}
    assert {body["model"] for body in log.bodies} == {"llama-3b"}
    for cell in report["cells"]:
        assert cell["figures"]["completed"] == 5 * 2 * cell["load"]["value"]
        check_figures(cell)
    sent = [json.dumps(one) for one in messages(log)]
    assert len(sent) == len(set(sent))


def test_prompts_differ_unless_a_seed_is_given(bench: Bench) -> None:
    words = ("--prompts", "short,40", "--concurrency", "1", "--num-requests", "2")
    sent = []
    for seed in (("--seed", "7"), ("--seed", "7"), ("--seed", "8"), (), ()):
        report = bench(quick, *words, *seed)
        sent.append(messages(bench.log))
        assert not seed or report["meta"]["seed"] == int(seed[1])
    assert sent[0] == sent[1]
    beginnings = {one[0]["content"].split(":")[0] for prompts in sent[1:] for one in prompts}
    assert len(beginnings) == 4 * 4


def test_lengths_are_exact_where_the_server_counts(bench: Bench) -> None:
    report = bench(quick, *("--prompts", "short,long,300", "--shared-prefix-tokens", "50", "--num-requests", "2"))
    lengths = {words_of(one) for one in messages(bench.log)}
    assert lengths == {64 + 50, 2048 + 50, 300 + 50}
    prefixes = {one[0]["content"] for one in messages(bench.log)}
    assert len(prefixes) == 1 and len(prefixes.pop().split()) == 50
    assert all(cell["prompt_tokens_exact"] for cell in report["cells"])


def words_of(one: list[dict[str, str]]) -> int:
    return sum(4 + len(message["content"].split()) for message in one)


def test_a_warm_cache_has_seen_every_prompt_once_before(bench: Bench) -> None:
    report = bench(quick, "--cache", "warm", "--num-requests", "3")
    assert report["cells"][0]["figures"]["completed"] == 3
    sent = [json.dumps(one) for one in messages(bench.log)]
    assert sorted(sent[:3]) == sorted(sent[3:]) and len(set(sent)) == 3
    assert [body["max_tokens"] for body in bench.log.bodies] == [1, 1, 1, 256, 256, 256]


def test_turns_carry_what_was_said_before(bench: Bench) -> None:
    report = bench(quick, "--turns", "3", "--num-requests", "2")
    assert report["cells"][0]["figures"]["completed"] == 6
    first, second, third = messages(bench.log)[:3]
    assert [message["role"] for message in third] == ["user", "assistant", "user", "assistant", "user"]
    assert second[:1] == first and third[:3] == second
    assert second[1]["content"] == "w0 w1 w2 "


def test_a_failed_turn_ends_its_conversation(bench: Bench) -> None:
    report = bench(
        lambda index: quick(index) if index == 0 else FAULTS[0],
        *("--turns", "3", "--num-requests", "1"),
    )
    assert report["cells"][0]["figures"]["failed"] == {"not_sent": 1, "status": 1}


def test_bodies(bench: Bench) -> None:
    words = (
        "--api-key",
        "secret",
        "--ignore-eos",
        "--temperature",
        "0.5",
        "--max-tokens",
        "9",
        "--num-requests",
        "1",
    )
    report = bench(quick, *words)
    (body,) = bench.log.bodies
    assert (body["ignore_eos"], body["temperature"], body["max_tokens"]) == (True, 0.5, 9)
    assert "Authorization: Bearer secret\r\n" in bench.log.heads[0]
    assert "secret" not in json.dumps(report) and "***" in report["meta"]["command_line"]
    bench(quick, "--endpoint", "completions", "--num-requests", "1")
    assert (
        bench.log.heads[0].startswith("POST /v1/completions ") and len(bench.log.bodies[0]["prompt"].split()) == 64
    )


def test_a_cell_that_cannot_fit_is_not_measured(bench: Bench) -> None:
    report = bench(quick, "--sweep", "prompt", "--max-tokens", "16", "--num-requests", "1")
    skipped = {cell["prompts"]: cell["skipped"] for cell in report["cells"]}
    assert skipped["512"] is None and skipped["2048"] is None
    assert "4096" in skipped["8192"] and "4096" in skipped["16384"]
    assert {cell["figures"]["ttft_s"]["p50"] is None for cell in report["cells"] if cell["skipped"]} == {True}


def test_sweeps(bench: Bench) -> None:
    report = bench(quick, "--sweep", "concurrency", "--num-requests", "1", "--concurrency", "1,3")
    assert [cell["load"]["value"] for cell in report["cells"]] == [1, 3]
    report = bench(quick, "--sweep", "output", "--num-requests", "1")
    assert [cell["output_tokens_wished"] for cell in report["cells"]] == [128, 512]


# -- the server's own figures ----------------------------------------------------------------------------


def test_metrics_are_differences_and_gauges_are_watched(bench: Bench) -> None:
    scrapes = iter(range(1000))

    def metrics(body: dict[str, object]) -> str:
        n = next(scrapes)
        other = 'vllm:num_preemptions_total{model="other"} 99\n'
        return other + "\n".join(
            [
                "# TYPE x counter",
                f'vllm:prefix_cache_queries_total{{model_name="stub"}} {100 * n}',
                f'vllm:prefix_cache_hits_total{{model_name="stub"}} {25 * n}',
                f'vllm:kv_cache_usage_perc{{model_name="stub"}} {0.5 if n % 2 else 0.25}',
                f'vllm:request_queue_time_seconds_bucket{{model_name="stub",le="1.0"}} {2 * n}',
                f'vllm:request_queue_time_seconds_bucket{{model_name="stub",le="+Inf"}} {2 * n}',
                f'vllm:request_queue_time_seconds_sum{{model_name="stub"}} {0.5 * n}',
                f'vllm:request_queue_time_seconds_count{{model_name="stub"}} {2 * n}',
                f'headrace:device_memory_bytes{{model="stub",kind="peak"}} {1000 + n}',
            ]
        )

    routes = {**ROUTES, "/metrics": metrics}
    report = bench(lambda index: good_stream(0.7, 0.0, 2), "--num-requests", "2", routes=routes)
    (cell,) = report["cells"]
    server = cell["server"]
    assert server["cache_hit_rate"] == 0.25 and server["kv_usage_max"] == 0.5
    assert server["queue_wait_s"]["mean"] == 0.25 and server["queue_wait_s"]["p50"] == pytest.approx(0.5)
    assert server["peak_memory_bytes"] > 1000 and server["preemptions"] is None and server["running_max"] is None
    assert len(cell["runs"][0]["server"]["moments"]) >= 2
    assert runs_of(cell)[0].server is not None


# -- objectives ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_envelope_is_where_the_objective_breaks(bench: Bench) -> None:
    """The stub's TTFT steps up when more than five requests are open."""

    def script(index: int) -> Script:
        return good_stream(0.02 if bench_log().open_now <= 5 else 1.2, 0.0, 2)

    def bench_log() -> Any:
        return current[0]

    current: list[Any] = []
    with scripted_thread(script, ROUTES) as (url, log):
        current.append(log)
        words = f"bench-serve --url {url} --warmup 0 --json --capacity-envelope --slo-ttft-p95-ms 600"
        code = main([*words.split(), "--capacity-max", "16"])
    report = json.loads(bench.capsys.readouterr().out)
    (found,) = report["envelopes"]
    assert code == 0
    assert (found["axis"], found["highest_kept"], found["lowest_broken"]) == ("concurrency", 5, 6)
    assert [cell["load"]["value"] for cell in report["cells"]] == found["probed"]
    assert all(cell["figures"]["goodput_per_s"] is not None for cell in report["cells"])


def test_cost_is_reported_at_the_best_rate(bench: Bench) -> None:
    report = bench(quick, "--cost", "price=1000,months=10,watts=100,kwh=0.5,rented=2")
    best = max(cell["figures"]["output_tokens_per_s"] for cell in report["cells"])
    hourly = 1000 / (10 * 730.5) + 0.05
    assert report["cost"]["tokens_per_s"] == best
    assert report["cost"]["per_million_tokens"] == pytest.approx(hourly / (best * 3600) * 1e6)
    assert report["cost"]["break_even_hours"] == pytest.approx(1000 / 1.95)


# -- wrong use -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--concurrncy", "1"], "did you mean --concurrency?"),
        (["--concurrency", "0"], "at least 1"),
        (["--prompts", "tiny"], "short, medium, long, thinking"),
        (["--request-rate", "-1"], "above 0"),
        (["--capacity-envelope"], "--slo-ttft-p95-ms"),
        (["--sweep", "prompt", "--concurrency", "1,2"], "one axis"),
        (["--format", "html"], "--output"),
        (["--cost", "price=1"], "months, watts, kwh"),
        (["--turns", "2", "--endpoint", "completions"], "turns"),
        (["file.json"], "unexpected"),
        (["--url", "localhost:1", "--model", "m"], "not an http"),
        (["--url", "http://127.0.0.1:9"], "does not answer"),
        (["compare", "a.json"], "two files"),
        (["compare", "/nowhere/a.json", "/nowhere/b.json"], "No such file"),
    ],
)
def test_faults_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(["bench-serve", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and says in err


def test_a_server_that_refuses_everything_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    refused = Script([(0.0, b"HTTP/1.1 404 x\r\nContent-Length: 8\r\n\r\nno model")])
    with scripted_thread(lambda index: refused, ROUTES) as (url, _):
        assert main(["bench-serve", "--url", url, "--model", "gpt"]) == 2
    assert "404: no model" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench-serve", "bench", "bench-kv-cache"])
def test_a_place_that_cannot_be_written_to_is_refused_before_measuring(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "b.json"):
        assert main([command, "--output", str(place)]) == 2
        assert "--output must be a file in a folder that exists" in capsys.readouterr().err
