"""The side-by-side benchmark, run whole on stub servers: what it starts, counts, prints and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stub_peer.py"


def benchmark(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "serving_cpu.py"),
        "--headrace",
        "",
        "--model",
        str(folder),
    ]
    command += ["--logs", str(folder), "--json", str(folder / "out.json"), "--startup-timeout", "20", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_two_servers_interleaved(tmp_path: Path) -> None:
    shape = ["--streams", "1,4", "--requests", "2,8", "--repetitions", "2"]
    good, bad = f"good={{python}} {STUB} {{port}}", f"bad={{python}} {STUB} {{port}} 6"
    done = benchmark(tmp_path, "--peer", good, "--peer", bad, *shape)
    report = json.loads((tmp_path / "out.json").read_text())
    cells = [(m["name"], m["repetition"], m["cell"]["streams"]) for m in report["measurements"]]
    assert cells == [
        *[("good", 0, 1), ("good", 0, 4), ("bad", 0, 1), ("bad", 0, 4)],
        *[("bad", 1, 1), ("bad", 1, 4), ("good", 1, 1), ("good", 1, 4)],
    ]
    for measurement in report["measurements"]:
        summary = measurement["summary"]
        failed = sum(summary["failed"].values())
        assert failed == (2 if measurement["name"] == "bad" and measurement["cell"]["streams"] == 4 else 0)
        assert summary["output_tokens"] == 4 * summary["completed"]
        assert summary["completed"] + failed == len(measurement["result"]["samples"])
    assert done.returncode == 1 and "4/16" in done.stdout and "status: 503" in done.stdout


@pytest.mark.slow
def test_a_server_that_ends_is_reported(tmp_path: Path) -> None:
    done = benchmark(tmp_path, "--peer", "dead={python} -c 'raise SystemExit(7)'", "--repetitions", "1")
    assert done.returncode == 1 and "ended with code 7" in done.stdout


def test_a_model_must_be_named_for_each_server(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "serving_cpu.py"), "--peer", "x=y", "--model", "x=/m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and "no model for headrace" in done.stderr
