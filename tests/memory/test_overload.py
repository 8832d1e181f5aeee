"""A short form of ``benchmarks/overload.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "overload.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_overload_leaves_memory_answers_and_refusals_as_promised(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            str(BENCHMARK),
            "--minutes",
            "0.4",
            "--pool-mb",
            "24",
            "--queue",
            "2",
            "--json",
            str(report),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    found = json.loads(report.read_text()) if report.exists() else {}
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["exact"] > 20 and found["refused"] > 0 and found["preemptions"] > 0
    assert found["offered_tokens"] > 3.5 * found["pool_tokens"]
