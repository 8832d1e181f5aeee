"""The report of ``headrace doctor``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import doctor
from headrace.cli.doctor import Finding, render
from headrace.runner.kernels import native_extension


@pytest.mark.slow
def test_this_machine() -> None:
    command = [sys.executable, "-m", "headrace.cli.main", "doctor"]
    report = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.returncode == 0, report.stdout + report.stderr
    labels = [line.split("  ")[0] for line in report.stdout.splitlines() if "  " in line]
    for label in ("System", "MLX", "Device", "Memory", "Demo model"):
        assert label in labels


def test_advice_is_sorted_by_weight() -> None:
    text = render([Finding("A", "1"), Finding("Long", "2", "do this", ok=False), Finding("B", "3", "or that")])
    lines = text.splitlines()
    assert lines[:3] == ["A     1", "Long  2", "B     3"]
    assert lines.index("  - do this") == lines.index("to be able to serve:") + 1
    assert lines.index("  - or that") == lines.index("to be faster:") + 1


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    finding = doctor.compiler()
    assert finding.ok and "g++" in finding.advice


def test_what_else_a_build_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "platform", "linux")
    monkeypatch.setattr(native_extension, "_python_headers", lambda: Path("/nowhere"))
    monkeypatch.setattr(native_extension.shutil, "which", lambda _: "/usr/bin/g++")
    finding = doctor.compiler()
    assert finding.value == "/usr/bin/g++" and "-dev" in finding.advice


def test_other_versions_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda _: "0.0.1")
    finding = doctor._versions()
    assert not finding.ok
    assert "mlx==" in finding.advice and "mlx-lm==" in finding.advice


def test_unusable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/dev/null/cache")
    assert not doctor.demo_model().ok
