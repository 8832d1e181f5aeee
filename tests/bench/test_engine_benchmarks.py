"""The benchmarks of the engine run from end to end: on a small model, on any machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = "--rows 1,3 --context 64 --steps 2 --bits 16,4"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("script", "options", "count", "measured"),
    [
        ("gpu_decode", STEPS, 4, {"headrace_ms", "mlx_lm_ms"}),
        ("gpu_step_profile", STEPS, 4, {"wall_us", "host_us"}),
        ("gpu_prefill", "--lengths 64,128 --each 64 --together 2 --repeats 1", 6, {"headrace_ms", "mlx_lm_ms"}),
    ],
)
def test_every_cell_is_measured(tmp_path: Path, script: str, options: str, count: int, measured: set[str]) -> None:
    report = tmp_path / "cells.json"
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--shapes", "tiny", "--json", str(report)]
    done = subprocess.run([*command, *options.split()], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads(report.read_text())
    assert len(cells) == count
    for cell in cells:
        assert not [key for key in cell if key.endswith("error")], cell
        assert ({"off_cold", "off_chunks"} if cell.get("kind") == "exact" else measured) <= set(cell)
