"""Formats hold the same result; comparisons, cost and metrics are computed right."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bench_runs import Bench
from scripted_http import Script, good_stream

from headrace.bench.campaign import CellRuns, Run
from headrace.bench.cells import Cell, Load
from headrace.bench.client_health import client_health
from headrace.bench.compare import compare
from headrace.bench.cost import Hardware, Rented, break_even_hours, cost_from, per_million_tokens, read_cost
from headrace.bench.envelope import find_envelope
from headrace.bench.files import read_report
from headrace.bench.load import LoadResult
from headrace.bench.observe import Failure, Sample
from headrace.bench.prometheus import Scrape, bucket_percentile, parse
from headrace.bench.report import cell_report, flat_cell, runs_of
from headrace.bench.server import BenchFault
from headrace.bench.stats import Objectives, summarize_runs
from headrace.bench.svg import round_ticks
from headrace.cli.bench_progress import Progress
from headrace.cli.bench_serve import exit_code
from headrace.cli.main import main


def script(index: int) -> Script:
    failing = Script([(0.0, b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n")])
    return failing if index == 3 else good_stream(0.01, 0.005, 4)


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], Path]:
    report = Bench(tmp_path, capsys)(
        script, "--concurrency", "1,2,4", "--prompts", "short,200", "--max-tokens", "4"
    )
    path = tmp_path / "a.json"
    path.write_text(json.dumps(report))
    return report, path


def test_sqlite_and_json_hold_everything(saved: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    report, path = saved
    database = tmp_path / "a b#1?50%25.sqlite"  # a name, not a URL
    assert main(["bench-serve", "report", str(path), "--format", "sqlite", "--output", str(database)]) == 0
    assert read_report(str(database)) == report == read_report(str(path))
    with sqlite3.connect(database) as connection:
        completed = connection.execute('SELECT sum("figures.completed") FROM cells').fetchone()[0]
        failed = connection.execute("SELECT count(*) FROM samples WHERE failure = 'status'").fetchone()[0]
    connection.close()
    assert (completed, failed) == (2 * (2 + 4 + 8) - 1, 1)


def test_csv_has_the_figures(saved: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]) -> None:
    report, path = saved
    assert main(["bench-serve", "report", str(path), "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 6
    for row, cell in zip(rows, report["cells"], strict=True):
        for name, value in flat_cell(cell).items():
            if isinstance(value, float):
                assert float(row[name]) == value
            else:
                assert row[name] == ("" if value is None else str(value))
    assert rows[0]["server.kv_usage_max"] == ""


def test_html_is_one_file_with_charts(saved: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    _, path = saved
    page = tmp_path / "a.html"
    assert main(["bench-serve", "report", str(path), "--format", "html", "--output", str(page)]) == 0
    text = page.read_text()
    without_meta = text.split("<h2>How it was measured</h2>")[0]
    assert not re.search(r"(https?:)?//|\bsrc=|\bhref=|@import|url\(|<script|<link", without_meta)
    assert text.count("<svg") >= 6 and "prefers-color-scheme: dark" in text
    assert "Throughput against" in text and "TTFT distribution" in text and "Latency against throughput" in text
    assert "503" in text  # the failure is not hidden


def test_the_table_marks_what_is_missing(
    saved: tuple[dict[str, Any], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = saved
    assert main(["bench-serve", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "not measured" in out and " - " in out and "1 of 4 requests failed" in out


@pytest.mark.parametrize("content", ["{}", "nonsense", '{"format": "headrace-bench-serve", "format_version": 99}'])
def test_foreign_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert main(["bench-serve", "report", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- comparison ------------------------------------------------------------------------------------------


def made_report(ttft_s: float, repetitions: int, noise: random.Random) -> dict[str, Any]:
    """Ten requests a repetition: first text after about ``ttft_s``, then nine gaps of 20 ms."""
    one = CellRuns(Cell("short", 10, Load("concurrency", 2)), runs=[])
    for repetition in range(repetitions):
        samples = []
        for index in range(10):
            first = ttft_s * noise.uniform(0.9, 1.1)
            times = tuple(first + 0.02 * number for number in range(10))
            samples.append(Sample(index, 0, 0.0, times[-1], text_times_s=times, output_tokens=10))
        duration_s = 10 * max(sample.end_s for sample in samples) / 2
        one.runs.append(Run(repetition, 0.0, LoadResult(2, duration_s, 0.1, tuple(samples)), None))
    return {"cells": [cell_report(one)]}


def test_a_real_difference_is_shown_and_chance_is_not() -> None:
    noise = random.Random(1)
    a, same, slower = (made_report(ttft, 4, noise) for ttft in (0.1, 0.1, 0.2))
    by_name = {one.figure: one for one in compare(a, slower, draws=200)}
    ttft = by_name["TTFT mean"]
    assert ttft.change == pytest.approx(1.0, abs=0.1) and ttft.verdict == "worse"
    assert ttft.low is not None and ttft.high is not None and ttft.low < ttft.change < ttft.high
    assert by_name["output tok/s"].verdict == "worse" and by_name["ITL mean"].verdict == "no difference shown"
    assert {one.figure: one for one in compare(slower, a, draws=200)}["TTFT mean"].verdict == "better"
    again = {one.figure: one for one in compare(a, same, draws=200)}
    assert abs(again["TTFT mean"].change or 1) < 0.05
    assert all(one.change == 0 and one.verdict == "no difference shown" for one in compare(a, a, draws=100))


def test_two_repetitions_say_nothing_about_the_spread_of_rates() -> None:
    noise = random.Random(2)
    a, b = made_report(0.1, 2, noise), made_report(0.2, 2, noise)
    by_name = {one.figure: one for one in compare(a, b, draws=100)}
    assert by_name["output tok/s"].verdict == "?" and by_name["output tok/s"].change is not None


def test_compare_as_a_command(
    saved: tuple[dict[str, Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, path = saved
    other = tmp_path / "b.json"
    other.write_text(json.dumps({**report, "cells": report["cells"][:-1]}))
    assert main(["bench-serve", "compare", str(path), str(other), "--draws", "100"]) == 0
    out, err = capsys.readouterr()
    assert "TTFT p95" in out and "95 % interval" in out and "only in" in err
    assert main(["bench-serve", "compare", str(path), str(path), "--format", "json", "--draws", "100"]) == 0
    assert {row["change"] for row in json.loads(capsys.readouterr().out)} <= {0.0, None}


# -- parts -----------------------------------------------------------------------------------------------


def sample(first_s: float, failure: Failure | None = None, gaps: Sequence[float] = (0.1,)) -> Sample:
    times = [first_s]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Sample(0, 0, 0.0, times[-1], text_times_s=tuple(times), output_tokens=len(times), failure=failure)


def test_goodput_counts_requests_within_the_objectives() -> None:
    samples = (sample(0.1), sample(0.9), sample(0.1, gaps=(0.5,)), sample(0.1, Failure.CUT))
    summary = summarize_runs([LoadResult(1, 2.0, 0.0, samples)], Objectives(ttft_s=0.5, itl_s=0.2))
    assert summary.goodput_per_s == 0.5 and summary.requests_per_s == 1.5


def test_a_client_without_cpu_left_is_said_loudly(capsys: pytest.CaptureFixture[str]) -> None:
    one = CellRuns(Cell("short", 2, Load("concurrency", 1)))
    one.runs.append(Run(0, 0.0, LoadResult(1, 1.0, 0.97, (sample(0.1),)), None))
    report = {"cells": [cell_report(one)]}
    assert exit_code(report) == 3 and "97% of a core" in capsys.readouterr().err
    late = LoadResult(None, 1.0, 0.1, (Sample(0, 0, 0.5, 0.6, due_s=0.0),), timer_lags_s=(0.3,) * 10)
    health = client_health([late], summarize_runs([late]))
    assert not health.is_bottleneck and health.late_s.mean == 0.5
    assert any("500 ms late" in remark for remark in health.remarks)


def test_runs_come_back_from_a_report() -> None:
    report = made_report(0.1, 2, random.Random(3))
    runs = runs_of(json.loads(json.dumps(report["cells"][0])))
    assert [len(run.result.samples) for run in runs] == [10, 10]
    assert cell_report(CellRuns(Cell("short", 10, Load("concurrency", 2)), runs=runs)) == report["cells"][0]


@pytest.mark.parametrize("limit", [0, 1, 5, 8, 13, 64])
def test_the_envelope_is_found_by_bisection(limit: int) -> None:
    import asyncio

    probed: list[float] = []

    async def keeps(value: float) -> bool:
        probed.append(value)
        return value <= limit

    found = asyncio.run(find_envelope(keeps, 1, 64, whole=True))
    assert found.highest_kept == (limit or None) and found.probed == tuple(probed)
    assert found.lowest_broken == (None if limit == 64 else limit + 1) and len(probed) <= 13


def test_cost() -> None:
    hardware = Hardware(price=7305, months=10, watts=200, price_per_kwh=0.5, tokens_per_s=1000, utilization=0.5)
    assert per_million_tokens(hardware) == pytest.approx((1.0 / 0.5 + 0.1) / 3.6)
    assert break_even_hours(hardware, Rented(2.1)) == pytest.approx(7305 / 2.0)
    assert break_even_hours(hardware, Rented(2.1, tokens_per_s=2000)) == pytest.approx(7305 / 0.95)
    assert break_even_hours(hardware, Rented(0.05)) is None
    values = read_cost("price=7305, months=10,watts=200,kwh=0.5,utilization=0.5,rented=2.1")
    cost = cost_from(values, 1000.0)
    assert cost is not None and cost.per_million_tokens == pytest.approx(per_million_tokens(hardware))
    assert cost.rented_per_million_tokens == pytest.approx(2.1 / 3.6)
    assert cost_from(values, None) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [("price=1", "months, watts, kwh"), ("prize=1", "unknown"), ("price=x", "numbers"), ("months=0", "above 0"),
     ("price=1,months=1,watts=1,kwh=1,utilization=2", "at most 1"), ("watts=-1", "at least 0")],
)  # fmt: skip
def test_wrong_costs(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_cost(text)


def test_prometheus_text() -> None:
    text = "# HELP a x\na_total 3\n" + 'a_total{model="m"} 4 1700000000\na_total{model="n"} 8\nbad\n'
    text += 'b{q="\\"\\n\\\\",model_name="m"} NaN\n'
    series = parse(text)
    assert series["b"][0][0] == {"q": '"\n\\', "model_name": "m"}
    scrape = Scrape(series, "m")
    assert scrape("missing", "a_total") == 7 and scrape("missing") is None and scrape("a_total", model="n") is None


def test_percentiles_of_buckets() -> None:
    counts = {0.1: 10.0, 1.0: 20.0, float("inf"): 20.0}
    assert bucket_percentile(counts, 50) == pytest.approx(0.1)
    assert bucket_percentile(counts, 75) == pytest.approx(0.55)
    assert bucket_percentile({0.1: 1.0, float("inf"): 4.0}, 90) is None
    assert bucket_percentile({}, 50) is None and bucket_percentile({0.1: 0.0}, 50) is None


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (0, 97), (0.002, 0.0031), (0, 12345)])
def test_ticks_cover_and_are_round(low: float, high: float) -> None:
    ticks = round_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 9


def test_the_progress_bar_counts_and_clears() -> None:
    stream = io.StringIO()
    progress = Progress(stream, wanted=True, bar=True)
    progress.expect(4)
    for _ in range(4):
        progress.request(sample(0.1))
    progress.title("short")
    progress.line("#1 done")
    progress.close()
    text = stream.getvalue()
    assert "4/4 short" in text and "#1 done\n" in text and text.endswith("\r\x1b[K")
    silent = io.StringIO()
    progress = Progress(silent, wanted=False, bar=True)
    progress.title("short")
    progress.line("#1 done")
    progress.close()
    assert silent.getvalue() == ""


def test_more_connections_than_files_are_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench-serve --url http://127.0.0.1:9 --model m --request-rate inf --num-requests 999999999"
    assert main(words.split()) == 2
    assert "open files" in capsys.readouterr().err


def test_prometheus_lines_end_where_the_format_says() -> None:
    series = parse('up{model="a\u2028b"} 1\r\nup{model="c"} 2\n')
    assert series["up"] == [({"model": "a\u2028b"}, 1.0), ({"model": "c"}, 2.0)]


def test_nesting_without_end_is_no_report(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("[" * 100_000)
    with pytest.raises(BenchFault, match="neither JSON"):
        read_report(str(path))
