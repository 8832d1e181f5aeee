"""Whether the load generator itself got in the way: its CPU share, its waits, its lateness.

Latencies are taken when bytes arrive, so a wait behind that does not falsify them; a client without CPU time left,
whose timers fire late or whose requests leave late, does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.bench.load import LoadResult
from headrace.bench.stats import Distribution, Summary

BUSY_SHARE = 0.9
# A late timer matters when it is a good part of what is measured, and more than an operating system's slice.
_LAG_S = 0.01
_LAG_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """What the client used and lost.

    Attributes:
        cpu_share: of one core, all this process can use.
        cpu_us_per_event: CPU time per event with text.
        wait_s: arrived bytes until the client looked at them.
        timer_lag_s: how late timers fired.
        late_s: requests sent after their time, where arrivals were scheduled.
        is_bottleneck: the figures are the client's, not the server's.
        remarks: what to know about the figures, one line each.
    """

    cpu_share: float | None
    cpu_us_per_event: float | None
    wait_s: Distribution
    timer_lag_s: Distribution
    late_s: Distribution
    is_bottleneck: bool
    remarks: tuple[str, ...]


def client_health(results: Sequence[LoadResult], summary: Summary) -> ClientHealth:
    samples = [sample for result in results for sample in result.samples]
    events = sum(len(sample.text_times_s) for sample in samples)
    cpu_s = sum(result.client_cpu_s for result in results)
    lag = Distribution.of(lag for result in results for lag in result.timer_lags_s)
    late = Distribution.of(sample.sent_s - sample.due_s for sample in samples if sample.due_s is not None)
    share = summary.client_cpu_share
    busy = share is not None and share >= BUSY_SHARE
    remarks = []
    if busy:
        remarks.append(f"the client used {share:.0%} of a core: it, not the server, sets these figures")
    gap = summary.itl_s.p50
    if lag.p95 is not None and gap is not None and lag.p95 > max(_LAG_S, _LAG_SHARE * gap):
        remarks.append(
            f"the client was held up {1000 * lag.p95:.0f} ms at the 95th percentile (median gap between tokens "
            f"{1000 * gap:.0f} ms): other processes took its core"
        )
    if late.p95 is not None and late.p95 > max(2 * _LAG_S, _LAG_SHARE / (summary.offered_per_s or float("inf"))):
        remarks.append(f"requests left {1000 * late.p95:.0f} ms late at the 95th percentile")
    return ClientHealth(
        cpu_share=share,
        cpu_us_per_event=1e6 * cpu_s / events if events else None,
        wait_s=Distribution.of(wait for result in results for wait in result.waits_s),
        timer_lag_s=lag,
        late_s=late,
        is_bottleneck=busy,
        remarks=tuple(remarks),
    )
