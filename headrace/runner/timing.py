"""How long a piece of device work takes, for choices made by measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def no_slower(new: Callable[[], mx.array], old: Callable[[], mx.array], rounds: int = 7, repeat: int = 5) -> bool:
    """Whether ``new`` takes no longer than ``old``, in turns, by the best of ``rounds``; a tenth is noise."""
    best = [float("inf"), float("inf")]
    mx.eval(new(), old())
    for _ in range(rounds):
        for place, run in enumerate((new, old)):
            start = time.perf_counter()
            mx.eval([run() for _ in range(repeat)])
            best[place] = min(best[place], time.perf_counter() - start)
    return best[0] <= 1.1 * best[1]


def best_of_each(runs: Sequence[Callable[[], mx.array]], rounds: int, repeat: int) -> list[float]:
    """Seconds of each, in turns, since other processes may take the cores for a while; the best of ``rounds``.

    Of three times as many while the first is not the slowest: a verdict against the others stays for all starts.
    """
    best = [float("inf")] * len(runs)
    for done in range(3 * rounds):
        if done >= rounds and best[0] > max(best[1:]):
            break
        best = [min(so_far, best_seconds(run, 1, repeat)) for so_far, run in zip(best, runs, strict=True)]
    return best


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that the host takes to start an operation, and that the device then takes for it."""

    host: float
    device: float

    @property
    def in_a_step(self) -> float:
        """Seconds of a decode step made of such operations: the host runs ahead of the device."""
        return max(self.host, self.device)

    def beats(self, other: Cost) -> bool:
        """Whether this one is the better choice in a decode step, where the host is ahead of the device.

        What keeps the device longer than the host is compared by the device's time alone; else both count.
        """
        if other.device > other.host:
            return self.device < other.device
        return self.host + self.device < other.host + other.device


def compiled_cost(
    runs: Sequence[Callable[[mx.array], mx.array]], inputs: Sequence[mx.array], rounds: int = 5
) -> Cost:
    """Of each ``runs[i](inputs[i])`` on average, all in one compiled function, in the best of ``rounds``.

    Few enough that MLX starts them together, so that the device's part begins when the host's ends.
    """
    traced = mx.compile(lambda xs: [run(x) for run, x in zip(runs, xs, strict=True)])
    given = list(inputs)
    mx.eval(traced(given))
    best = Cost(float("inf"), float("inf"))
    for _ in range(rounds):
        start = time.perf_counter()
        results = traced(given)
        mx.async_eval(results)  # type: ignore[no-untyped-call]
        started = time.perf_counter()
        mx.eval(results)
        cost = Cost((started - start) / len(given), (time.perf_counter() - started) / len(given))
        if cost.host + cost.device < best.host + best.device:
            best = cost
    return best
