"""scripts/: choosing the MLX backend, explaining what is missing, and knowing when nothing is to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(tmp_path: Path) -> ModuleType:
    """scripts/setup.py as a module that believes to live in a fresh clone, with a .venv of its own."""
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/setup.py"):
        (clone / name).write_text((ROOT / name).read_text())
    specification = importlib.util.spec_from_file_location("headrace_setup", clone / "scripts/setup.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("system", "machine", "driver", "backend"),
    [
        ("Darwin", "arm64", None, "metal"),
        ("Linux", "x86_64", None, "cpu"),
        ("Linux", "aarch64", None, "cpu"),
        ("Linux", "x86_64", 535, "cpu"),
        ("Linux", "x86_64", 550, "cuda12"),
        ("Linux", "x86_64", 575, "cuda12"),
        ("Linux", "aarch64", 580, "cuda13"),
    ],
)
def test_backend(setup: ModuleType, system: str, machine: str, driver: int | None, backend: str) -> None:
    assert setup.pick_backend(system, machine, driver) == backend


@pytest.mark.parametrize(
    ("system", "machine", "word"),
    [("Darwin", "x86_64", "Rosetta"), ("Windows", "AMD64", "Windows"), ("Linux", "riscv64", "riscv64")],
)
def test_no_build_of_mlx(setup: ModuleType, system: str, machine: str, word: str) -> None:
    with pytest.raises(setup.SetupError, match=word):
        setup.pick_backend(system, machine, None)


@pytest.mark.parametrize(
    ("answer", "code", "major"),
    [("570.86.15\n570.86.15", 0, 570), ("No devices were found", 6, None), ("", 0, None)],
)
def test_nvidia_driver(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int, major: int | None
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert setup.nvidia_driver() == major


def test_no_nvidia_tool(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.nvidia_driver() is None


@pytest.mark.parametrize(
    ("errors", "word"),
    [
        ("WARNING: … NewConnectionError('Failed to establish …')", "network"),
        ("ERROR: No matching distribution found for mlx==0.0.1", "glibc"),
        ("OSError: [Errno 28] No space left on device", "disk"),
        ("something else", "above"),
    ],
)
def test_pip_failures_in_one_line(setup: ModuleType, errors: str, word: str) -> None:
    line = setup.explain(errors)
    assert word in line and "\n" not in line


def test_stamp(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs once; again for more extras or other requirements; an old backend goes before another comes."""
    calls: list[object] = []
    monkeypatch.setattr(setup, "make_venv", lambda: setup.VENV.mkdir(exist_ok=True))
    monkeypatch.setattr(setup, "install", lambda extras: calls.append(sorted(extras)))
    monkeypatch.setattr(setup, "remove_backends", lambda: calls.append("removed"))
    monkeypatch.setattr(setup, "choose_backend", lambda asked: "cpu" if asked == "auto" else asked)

    setup.setup("auto", dev=False)
    setup.setup("auto", dev=False)
    assert calls == [["cpu"]]
    setup.setup("auto", dev=True)
    setup.setup("auto", dev=False)
    setup.setup("auto", dev=True)
    assert calls[1:] == [["cpu", "dev"]]
    with (setup.ROOT / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    setup.setup("auto", dev=False)
    assert calls[2:] == [["cpu"]]
    setup.setup("cuda13", dev=False)
    assert calls[3:] == ["removed", ["cuda13"]]
    setup.setup("auto", dev=False)  # what was chosen stays
    assert len(calls) == 5


def test_failed_install_leaves_no_stamp(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(extras: set[str]) -> None:
        raise setup.SetupError("no network")

    monkeypatch.setattr(setup, "make_venv", lambda: setup.VENV.mkdir(exist_ok=True))
    monkeypatch.setattr(setup, "install", fail)
    with pytest.raises(setup.SetupError):
        setup.setup("cpu", dev=False)
    assert setup.installed() == set()
    setup.STAMP.write_text("half a stamp {")
    assert setup.installed() == set()


@pytest.mark.slow
def test_venv_is_kept_unless_its_python_is_gone(setup: ModuleType) -> None:
    setup.make_venv()
    mark = setup.VENV / "mark"
    mark.touch()
    setup.make_venv()
    assert mark.exists()
    (setup.VENV / "bin/python").unlink()
    (setup.VENV / "bin/python").symlink_to("/nowhere/python")
    setup.make_venv()
    assert not mark.exists()
    assert setup.succeeds(setup.VENV_PYTHON, "-m", "pip", "--version")


def find_python(*, python: str = "", path: str = os.environ["PATH"]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path} | ({"PYTHON": python} if python else {})
    script = [ROOT / "scripts/find-python"]
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


def fake_python(folder: Path, name: str, body: str) -> Path:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return tool


def test_find_python_takes_the_named_one() -> None:
    assert find_python(python=sys.executable).stdout.strip() == sys.executable


def test_find_python_skips_broken_and_old_ones(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3.12", "exit 127")
    fake_python(tmp_path, "python3.13", "exit 1")
    good = fake_python(tmp_path, "python3.11", f'exec "{sys.executable}" "$@"')
    assert find_python(path=f"{tmp_path}:/usr/bin:/bin").stdout.strip() == str(good)


def test_find_python_says_what_is_missing(tmp_path: Path) -> None:
    old = fake_python(tmp_path, "old", '[ "$1" = --version ] && { echo Python 3.9.6; exit 0; }; exit 1')
    answer = find_python(python=str(old))
    assert answer.returncode == 1
    assert "3.11 or newer" in answer.stderr and "Python 3.9.6" in answer.stderr
    assert answer.stderr.count("\n") == 1
    absent = find_python(python=str(tmp_path / "absent"))
    assert absent.returncode == 1 and "found: none" in absent.stderr and absent.stderr.count("\n") == 1


def test_find_python_without_venv_module(tmp_path: Path) -> None:
    body = f'case "$2" in *venv*) exit 1;; esac; exec "{sys.executable}" "$@"'
    answer = find_python(python=str(fake_python(tmp_path, "bare", body)))
    assert answer.returncode == 1
    assert "venv" in answer.stderr and answer.stderr.count("\n") == 1


def test_make_targets_pass_arguments_on() -> None:
    command = ["make", "--dry-run", "serve", "MODEL=./m", "PORT=9000", "ARGS=--max-num-seqs 8"]
    environment = {"PATH": os.environ["PATH"]}  # without what a make that runs these tests would hand down
    plan = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert plan.strip() == "scripts/serve ./m  --port 9000 --max-num-seqs 8"


def test_stamp_is_json_with_extras(setup: ModuleType) -> None:
    setup.VENV.mkdir()
    setup.STAMP.write_text(json.dumps({"fingerprint": setup.fingerprint(), "extras": ["cpu"]}))
    assert setup.installed() == {"cpu"}
