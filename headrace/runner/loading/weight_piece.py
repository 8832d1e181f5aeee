"""One unit of loading: some parameters, their sizes known beforehand, made on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class Piece:
    """Parameters that are made together.

    Attributes:
        shapes: parameter path -> shape.
        nbytes: of all of them, as they will be held.
        make: the arrays by path; may be lazy.
    """

    shapes: dict[str, tuple[int, ...]]
    nbytes: int
    make: Callable[[], dict[str, mx.array]]


def piece_of(name: str, array: mx.array) -> Piece:
    """A piece of one lazy array."""
    return Piece({name: tuple(array.shape)}, array.nbytes, lambda: {name: array})
