"""Prepares .venv: the right MLX backend for this machine, Headrace itself (editable), optionally the test tools.

Usage: setup.py [--dev] [--backend auto|metal|cpu|cuda12|cuda13]

Needs nothing but the standard library. Quick when nothing changed: a stamp in .venv remembers what was installed
from which pyproject.toml. An existing .venv is added to, never thrown away, unless its Python no longer runs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "headrace-setup.json"

# Lowest driver major version for MLX's CUDA builds (from MLX's installation page).
CUDA13_DRIVER = 580
CUDA12_DRIVER = 550
BACKENDS = ("metal", "cpu", "cuda12", "cuda13")


class SetupError(Exception):
    """What is missing, in one line."""


def pick_backend(system: str, machine: str, driver: int | None) -> str:
    """MLX backend for this machine; ``driver`` is the NVIDIA driver's major version, None without one.

    Raises SetupError where MLX has no build at all.
    """
    if system == "Darwin":
        if machine != "arm64":
            raise SetupError(
                "MLX needs Apple silicon and an arm64 Python; this Python is "
                f"{machine} (under Rosetta? install an arm64 Python)"
            )
        return "metal"
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(f"MLX has no build for {system} on {machine}; use macOS on Apple silicon, or Linux")
    if driver is None or driver < CUDA12_DRIVER:
        return "cpu"
    return "cuda13" if driver >= CUDA13_DRIVER else "cuda12"


def nvidia_driver() -> int | None:
    """Major version of the NVIDIA driver, None when there is no working one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.match(r"\s*(\d+)\.", answer)
    return int(match.group(1)) if match else None


def choose_backend(asked: str) -> str:
    """The backend asked for, or the one for this machine, saying why when that is not plain."""
    if asked != "auto":
        return asked
    system = platform.system()
    driver = nvidia_driver() if system == "Linux" else None
    backend = pick_backend(system, platform.machine(), driver)
    if driver is not None and backend == "cpu":
        print(f"NVIDIA driver {driver} is older than MLX's CUDA builds need ({CUDA12_DRIVER}): using the CPU")
    return backend


def fingerprint() -> str:
    """Changes when an installation made earlier no longer fits: other requirements, place or Python."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode(), os.path.realpath(VENV_PYTHON).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def installed() -> set[str]:
    """Extras that the stamp vouches for; empty when it does not fit."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return set()
    return set(stamp["extras"]) if stamp.get("fingerprint") == fingerprint() else set()


def succeeds(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make_venv() -> None:
    """Make .venv where there is none, or again where its Python is gone (a system upgrade, a moved folder)."""
    if succeeds(VENV_PYTHON, "-c", "pass"):
        if not succeeds(VENV_PYTHON, "-m", "pip", "--version"):  # made by a tool that leaves pip out
            subprocess.run([VENV_PYTHON, "-m", "ensurepip"], stdout=subprocess.DEVNULL, check=True)
        return
    version = platform.python_version()
    print(f"Creating .venv with Python {version}", flush=True)
    try:
        venv.EnvBuilder(with_pip=True, clear=VENV.exists(), symlinks=True, prompt="headrace").create(VENV)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SetupError(f"the virtual environment .venv could not be made: {error}") from error


def install(extras: set[str]) -> None:
    """Install Headrace editable with these extras; pip's own progress is shown to a person at a terminal."""
    names = ",".join(sorted(extras))
    target = f"{ROOT}[{names}]" if names else str(ROOT)
    print(f"Installing headrace{f' [{names}]' if names else ''} into .venv …", flush=True)
    command = [str(VENV_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += [] if sys.stdout.isatty() else ["--quiet"]
    command += ["--editable", target]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    errors = process.stderr.read()
    if process.wait() != 0:
        sys.stderr.write(errors)
        raise SetupError(explain(errors))


def remove_backends() -> None:
    """The builds of MLX share file names: the old one goes before another comes."""
    packages = ["mlx-cpu", "mlx-cuda-12", "mlx-cuda-13"]
    command = [VENV_PYTHON, "-m", "pip", "uninstall", "--yes", "--quiet", *packages]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=True)


def explain(errors: str) -> str:
    """One line from pip's error output."""
    if re.search(r"ConnectionError|name resolution|Network is unreachable|timed out|ProxyError|SSLError", errors):
        return "pip reaches no package index; check the network, the proxy, or pip's index settings"
    if re.search(r"No matching distribution found for mlx", errors):
        return (
            "no MLX build fits this Python and system; it needs CPython 3.10 or newer and, on Linux, "
            f"glibc 2.35 or newer (here: {platform.python_version()}, {' '.join(platform.libc_ver())})"
        )
    if "No space left" in errors:
        return "the disk is full"
    return "pip could not install the requirements; its reason stands above"


def setup(asked_backend: str, dev: bool) -> None:
    with (ROOT / "pyproject.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once take turns
        make_venv()
        before = installed()
        if asked_backend == "auto" and before.intersection(BACKENDS):
            backend = next(name for name in BACKENDS if name in before)
        else:
            backend = choose_backend(asked_backend)
        wanted = {backend} | ({"dev"} if dev else set())
        if wanted <= before:
            return
        if before & set(BACKENDS) - {backend}:
            remove_backends()
        extras = wanted | (before & {"dev"})
        install(extras - {"metal"})  # Metal is what MLX brings on macOS by itself
        STAMP.write_text(json.dumps({"fingerprint": fingerprint(), "extras": sorted(extras)}))


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare .venv for Headrace.")
    parser.add_argument("--dev", action="store_true", help="install the test and lint tools too")
    parser.add_argument("--backend", choices=("auto", *BACKENDS), default="auto", help="MLX backend")
    arguments = parser.parse_args()
    try:
        setup(arguments.backend, arguments.dev)
    except SetupError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
