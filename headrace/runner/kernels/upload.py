"""Small arrays of the host in a CUDA device's own memory, by an asynchronous copy (``native/upload.cpp``).

``device_arrays.py`` says why: a kernel that reads what the host has made waits for it.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.runner.device_arrays import on_device
from headrace.runner.kernels.native_extension import CUDA_HEADERS, Extension, ExtensionError, load

log = logging.getLogger("headrace.runner")

EXTENSION = Extension("headrace_upload", ("upload.cpp", *CUDA_HEADERS), include="cuda_names")

# What one upload may hold.
MOST_BYTES = 64 * 1024


class Uploads:
    """The way to one device; make one and keep it.

    Args:
        native: the extension module of ``upload.cpp``.
    """

    def __init__(self, native: Any) -> None:
        self._native = native
        self._outbox = native.Outbox(MOST_BYTES)
        self._blanks: dict[tuple[int, ...], mx.array] = {}

    @staticmethod
    def checked() -> Uploads | None:
        """On a CUDA device, if what is sent arrives; None elsewhere, and where it cannot be (logged)."""
        if mx.default_device() != mx.gpu or mx.metal.is_available():
            return None
        try:
            uploads = Uploads(load(EXTENSION))
            fault = None if uploads._work() else "other values arrive than were sent"
        except (ExtensionError, RuntimeError) as error:
            fault = " ".join(str(error).split())[:200]
        if fault is None:
            return uploads
        log.warning("small arrays reach the GPU by a kernel, which waits for them: %s", fault)
        return None

    def __call__(self, words: npt.NDArray[np.uint32]) -> mx.array:
        """``words``, at most ``MOST_BYTES``, as a lazy uint32 array of the same shape."""
        if words.nbytes > MOST_BYTES:
            return mx.array(words)
        if words.shape not in self._blanks:
            self._blanks[words.shape] = on_device(mx.zeros(words.shape, mx.uint32))
        blank = self._blanks[words.shape]
        # Not zeros: a kernel would read that one zero where the host has put it.
        sent: mx.array = self._native.send(self._outbox, blank + blank, words.tobytes())
        return sent

    def _work(self) -> bool:
        """Several uploads queued together, with operations before, between and behind."""
        given = [np.arange(8 * rows, dtype=np.uint32).reshape(rows, 8) * 97 + rows for rows in range(1, 21)]
        sums = [self(words) + self(words[::-1].copy()) for words in given]
        mx.eval(sums)
        return all(
            np.array_equal(np.array(found), words + words[::-1]) for found, words in zip(sums, given, strict=True)
        )
