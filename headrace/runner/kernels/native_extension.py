"""C++ extensions of MLX, built on the user's machine the first time they are wanted.

Operations that MLX has no hook for (attention of a whole batch on the CPU, replaying a recorded step on CUDA) are
``mlx::core::Primitive`` classes in ``native/``, compiled against the headers that MLX's wheel carries and bound
with nanobind in MLX's own domain, so that its arrays pass through. All of them are optional: without a compiler,
Python's headers or nanobind the caller gets one line that says what is missing and keeps its slower way.

A built library is kept in the cache folder under a hash of everything it depends on: its sources, the flags, MLX's
and nanobind's versions, the Python it is for and the processor.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from headrace.core.machine import cpu_features, cpu_model
from headrace.errors import StartupError
from headrace.files import appearing, cache_folder, locked

NATIVE = Path(__file__).parent.with_name("native")
# What extensions that use CUDA are built with besides their own files.
CUDA_HEADERS = ("cuda_driver.h", "cuda_names/cuda.h", "cuda_names/cuda_runtime.h", "cuda_names/fmt/format.h")
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-DNB_DOMAIN=mlx", "-DNDEBUG")
_BUILD_TIMEOUT_S = 300.0

log = logging.getLogger("headrace.runner")


class ExtensionError(Exception):
    """Why an extension is not there, in one line."""


@dataclass(frozen=True, slots=True)
class Extension:
    """What an extension module is built from.

    Attributes:
        name: of the module, as in the source's ``NB_MODULE``.
        sources: files in ``native/``: translation units first; headers are only hashed.
        flags: further compiler flags.
        include: folder in ``native/`` whose headers come before all others; may be empty.
    """

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    include: str = ""

    @property
    def files(self) -> list[Path]:
        return [NATIVE / source for source in self.sources]

    @property
    def all_flags(self) -> list[str]:
        return [*([f"-I{NATIVE / self.include}"] if self.include else []), *self.flags]


def load(extension: Extension) -> ModuleType:
    """The module, built when the cache has none. MLX must have been imported.

    Raises ExtensionError when something is missing, the compiler fails, or the module does not load.
    """
    try:
        return _import(extension.name, _built(extension))
    except subprocess.CalledProcessError as error:
        raise ExtensionError(f"the compiler failed: {_first_error(error.stderr)}") from error
    except (OSError, subprocess.SubprocessError, StartupError, ImportError) as error:
        raise ExtensionError(" ".join(str(error).split())[:200]) from error


def own_processor() -> tuple[str, ...]:
    """Compiler flags for this machine's processor."""
    return ("-mcpu=native",) if os.uname().machine == "aarch64" else ("-march=native",)


def build_ahead(extensions: Sequence[Extension]) -> None:
    """Begin to build what the cache has not, beside whatever comes before it is loaded; ``load`` tells faults."""

    def build(extension: Extension) -> None:
        with suppress(OSError, subprocess.SubprocessError, StartupError, ExtensionError):
            _built(extension)

    for extension in extensions:
        threading.Thread(target=build, args=(extension,), name=f"build {extension.name}", daemon=True).start()


def _built(extension: Extension) -> Path:
    """The library in the cache; waits for another thread or process that builds it."""
    folder = cache_folder("extensions")
    identity = _identity(extension)
    target = folder / f"{extension.name}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        with locked(folder, extension.name):
            if not target.exists():
                for stray in folder.glob(f".{extension.name}-*"):  # of builds that were killed
                    stray.unlink(missing_ok=True)
                units = [file for file in extension.files if file.suffix == ".cpp"]
                with appearing(target) as built:
                    _compile(built, units, extension.all_flags)
    return target


def _identity(extension: Extension) -> str:
    versions = [f"{package} {_version(package)}" for package in ("mlx", "mlx-cuda-12", "mlx-cuda-13", "nanobind")]
    parts = [extension.name, *_FLAGS, *extension.all_flags, *versions, sys.version, cpu_model(), cpu_features()]
    return "\n".join([*parts, *(file.read_text(encoding="utf-8") for file in extension.files)])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing() -> str | None:
    """What a build lacks on this machine, in a few words; None: nothing."""
    if shutil.which("g++") is None:
        return "g++ is missing"
    if not (_python_headers() / "Python.h").exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"Python's headers are missing (on Debian or Ubuntu: apt-get install python{version}-dev)"
    if _package("nanobind") is None:
        return "nanobind is missing (pip install nanobind)"
    return None if _mlx_folder() is not None else "MLX's headers are missing"


def _python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _compile(target: Path, units: Sequence[Path], flags: Sequence[str]) -> None:
    if (lack := missing()) is not None:
        raise ExtensionError(lack)
    log.info(
        "building %s, once on this machine: half a minute on two cores", ", ".join(unit.name for unit in units)
    )
    compiler, python = shutil.which("g++"), _python_headers()
    nanobind, mlx = _package("nanobind"), _mlx_folder()
    assert compiler is not None and nanobind is not None and mlx is not None
    includes = [mlx / "include", nanobind / "include", nanobind / "ext/robin_map/include", python]
    settings = [*_FLAGS, *flags, *(f"-I{folder}" for folder in includes)]

    def run(*arguments: str) -> None:
        command = [compiler, *settings, *arguments]
        subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_BUILD_TIMEOUT_S, check=True
        )

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:  # units side by side
        sources = [*units, nanobind / "src/nb_combined.cpp"]
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        list(pool.map(lambda source, made: run("-c", str(source), "-o", made), sources, objects))
        run(*objects, f"-L{mlx / 'lib'}", "-lmlx", "-o", str(target))


def _mlx_folder() -> Path | None:
    """Where MLX's headers and library are: the package is one folder that several distributions fill."""
    spec = importlib.util.find_spec("mlx")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / "include/mlx/primitives.h").exists() and (Path(place) / "lib").is_dir():
            return Path(place)
    return None


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _import(name: str, file: Path) -> ModuleType:
    if name in sys.modules:  # its types can be registered once
        return sys.modules[name]
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def _first_error(output: str | None) -> str:
    lines = (output or "").splitlines()
    return next((line for line in lines if "error" in line), lines[0] if lines else "no output")[:200]
