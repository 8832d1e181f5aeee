"""What is measured: cells, each one kind of prompt and answer under one load.

A sweep varies one axis; the other axes then have one value each, so that a figure's change has one cause.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AXES = ("concurrency", "prompt", "output")
SWEEPS = {
    "concurrency": (1, 2, 4, 8, 16, 32),
    "prompt": (512, 2048, 8192, 16384),
    "output": (128, 512),
}

_REQUESTS_PER_STREAM = 2
_RATE_SECONDS = 10
_RATE_REQUESTS = (16, 500)
_BURST_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class Load:
    """``concurrency``: so many streams in a closed loop; ``rate``: requests per second, inf: all at once."""

    kind: Literal["concurrency", "rate"]
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} at once" if self.kind == "concurrency" else f"{self.value:g}/s"

    def default_requests(self) -> int:
        """Requests per repetition: two per stream, or ten seconds' arrivals (16 to 500; 64 for a burst)."""
        if self.kind == "concurrency":
            return _REQUESTS_PER_STREAM * int(self.value)
        if math.isinf(self.value):
            return _BURST_REQUESTS
        low, high = _RATE_REQUESTS
        return min(max(low, math.ceil(self.value * _RATE_SECONDS)), high)


@dataclass(frozen=True, slots=True)
class Cell:
    """``prompts``: name of a prompt set, or "workload". ``cache``: "cold", or "warm" (sent once before)."""

    prompts: str
    output_tokens: int
    load: Load
    cache: str = "cold"

    def __str__(self) -> str:
        cache = "" if self.cache == "cold" else f", {self.cache} cache"
        return f"{self.prompts} -> {self.output_tokens}, {self.load}{cache}"


def all_cells(
    prompts: Sequence[str], output_tokens: Sequence[int], loads: Sequence[Load], caches: Sequence[str]
) -> list[Cell]:
    """Every combination, loads innermost."""
    return [
        Cell(name, tokens, load, cache)
        for cache in caches
        for name in prompts
        for tokens in output_tokens
        for load in loads
    ]


def arrivals_s(count: int, rate: float, seed: str) -> list[float]:
    """Times of ``count`` Poisson arrivals from 0 on, scaled so that the last comes at (count - 1) / rate.

    (Given their number and their span, a Poisson process's arrivals in between are uniform; without the scaling a
    run of few requests would offer a rate that is off by the chance of its draw.) An infinite rate: all at once.
    """
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    span = (count - 1) / rate
    picker = random.Random(seed)
    return [0.0, *sorted(picker.uniform(0, span) for _ in range(count - 2)), span]
