"""Compiled CUDA kernels, kept on disk for the next start and compiled at the same time for the first.

MLX compiles a custom kernel when it first runs it, one after another, and keeps none; but before it compiles any
module it looks for one of that name in the folder of ``MLX_PTX_CACHE_DIR``. So a kernel is compiled here ahead of
its first run and put there under the name that MLX will look for: name and hash of its text (``text.py``).
Nothing else changes: MLX launches it as before, and what is missing there it compiles itself.

    NAME_HASH.ptx   machine code (MLX's suffix, whatever is in it)
    NAME_HASH.txt   "kernel TAB symbol" for MLX; for us, in lines that MLX skips, the digest of all that the code
                    depends on and the digest of the code

A file whose digests are not the expected ones is compiled again, so a truncated one, or one of another compiler,
does no harm. MLX keeps modules of its own in the same folder and does not write them whole or not at all; what a
killed process left of one is removed before MLX looks.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from headrace.core.machine import usable_cores
from headrace.errors import StartupError
from headrace.files import appearing, cache_folder, locked
from headrace.runner.kernels.nvrtc import Image, Nvrtc, NvrtcError, include_folders, loaded_library
from headrace.runner.kernels.text import NAMESPACE, KernelForm

log = logging.getLogger("headrace.runner")

FOLDER_VARIABLE = "MLX_PTX_CACHE_DIR"
# MLX splits longer names over folders; ours are far shorter.
_LONGEST_NAME = 240
_ELF_HEADER_BYTES = 64
# Of libstdc++'s std::hash for strings.
_HASH_SEED = 0xC70F6907

Compile = Callable[[KernelForm], Image]


class KernelCache:
    """Modules in one folder.

    Args:
        folder: where MLX looks for modules.
        environment: whatever code depends on besides a kernel's text.
        compile: makes a kernel's code; called from several threads. Raises NvrtcError.
        hashed: MLX's hash of a text.
        workers: kernels compiled at the same time.

    Attributes:
        compiled, kept: how many kernels were compiled here, and how many were there already.
        seconds: time that callers waited for them.
    """

    def __init__(
        self,
        folder: Path,
        environment: str,
        compile: Compile,
        *,
        hashed: Callable[[bytes], int],
        workers: int,
    ) -> None:
        self._folder = folder
        self._environment = environment
        self._compile = compile
        self._hashed = hashed
        self._workers = workers
        self._pending: list[Future[str]] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self.compiled = 0
        self.kept = 0
        self.faults = 0
        self.seconds = 0.0

    def ensure(self, form: KernelForm) -> None:
        """Have the module of ``form`` in the folder: now, or by the end of the surrounding ``together``."""
        if self._pool is not None and self._pending is not None:
            self._pending.append(self._pool.submit(self._provide, form))
            return
        begun = time.perf_counter()
        self._count(self._provide(form))
        self.seconds += time.perf_counter() - begun

    @contextmanager
    def together(self) -> Iterator[None]:
        """Kernels that are first called in the block are compiled at the same time; at its end they are there.

        Results must not be evaluated in the block: MLX would compile what is not there yet.
        """
        if self._pool is not None:
            yield
            return
        begun = time.perf_counter()
        with ThreadPoolExecutor(self._workers) as pool:
            self._pool, self._pending = pool, []
            try:
                yield
            finally:
                pending, self._pool, self._pending = self._pending, None, None
                for outcome in pending:
                    self._count(outcome.result())
                self.seconds += time.perf_counter() - begun

    def note(self) -> str:
        """What was done so far, in one line."""
        text = f"CUDA kernels: {self.compiled} compiled, {self.kept} from the cache, {self.seconds:.2f} s"
        return text + (f"; {self.faults} left to MLX" if self.faults else "")

    def _count(self, outcome: str) -> None:
        if outcome == "compiled":
            self.compiled += 1
        elif outcome == "kept":
            self.kept += 1
        else:
            self.faults += 1
            if self.faults == 1:
                log.info("MLX compiles a kernel itself at every start: %s", outcome)

    def _provide(self, form: KernelForm) -> str:
        """``compiled``, ``kept``, or why neither."""
        try:
            module = f"{form.name}_{self._hashed(form.mlx.encode()):x}"
            if len(module) > _LONGEST_NAME:
                return f"the name {form.name[:40]} is too long"
            key = hashlib.sha256(f"{self._environment}\n{form.own}".encode()).hexdigest()
            if self._holds(module, key):
                return "kept"
            image = self._compile(form)
            self._keep(module, form, key, image)
            return "compiled"
        except Exception as error:
            # Whatever a compiler or a disk says about a kernel, MLX can compile it.
            return f"{form.name}: {' '.join(str(error).split())[:200]}"

    def _files(self, module: str) -> tuple[Path, Path]:
        return self._folder / f"{module}.ptx", self._folder / f"{module}.txt"

    def _holds(self, module: str, key: str) -> bool:
        code, names = self._files(module)
        try:
            lines = names.read_text(encoding="utf-8").splitlines()
            return lines[1:] == _digests(key, code.read_bytes())
        except (OSError, ValueError):
            return False

    def _keep(self, module: str, form: KernelForm, key: str, image: Image) -> None:
        """The code comes last: MLX takes a module whose code is there."""
        code, names = self._files(module)
        lines = [f"{NAMESPACE}::{form.name}\t{image.symbol}", *_digests(key, image.code)]
        with locked(self._folder):
            code.unlink(missing_ok=True)
            with appearing(names) as draft:
                draft.write_text("\n".join(lines) + "\n", encoding="utf-8")
            with appearing(code) as draft:
                draft.write_bytes(image.code)


def _digests(key: str, code: bytes) -> list[str]:
    return [f"key {key}", f"code {hashlib.sha256(code).hexdigest()}"]


# -- the default device ------------------------------------------------------------------------------------


@functools.cache
def device_cache() -> KernelCache | None:
    """The cache of MLX's CUDA device; None without one, or, with a line in the log, where it cannot be.

    Call before MLX compiles its first kernel: it then settles on the folder.
    """
    if mx.default_device() != mx.gpu or mx.metal.is_available():
        return None
    try:
        return _open()
    except (NvrtcError, OSError, StartupError, KeyError) as error:
        log.info("MLX compiles kernels itself at every start: %s", " ".join(str(error).split())[:200])
        return None


def _open() -> KernelCache:
    info = mx.device_info()
    major, minor = int(info["compute_capability_major"]), int(info["compute_capability_minor"])
    compiler = Nvrtc(loaded_library())
    folders = include_folders(Path(mx.__file__).parent, compiler.version)
    options = compile_options(major, minor, folders)
    environment = environment_of(compiler.version, options, folders)
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        cache_folder("kernels")
        digest = hashlib.sha256(environment.encode()).hexdigest()[:8]
        folder = cache_folder(f"kernels/mlx-{version('mlx')}-sm{major}{minor}-{digest}")
        os.environ[FOLDER_VARIABLE] = str(folder)
    remove_incomplete(folder)
    compile = functools.partial(compile_form, compiler, options)
    return KernelCache(folder, environment, compile, hashed=mlx_hash(), workers=usable_cores())


def compile_form(compiler: Nvrtc, options: list[str], form: KernelForm) -> Image:
    """The code of ``form``."""
    return compiler.compile(form.own, name=form.name, kernel=f"{NAMESPACE}::{form.name}", options=options)


def compile_options(major: int, minor: int, folders: list[Path]) -> list[str]:
    """What MLX gives to NVRTC for a device of this compute capability."""
    specific = "a" if major >= 9 else ""
    return [
        "--device-as-default-execution-space",
        f"--gpu-architecture=sm_{major}{minor}{specific}",
        *(f"--include-path={folder}" for folder in folders),
    ]


def environment_of(nvrtc: tuple[int, int], options: list[str], folders: list[Path]) -> str:
    """All that code depends on besides the text: versions, options, and the headers that texts include."""
    parts = [f"mlx {version('mlx')}", f"nvrtc {nvrtc[0]}.{nvrtc[1]}", *options]
    for name in (
        "cuda_fp16.h",
        "cuda_fp16.hpp",
        "cuda_bf16.h",
        "cuda_bf16.hpp",
        "mlx/backend/cuda/device/config.h",
    ):
        file = next((folder / name for folder in folders if (folder / name).exists()), None)
        parts.append(f"{name} {file and hashlib.sha256(file.read_bytes()).hexdigest()}")
    return "\n".join(parts)


def remove_incomplete(folder: Path) -> None:
    """Remove MLX's own modules that are cut short: MLX would fail on them at every start."""
    for code in folder.rglob("*.ptx"):
        names = code.with_suffix(".txt")
        if code.name.startswith("custom_kernel_"):
            continue
        try:
            whole = _is_whole(code.read_bytes()) and names.read_text(encoding="utf-8").endswith("\n")
        except (OSError, ValueError):
            whole = False
        if not whole:
            code.unlink(missing_ok=True)
            names.unlink(missing_ok=True)


def _is_whole(code: bytes) -> bool:
    """Whether an ELF file is as long as its tables say, which NVRTC puts last; other files need be there only."""
    if code[:4] != b"\x7fELF" or len(code) < _ELF_HEADER_BYTES:
        return len(code) >= _ELF_HEADER_BYTES and code[0] != 0
    segments, sections = struct.unpack_from("<QQ", code, 0x20)
    segment_bytes, segment_count, section_bytes, section_count = struct.unpack_from("<4H", code, 0x36)
    ends = segments + segment_bytes * segment_count, sections + section_bytes * section_count
    return len(code) >= int(max(ends))


def mlx_hash() -> Callable[[bytes], int]:
    """``std::hash`` of a string, from the C++ library that MLX uses."""
    try:
        hash_bytes = ctypes.CDLL("libstdc++.so.6")._ZSt11_Hash_bytesPKvmm
    except AttributeError as error:
        raise OSError("libstdc++ has no hash of bytes") from error
    hash_bytes.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    hash_bytes.restype = ctypes.c_size_t
    return lambda text: int(hash_bytes(text, len(text), _HASH_SEED))
