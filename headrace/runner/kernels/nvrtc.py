"""NVIDIA's run-time compiler through ctypes: the library that MLX has loaded, called as MLX calls it.

NVRTC compiles without a device. Its front end runs one program at a time in a process; code generation of several
programs overlaps (CUDA 12.3 and later). ctypes releases the interpreter lock during calls.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")


class NvrtcError(Exception):
    """Why something was not compiled, in one line."""


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code of one kernel (a cubin), and the kernel's mangled name in it."""

    code: bytes
    symbol: str


def loaded_library(maps: str | None = None) -> Path:
    """The NVRTC library that this process has loaded; ``maps``: text of ``/proc/self/maps``."""
    text = _MAPS.read_text(encoding="utf-8") if maps is None else maps
    found = re.search(r"^[^/\n]*(/.*/libnvrtc(?:\.alt)?\.so[.\d]*)$", text, re.MULTILINE)
    if found is None:
        raise NvrtcError("MLX has not loaded NVRTC")
    return Path(found.group(1))


def include_folders(mlx: Path, version: tuple[int, int]) -> list[Path]:
    """Where headers are, in the order in which MLX gives them to NVRTC.

    Args:
        mlx: the package's folder.
        version: of NVRTC; NVIDIA's packages are laid out by it.
    """
    packaged = mlx.parent / "nvidia" / ("cuda_runtime" if version[0] < 13 else f"cu{version[0]}") / "include"
    toolkit = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda") / "include"
    own = [folder for folder in (mlx / "include", mlx / "include/cccl") if folder.is_dir()]
    runtime = packaged if packaged.is_dir() else toolkit
    if not (runtime / "cuda_fp16.h").exists():
        raise NvrtcError(f"CUDA's headers are not in {packaged} or {toolkit}")
    return [*own, runtime]


class Nvrtc:
    """The compiler in ``library``; usable from several threads."""

    def __init__(self, library: Path) -> None:
        try:
            for builtins in library.parent.glob("libnvrtc-builtins.so*"):
                ctypes.CDLL(str(builtins))  # NVRTC opens it by its bare name
            self._library = ctypes.CDLL(str(library))
            self._declare()
        except (OSError, AttributeError) as error:
            raise NvrtcError(" ".join(str(error).split())[:200]) from error
        major, minor = c_int(), c_int()
        self._check(self._library.nvrtcVersion(byref(major), byref(minor)))
        self.version = major.value, minor.value

    def compile(self, source: str, *, name: str, kernel: str, options: Sequence[str]) -> Image:
        """Compile for the ``sm_…`` architecture that ``options`` name.

        Args:
            source: a whole program.
            name: what the program is called in messages.
            kernel: the kernel's qualified name.
            options: of the compiler.

        Raises NvrtcError with the compiler's first error.
        """
        call = self._library
        program = c_void_p()
        self._check(call.nvrtcCreateProgram(byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
        try:
            self._check(call.nvrtcAddNameExpression(program, kernel.encode()))
            given = (c_char_p * len(options))(*(option.encode() for option in options))
            if call.nvrtcCompileProgram(program, len(options), given):
                raise NvrtcError(_first_error(self._log(program)))
            symbol = c_char_p()
            self._check(call.nvrtcGetLoweredName(program, kernel.encode(), byref(symbol)))
            size = c_size_t()
            self._check(call.nvrtcGetCUBINSize(program, byref(size)))
            code = ctypes.create_string_buffer(size.value)
            self._check(call.nvrtcGetCUBIN(program, code))
            return Image(code.raw, (symbol.value or b"").decode())
        finally:
            call.nvrtcDestroyProgram(byref(program))

    def _log(self, program: c_void_p) -> str:
        size = c_size_t()
        self._check(self._library.nvrtcGetProgramLogSize(program, byref(size)))
        text = ctypes.create_string_buffer(max(1, size.value))
        self._check(self._library.nvrtcGetProgramLog(program, text))
        return text.value.decode(errors="replace")

    def _check(self, result: int) -> None:
        if result:
            raise NvrtcError(self._library.nvrtcGetErrorString(result).decode())

    def _declare(self) -> None:
        program, text = c_void_p, c_char_p
        arguments: dict[str, list[Any]] = {
            "nvrtcVersion": [POINTER(c_int), POINTER(c_int)],
            "nvrtcCreateProgram": [POINTER(program), text, text, c_int, c_void_p, c_void_p],
            "nvrtcAddNameExpression": [program, text],
            "nvrtcCompileProgram": [program, c_int, POINTER(text)],
            "nvrtcGetLoweredName": [program, text, POINTER(text)],
            "nvrtcGetCUBINSize": [program, POINTER(c_size_t)],
            "nvrtcGetCUBIN": [program, text],
            "nvrtcGetProgramLogSize": [program, POINTER(c_size_t)],
            "nvrtcGetProgramLog": [program, text],
            "nvrtcDestroyProgram": [POINTER(program)],
        }
        for name, types in arguments.items():
            getattr(self._library, name).argtypes = types
        self._library.nvrtcGetErrorString.argtypes = [c_int]
        self._library.nvrtcGetErrorString.restype = c_char_p


def _first_error(log: str) -> str:
    lines = log.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])[:200]
