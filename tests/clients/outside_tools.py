"""Clients and judges in environments of their own, made once per set of versions and kept in the cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from headrace.files import cache_folder

JS = Path(__file__).parent / "js"
INSTALL_S = 600


def node_modules() -> Path:
    """A folder with the tests in JavaScript and their packages beside them. Skips where Node is missing."""
    for command in ("node", "npm"):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed; the tests in tests/clients/js need it")
    lock = JS / "package-lock.json"
    folder = cache_folder("client-tests") / f"js-{_digest(lock.read_text())}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", lock.name):
            shutil.copy(JS / name, folder)
        _install(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder)
        (folder / "complete").touch()
    for source in JS.glob("*.mjs"):
        shutil.copy(source, folder)
    return folder


def python_tools(*requirements: str) -> Path:
    """``bin`` of a virtual environment with these packages in it."""
    folder = cache_folder("client-tests") / f"python-{_digest(sys.version, *requirements)}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        _install([sys.executable, "-m", "venv", str(folder)], folder.parent)
        _install([str(folder / "bin/pip"), "install", "--quiet", *requirements], folder)
        (folder / "complete").touch()
    return folder / "bin"


def _digest(*texts: str) -> str:
    return sha256("\n".join(texts).encode()).hexdigest()[:12]


def _install(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def clean_environment(**more: str) -> dict[str, str]:
    """Neither keys nor addresses of other servers; proxies stay out of the way of the loopback."""
    names = ("PATH", "HOME", "TMPDIR", "LANG")
    return {name: os.environ[name] for name in names if name in os.environ} | {"NO_COLOR": "1", **more}
