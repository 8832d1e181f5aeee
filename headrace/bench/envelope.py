"""The most load that keeps the objectives: doubling until they break, then bisection.

    1   2   4   8   16          doubling: 8 keeps, 16 breaks
                └─12─14─┘       bisection between the highest kept and the lowest broken

One measurement decides each step, so on a noisy machine the answer has the noise of a measurement; the report
carries every probe with its figures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.bench.stats import Objectives, Summary


@dataclass(frozen=True, slots=True)
class Envelope:
    """``highest_kept``: None when not even the lowest load keeps; ``lowest_broken``: None when none broke."""

    highest_kept: float | None
    lowest_broken: float | None
    probed: tuple[float, ...]


async def find_envelope(
    keeps: Callable[[float], Awaitable[bool]], low: float, high: float, *, whole: bool, tolerance: float = 0.05
) -> Envelope:
    """Highest load in [low, high] for which ``keeps`` is true, taken to be true for every lower one.

    With ``whole`` loads are whole numbers and the answer is exact; otherwise it is within ``tolerance`` of itself.
    """
    kept: float | None = None
    broken: float | None = None
    probed: list[float] = []
    value = low
    while broken is None and (kept is None or kept < high):
        probed.append(value)
        if await keeps(value):
            kept = value
            value = min(2 * value, high)
        else:
            broken = value
    while kept is not None and broken is not None and broken - kept > (1 if whole else tolerance * kept):
        value = (kept + broken) / 2
        value = float(int(value)) if whole else value
        probed.append(value)
        if await keeps(value):
            kept = value
        else:
            broken = value
    return Envelope(kept, broken, tuple(probed))


def keeps_objectives(summary: Summary, objectives: Objectives) -> bool:
    """Whether the 95th percentiles are within the bounds and no request failed."""
    if summary.failed or not summary.completed:
        return False
    for bound, measured in ((objectives.ttft_s, summary.ttft_s.p95), (objectives.itl_s, summary.itl_s.p95)):
        if bound is not None and measured is not None and measured > bound:
            return False
    return True
