"""Vectors as they cross the API: little-endian float32 in, of length one out."""

from __future__ import annotations

import base64
import math
import sys
from array import array

from headrace.errors import InvalidRequest


def unit_vector(hidden: bytes, dimensions: int | None = None) -> array[float]:
    """The first ``dimensions`` values of ``hidden`` (None: all), scaled to length one (a zero vector stays)."""
    values = array("f", hidden)
    if sys.byteorder == "big":
        values.byteswap()
    if dimensions is not None:
        if dimensions > len(values):
            raise InvalidRequest(
                f"dimensions is {dimensions}; this model's vectors have {len(values)}", param="dimensions"
            )
        values = values[:dimensions]
    length = math.sqrt(math.fsum(value * value for value in values))
    return array("f", [value / length for value in values]) if length > 0 else values


def as_base64(values: array[float]) -> str:
    """Base64 of little-endian float32."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode()


def cosine(one: array[float], other: array[float]) -> float:
    """Of two unit vectors."""
    return max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(one, other, strict=True))))
