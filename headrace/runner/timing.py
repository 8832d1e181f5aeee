"""How long a piece of device work takes, for choices made by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx


def best_seconds(run: Callable[[], mx.array], rounds: int = 5, repeat: int = 20) -> float:
    """Seconds of one ``run`` among ``repeat`` queued together, in the best of ``rounds``."""
    mx.eval([run() for _ in range(3)])
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval([run() for _ in range(repeat)])
        best = min(best, (time.perf_counter() - start) / repeat)
    return best
