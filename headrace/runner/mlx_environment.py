"""Settings that MLX reads from the environment when it is imported. This module does not import it.

On CUDA, MLX records operations as graphs and launches those:

    MLX_CUDA_GRAPH_CACHE_SIZE   the default cache throws when it thrashes and stays broken
    MLX_CUDA_SDPA_CACHE_SIZE    likewise
    MLX_MAX_MB_PER_BUFFER       a graph is cut when its inputs exceed this; KV pools of gigabytes are inputs of
                                every attention, and would cut a decode step into single layers
    MLX_MAX_OPS_PER_BUFFER      a graph is cut after so many operations; the device begins with a prompt when the
                                first graph is cut, which was two thirds of a prompt's operations (100 of 144)

What a user has set stays.

On the CPU, MLX's arrays come from the C library's heap. glibc raises the size from which it maps a block of its
own to that of the largest block freed so far, up to 32 MiB; from then on arrays lie among small blocks, and what
is freed between them does not return: a worker under overload grew by 100 MiB in ten minutes. With a fixed size it
stays flat.

What MLX compiles it puts into the temporary folder as C++ finds it, which throws when the environment names one
that is not there, and where that cannot be written to; Python takes the next that can.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile

_CUDA = {
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",
    "MLX_CUDA_SDPA_CACHE_SIZE": "2000",
    "MLX_MAX_MB_PER_BUFFER": "1000000",
    "MLX_MAX_OPS_PER_BUFFER": "32",
}
# Parameters of glibc's mallopt(3), bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Where C++ looks, in this order (std::filesystem::temp_directory_path).
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
_HEAP = {_MMAP_THRESHOLD: 256 << 10, _TRIM_THRESHOLD: 1 << 20}


def prepare() -> None:
    """Set what is not set. Call before MLX is imported."""
    named = next((os.environ[name] for name in _TEMPORARY if name in os.environ), None)
    if named is not None and not _takes_folders(named):
        os.environ["TMPDIR"] = tempfile.gettempdir()
    if sys.platform == "darwin":
        return  # Metal reads the last two as well, and its defaults are right there
    _settle_heap()
    for name, value in _CUDA.items():
        os.environ.setdefault(name, value)


def _takes_folders(parent: str) -> bool:
    """Tried, not asked: a full or read-only disk says yes when asked."""
    try:
        with tempfile.TemporaryDirectory(dir=parent):
            return True
    except OSError:
        return False


def _settle_heap() -> None:
    """Large blocks are mapped, whatever was freed before; nothing where the C library is another one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name.startswith("MALLOC_") for name in os.environ):
        for parameter, value in _HEAP.items():
            mallopt(parameter, value)
