"""The user's cache folder, and files that appear in it whole or not at all.

Everything Headrace keeps between runs (the demo model, a prepared BLAS, measurements) lives in one private
folder. A file there is written under a temporary name, flushed and then renamed, so a name that exists is a
file that is complete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import StartupError


def cache_folder(name: str = "") -> Path:
    """Private folder for ``name``, made when missing.

    It is ``$HEADRACE_CACHE``, else ``$XDG_CACHE_HOME/headrace``, else ``~/.cache/headrace``. Raises StartupError
    when it cannot be made, belongs to somebody else, or others may write to it (libraries are loaded from it).
    """
    override = os.environ.get("HEADRACE_CACHE")
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(override) if override else (Path(xdg) if xdg else Path.home() / ".cache") / "headrace"
    _private(base)
    return _private(base / name) if name else base


def state_folder() -> Path:
    """Private folder for what must outlive a cleaned cache, made when missing.

    It is ``$HEADRACE_STATE``, else ``$XDG_STATE_HOME/headrace``, else ``~/.local/state/headrace``. Raises
    StartupError as ``cache_folder``.
    """
    override = os.environ.get("HEADRACE_STATE")
    xdg = os.environ.get("XDG_STATE_HOME")
    base = Path(override) if override else (Path(xdg) if xdg else Path.home() / ".local" / "state") / "headrace"
    return _private(base, "state folder", "HEADRACE_STATE")


def _private(folder: Path, what: str = "cache folder", variable: str = "HEADRACE_CACHE") -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise StartupError(
            f"the {what} {folder} cannot be used ({error.strerror}); set {variable} to a folder of yours"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartupError(
            f"the {what} {folder} belongs to another user or is writable by others; "
            f"make it yours (chmod 700) or set {variable} to another folder"
        )
    return folder


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; which it takes when the block ends well."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, name: str = "") -> Iterator[None]:
    """Hold the folder, or ``name`` in it, against others that prepare something there; waits."""
    with (folder / f"{name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
