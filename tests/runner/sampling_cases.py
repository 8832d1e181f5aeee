"""Logits as a kernel reads them; shared by the emulated kernels and the GPU's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def as_read(logits: np.ndarray, dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
    """``logits`` in ``dtype``, and what these are in float32."""
    array = mx.array(logits.astype(np.float32)).astype(dtype)
    return array, np.array(array.astype(mx.float32))
