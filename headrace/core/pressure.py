"""What a worker gives back when the machine runs short of memory, and when it takes it again.

    level    0 none ── 1 cache ── 2 pool ── 3 admission ── 4 preempt
    does     nothing   buffer     smaller   nobody new     one running sequence
                       cache is   pool      while others   after the other waits
                       empty                run

Free memory below ``low`` raises the level by one, at most every ``raise_every_s`` (each measure needs time to
show); below ``critical`` at once. Free memory above ``high`` for ``lower_after_s`` lowers it by one. Between the
two nothing changes, so that a measure that just helps is not taken back at once. On levels 2 and above the pool is
asked to shrink by what is missing up to ``high``, on lower ones to grow by what is free above it.

Pure: measurements and times are passed in, the answer is what should be so now.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("none", "cache", "pool", "admission", "preempt")


@dataclass(frozen=True, slots=True)
class PressureThresholds:
    """Free memory of the machine in bytes, and times.

    Attributes:
        critical, low, high: see the module's text; critical <= low < high.
        raise_every_s: between two measures, at least.
        lower_after_s: of plenty, before a measure is taken back.
        smallest_resize: share of the planned pool that is worth a resize.
    """

    critical: int
    low: int
    high: int
    raise_every_s: float = 1.0
    lower_after_s: float = 5.0
    smallest_resize: float = 0.05


def default_thresholds(headroom_bytes: int, available_bytes: int) -> PressureThresholds:
    """Of what the plan left to others: half of it gone is pressure, seven eighths are an emergency.

    Args:
        headroom_bytes: what the memory plan leaves free.
        available_bytes: what was free when the worker was ready; less than the headroom when others were there.
    """
    left = min(headroom_bytes, available_bytes)
    return PressureThresholds(critical=left // 8, low=left // 2, high=left * 3 // 4)


@dataclass(frozen=True, slots=True)
class Measures:
    """What should be so now.

    Attributes:
        level: index into ``LEVELS``.
        keep_buffers: whether freed buffers may be kept for reuse.
        resize_bytes: by how much the pool should grow, or shrink (negative); 0: leave it.
        admit: whether new sequences may start while others run.
        preempt: whether one running sequence should give up its blocks now.
    """

    level: int
    keep_buffers: bool
    resize_bytes: int
    admit: bool
    preempt: bool


class PressureControl:
    """The level, and since when. Ask ``update`` every second or so."""

    def __init__(self, thresholds: PressureThresholds) -> None:
        self._thresholds = thresholds
        self._changed_at: float | None = None
        self._plenty_since: float | None = None
        self.level = 0

    def update(self, available_bytes: int, now: float, pool_bytes: int, planned_bytes: int) -> Measures:
        """What to do about ``available_bytes``.

        Args:
            available_bytes: free memory of the machine.
            now: seconds, of any clock that only goes forward.
            pool_bytes: of the pool as it is.
            planned_bytes: of the pool as the memory plan had it.
        """
        limits = self._thresholds
        raised, may_grow = self._raise(available_bytes, now), False
        if available_bytes > limits.high:
            may_grow = self._lower(now, pool_bytes < planned_bytes)
        else:
            self._plenty_since = None
        return Measures(
            level=self.level,
            keep_buffers=self.level < 1,
            resize_bytes=self._resize(available_bytes, raised, may_grow, pool_bytes, planned_bytes),
            admit=self.level < 3,
            preempt=self.level == 4 and raised,
        )

    def _raise(self, available: int, now: float) -> bool:
        """Whether a (further) measure is due."""
        limits = self._thresholds
        if available >= limits.low:
            return False
        waited = self._changed_at is None or now - self._changed_at >= limits.raise_every_s
        if not waited and available >= limits.critical:
            return False
        self._changed_at = now
        self.level = min(self.level + 1, len(LEVELS) - 1)
        return True

    def _lower(self, now: float, is_small: bool) -> bool:
        """Take a measure back when there was plenty for long enough; whether the pool's growth is the next one."""
        if self._plenty_since is None:
            self._plenty_since = now
        if now - self._plenty_since < self._thresholds.lower_after_s:
            return False
        self._plenty_since = self._changed_at = now
        if self.level > 1 or (self.level == 1 and not is_small):
            self.level -= 1
            return False
        return is_small

    def _resize(self, available: int, raised: bool, may_grow: bool, pool: int, planned: int) -> int:
        limits = self._thresholds
        least = int(planned * limits.smallest_resize)
        if raised and self.level >= 2:
            return -max(least, limits.high - available)
        if may_grow:
            room = min(available - limits.high, planned - pool)
            return room if room >= min(least, planned - pool) else 0
        return 0
