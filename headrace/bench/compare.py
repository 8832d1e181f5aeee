"""Two results side by side: what changed between their cells, and whether chance explains it.

A cell of A is compared with the cell of B that has the same prompts, lengths, load and cache. A difference is
B / A - 1. Its 95 % interval comes from the bootstrap: requests are drawn again with replacement on both sides (a
request's gaps stay together, since they depend on each other), throughput over the repetitions' rates instead.
With fewer than three repetitions on a side there is no interval for throughput: two values say nothing about
spread. What the server counted itself (queue wait, cache, KV, preemptions) is one value per repetition and drawn
likewise; failed requests are counted, since latencies are of the others alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.bench.campaign import Run
from headrace.bench.observe import Sample
from headrace.bench.prometheus import ServerFigures, server_figures
from headrace.bench.report import runs_of
from headrace.bench.stats import gaps_s, tpot_s, ttft_s

Floats = NDArray[np.float64]
Units = Sequence[Floats]  # what is drawn: one array of values per request or repetition

_MIN_REPETITIONS = 3
_MIN_REQUESTS = 5


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of one cell in A and in B.

    Attributes:
        change: B / A - 1; None where a side has no value.
        low, high: 95 % interval of it; None where there is too little to draw from.
        better_up: whether more is better.
        unit: "tok/s", "s", "share", "bytes" or "count".
    """

    cell: str
    figure: str
    a: float | None
    b: float | None
    change: float | None
    low: float | None
    high: float | None
    better_up: bool = False
    unit: str = "s"

    @property
    def verdict(self) -> str:
        """better, worse, "no difference shown" (the interval holds 0), or "?" without an interval."""
        if self.low is None or self.high is None:
            return "?"
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return "better" if (self.low > 0) == self.better_up else "worse"


def _mean(values: Floats) -> float:
    return float(values.mean())


def _percentile(percent: float) -> Callable[[Floats], float]:
    return lambda values: float(np.percentile(values, percent))


def _ttft(sample: Sample) -> list[float]:
    value = ttft_s(sample)
    return [] if value is None else [value]


def _tpot(sample: Sample) -> list[float]:
    value = tpot_s(sample)
    return [] if value is None else [value]


LATENCIES: Sequence[tuple[str, Callable[[Sample], list[float]], Callable[[Floats], float]]] = (
    ("TTFT mean", _ttft, _mean),
    ("TTFT p50", _ttft, _percentile(50)),
    ("TTFT p95", _ttft, _percentile(95)),
    ("ITL mean", gaps_s, _mean),
    ("ITL p50", gaps_s, _percentile(50)),
    ("ITL p95", gaps_s, _percentile(95)),
    ("TPOT mean", _tpot, _mean),
    ("E2E mean", lambda sample: [sample.end_s - sample.sent_s], _mean),
    ("E2E p95", lambda sample: [sample.end_s - sample.sent_s], _percentile(95)),
)


# Of the server's own: name, value of one repetition, whether more is better, unit.
SERVER: Sequence[tuple[str, Callable[[ServerFigures], float | None], bool, str]] = (
    ("queue wait", lambda figures: figures.queue_wait_s.mean, False, "s"),
    ("cache hits", lambda figures: figures.cache_hit_rate, True, "share"),
    ("KV use max", lambda figures: figures.kv_usage_max, False, "share"),
    ("preemptions", lambda figures: figures.preemptions, False, "count"),
    ("memory max", lambda figures: figures.memory_max_bytes, False, "bytes"),
)


def compare(a: Mapping[str, Any], b: Mapping[str, Any], *, draws: int = 1000, seed: int = 0) -> list[Difference]:
    """Differences of all cells that both have, in A's order."""
    others = {cell["name"]: cell for cell in b["cells"]}
    random = np.random.default_rng(seed)
    found: list[Difference] = []
    for cell in a["cells"]:
        other = others.get(cell["name"])
        if other is not None and not cell["skipped"] and not other["skipped"]:
            found += _compare_cells(cell, other, draws, random)
    return found


def only_in_one(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of cells that only A, and only B, has."""
    names = [[cell["name"] for cell in report["cells"]] for report in (a, b)]
    first, second = names
    return [name for name in first if name not in second], [name for name in second if name not in first]


def _compare_cells(
    a: Mapping[str, Any], b: Mapping[str, Any], draws: int, random: np.random.Generator
) -> list[Difference]:
    name = a["name"]
    rates = [_rates(cell) for cell in (a, b)]
    low = high = None
    if min(map(len, rates)) >= _MIN_REPETITIONS:
        low, high = _interval(rates[0], rates[1], _mean, draws, random)
    before, after = (cell["figures"]["output_tokens_per_s"] for cell in (a, b))
    change = _change(before, after)
    found = [Difference(name, "output tok/s", before, after, change, low, high, better_up=True, unit="tok/s")]
    samples = [_good(cell) for cell in (a, b)]
    for title, values_of, figure in LATENCIES:
        units = [[np.array(taken) for sample in side if (taken := values_of(sample))] for side in samples]
        before, after = (figure(np.concatenate(side)) if side else None for side in units)
        low = high = None
        if min(map(len, units)) >= _MIN_REQUESTS:
            low, high = _interval(units[0], units[1], figure, draws, random)
        found.append(Difference(name, title, before, after, _change(before, after), low, high))
    return found + _of_servers(name, runs_of(a), runs_of(b), draws, random) + _failures(name, a, b)


def _of_servers(
    name: str, a: Sequence[Run], b: Sequence[Run], draws: int, random: np.random.Generator
) -> list[Difference]:
    """Means over repetitions; figures that neither side has are left out."""
    found: list[Difference] = []
    sides = [[server_figures([run.server]) for run in side if run.server is not None] for side in (a, b)]
    for title, value_of, better_up, unit in SERVER:
        units = [[np.array([value]) for one in side if (value := value_of(one)) is not None] for side in sides]
        if not any(units):
            continue
        before, after = (_mean(np.concatenate(side)) if side else None for side in units)
        low = high = None
        if min(map(len, units)) >= _MIN_REPETITIONS:
            low, high = _interval(units[0], units[1], _mean, draws, random)
        found.append(Difference(name, title, before, after, _change(before, after), low, high, better_up, unit))
    return found


def _failures(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Nothing when no request failed."""
    before, after = (float(sum(cell["figures"]["failed"].values())) for cell in (a, b))
    if not before and not after:
        return []
    return [Difference(name, "failed", before, after, _change(before, after), None, None, unit="count")]


def _good(cell: Mapping[str, Any]) -> list[Sample]:
    return [sample for run in runs_of(cell) for sample in run.result.samples if sample.failure is None]


def _rates(cell: Mapping[str, Any]) -> list[Floats]:
    rates = [run["output_tokens_per_s"] for run in cell["runs"]]
    return [np.array([rate]) for rate in rates if rate is not None]


def _change(a: float | None, b: float | None) -> float | None:
    return b / a - 1 if a and b is not None else None


def _interval(
    a: Units, b: Units, figure: Callable[[Floats], float], draws: int, random: np.random.Generator
) -> tuple[float | None, float | None]:
    """95 % percentile interval of figure(b) / figure(a) - 1."""
    ratios = []
    for _ in range(draws):
        below = figure(_drawn(a, random))
        if below > 0:
            ratios.append(figure(_drawn(b, random)) / below - 1)
    if not ratios:
        return None, None
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _drawn(units: Units, random: np.random.Generator) -> Floats:
    chosen = random.integers(0, len(units), len(units))
    return np.concatenate([units[index] for index in chosen])
