"""``bench`` and ``bench-kv-cache``: the engine in process, on a small model with random or scripted weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.bench_kv_cache import KVResult, compared, log_softmax
from headrace.cli.main import main

ScriptedFolder = Callable[[str], Path]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--format", "json", "--kv-memory-mb", "64"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.slow
def test_every_token_of_an_offline_run_is_counted(
    scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--num-requests", "5", "--prompt-tokens", "20", "--max-tokens", "6", "--max-num-seqs", "2")
    report = call(capsys, "bench", str(scripted_folder("plain")), *words, "--repetitions", "2")
    assert len(report["runs"]) == 2
    for run in report["runs"]:
        assert (run["completed"], run["failed"], run["output_tokens"], run["prompt_tokens"]) == (5, 0, 30, 100)
        assert run["output_tokens_per_s"] == pytest.approx(30 / run["duration_s"])
        assert run["total_tokens_per_s"] == pytest.approx(130 / run["duration_s"])
        assert run["steps"] >= 3 * 6 and 0 < run["first_token_s"]["p50"] < run["end_s"]["p99"] <= run["duration_s"]


@pytest.mark.slow
def test_packed_kv_is_smaller_and_its_error_is_measured(
    scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--context", "40", "--steps", "6", "--batch", "2")
    report = call(capsys, "bench-kv-cache", str(scripted_folder("plain")), *words)
    auto, int8, int4 = report["results"]
    assert [one["kv_cache_dtype"] for one in report["results"]] == ["auto", "int8", "int4"]
    assert auto["error_max"] is None and auto["nll"] is not None
    assert auto["bytes_per_token"] > int8["bytes_per_token"] > int4["bytes_per_token"]
    # this model's keys and values are few and far apart: packing them loses little
    assert 0 <= int8["error_mean"] <= int4["error_mean"] < 1 and int8["same_choice"] == 1
    assert int8["kl_mean"] == pytest.approx(0, abs=1e-3)


def test_errors_of_logits() -> None:
    expected = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]], np.float32)
    got = np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]], np.float32)
    assert np.exp(log_softmax(expected)).sum(-1) == pytest.approx([1, 1])
    result = compared(KVResult("int8"), expected, got)
    assert (result.error_max, result.error_mean, result.same_choice) == (3.0, pytest.approx(1.0), 0.5)
    p = np.exp([3.0, 0.0, 0.0]) / np.exp([3.0, 0.0, 0.0]).sum()
    assert result.kl_mean == pytest.approx((p[0] - p[1]) * 3 / 2, rel=1e-5)
    assert compared(KVResult("int8"), expected, expected).kl_mean == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "a", "b"], "one MODEL"),
        (["bench", "--port", "1"], "unknown flag"),
        (["bench-kv-cache", "--kv-cache-dtype", "int8"], "drop --kv-cache-dtype"),
    ],
)
def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(words) == 2
    assert says in capsys.readouterr().err


def test_plan_knows_the_cost(scripted_folder: ScriptedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(scripted_folder("plain")), "--memory-gb", "8", "--device", "cpu"]
    cost = "price=7305,months=10,watts=200,kwh=0.5,rented=2.1,tokens_per_s=1000"
    assert main([*words, "--cost", cost, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["per_million_tokens"] == pytest.approx(1.1 / 3.6)
    assert main([*words, "--cost", cost]) == 0
    assert "pays for itself after" in capsys.readouterr().out
    assert main([*words, "--cost", cost.rpartition(",")[0]]) == 2
    assert "tokens_per_s" in capsys.readouterr().err
