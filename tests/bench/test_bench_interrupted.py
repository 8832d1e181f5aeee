"""Ctrl-C in ``bench-serve``: what was measured is written and marked, and compares."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_runs import ROUTES
from scripted_http import Log, Script, good_stream, scripted_thread

from headrace.bench.campaign import CellRuns, Run
from headrace.bench.cells import Cell, Load
from headrace.bench.compare import compare
from headrace.bench.load import LoadResult
from headrace.bench.observe import Sample
from headrace.bench.prometheus import Moment, ServerRecord
from headrace.bench.report import cell_report, runs_of
from headrace.bench.stats import summarize_runs

HANG_S = 60.0
BENCH = (sys.executable, "-m", "headrace.cli.main", "bench-serve")


def interrupted_after(requests: int, words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of a run that gets Ctrl-C when so many requests have come."""

    def script_of(index: int) -> Script:
        return good_stream(0.02, 0.01, 3) if index < requests else good_stream(30.0, 0.01, 3)

    with scripted_thread(script_of, ROUTES) as (url, log):
        command = [*BENCH, "--url", url, "--warmup", "0", "--format", "json", *words]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
        )
        try:
            await_requests(log, requests + 1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
            process.wait()
    return process.returncode, out, err


def heed_ctrl_c() -> None:
    """What a shell starts in the background, these tests too, ignores the signal, and so do its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def await_requests(log: Log, count: int) -> None:
    deadline = time.monotonic() + HANG_S
    while len(log.bodies) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_was_measured_is_written_and_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompts", "20", "--max-tokens", "3,4", "--num-requests", "4", "--repetitions", "2"]
    code, out, err = interrupted_after(10, [*words, "--concurrency", "1"])
    assert code == 130 and "Traceback" not in err
    report: dict[str, Any] = json.loads(out)
    assert report["incomplete"] is True
    first, second = report["cells"]
    # both cells once, then the first again: two of its four requests had ended
    assert first["incomplete"] == "interrupted after 1 of 2 repetitions and a part of the next, which has no rates"
    assert [run["interrupted"] for run in first["runs"]] == [False, True]
    assert first["runs"][1]["output_tokens_per_s"] is None
    assert first["figures"]["completed"] == 6 and first["figures"]["failed"] == {}
    assert first["figures"]["output_tokens_per_s"] == pytest.approx(first["runs"][0]["output_tokens_per_s"])
    assert second["incomplete"] == "interrupted after 1 of 2 repetitions"
    assert second["figures"]["completed"] == 4 and not second["skipped"]
    assert f"{first['name']}: incomplete: interrupted after" in err
    path = tmp_path / "cut.json"
    path.write_text(out)
    from headrace.cli.main import main

    assert main(["bench-serve", "compare", str(path), str(path), "--draws", "100"]) == 0
    assert "is incomplete: it was interrupted" in capsys.readouterr().err


def test_cells_that_were_not_begun_say_so() -> None:
    words = ["--prompts", "20", "--max-tokens", "3,4", "--num-requests", "4", "--concurrency", "2"]
    code, out, _ = interrupted_after(2, words)
    assert code == 130
    first, second = json.loads(out)["cells"]
    assert first["incomplete"].startswith("interrupted after 0 of 1 repetitions")
    assert first["figures"]["output_tokens_per_s"] is None and first["figures"]["ttft_s"]["mean"] > 0
    assert second["skipped"] == "interrupted before it was measured" and second["runs"] == []


def test_nothing_measured_writes_nothing() -> None:
    code, out, err = interrupted_after(0, ["--prompts", "20", "--num-requests", "4", "--concurrency", "1"])
    assert (code, out) == (130, "") and "Traceback" not in err


# -- comparison ------------------------------------------------------------------------------------------


def made(queue_s: float, hits: float, repetitions: int = 3, *, cut: bool = False) -> dict[str, Any]:
    one = CellRuns(Cell("short", 10, Load("concurrency", 2)))
    for repetition in range(repetitions):
        times = tuple(0.1 + 0.02 * number for number in range(10))
        samples = tuple(Sample(i, 0, 0.0, times[-1], text_times_s=times, output_tokens=10) for i in range(10))
        server = ServerRecord(
            prefix_queries=100.0, prefix_hits=hits, preemptions=0.0, queue_sum_s=10 * queue_s, queue_count=10.0,
            moments=(Moment(0.0, 0.5, 1.0, 0.0, None),),
        )  # fmt: skip
        result = LoadResult(2, 1.0, 0.1, samples, interrupted=cut and repetition == repetitions - 1)
        one.runs.append(Run(repetition, 0.0, result, server))
    return {"cells": [cell_report(one)]}


def test_what_the_server_counted_is_compared_too() -> None:
    by_name = {one.figure: one for one in compare(made(0.1, 50.0), made(0.3, 75.0), draws=100)}
    queue, cache = by_name["queue wait"], by_name["cache hits"]
    assert (queue.change, queue.verdict) == (pytest.approx(2.0), "worse")
    assert (cache.a, cache.b, cache.verdict) == (0.5, 0.75, "better")
    assert by_name["KV use max"].verdict == "no difference shown"
    assert by_name["preemptions"].change is None  # from none to none: no ratio
    assert "memory max" not in by_name and "failed" not in by_name


def test_failures_are_named_beside_latencies() -> None:
    a, b = made(0.1, 50.0), made(0.1, 50.0)
    b["cells"][0]["figures"]["failed"] = {"status": 4}
    (failed,) = [one for one in compare(a, b, draws=100) if one.figure == "failed"]
    assert (failed.a, failed.b, failed.change, failed.unit) == (0.0, 4.0, None, "count")


def test_a_cut_run_counts_for_latencies_and_not_for_rates() -> None:
    (cell,) = made(0.1, 50.0, cut=True)["cells"]
    figures = cell["figures"]
    assert figures["completed"] == 30 and figures["output_tokens_per_s"] == 100.0
    again = summarize_runs([run.result for run in runs_of(cell)])
    assert again.output_tokens_per_s == 100.0 and again.completed == 30
