"""The policy of memory pressure: measures in their order, one at a time, taken back late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.core.pressure import LEVELS, Measures, PressureControl, PressureThresholds, default_thresholds

LIMITS = PressureThresholds(critical=10, low=40, high=60, raise_every_s=1.0, lower_after_s=5.0)
PLANNED = 1000


def levels(control: PressureControl, available: int, times: list[float], pool: int = PLANNED) -> list[int]:
    return [control.update(available, now, pool, PLANNED).level for now in times]


def test_measures_come_one_after_the_other() -> None:
    control = PressureControl(LIMITS)
    assert levels(control, 50, [0, 1, 2]) == [0, 0, 0]
    assert levels(control, 30, [3, 3.5, 4, 5, 6, 7, 8]) == [1, 1, 2, 3, 4, 4, 4]


def test_an_emergency_does_not_wait() -> None:
    assert levels(PressureControl(LIMITS), 5, [0, 0.1, 0.2, 0.3, 0.4]) == [1, 2, 3, 4, 4]


def test_what_each_level_does() -> None:
    control = PressureControl(LIMITS)
    seen = [control.update(30, now, PLANNED, PLANNED) for now in range(5)]
    assert seen == [
        Measures(1, keep_buffers=False, resize_bytes=0, admit=True, preempt=False),
        Measures(2, keep_buffers=False, resize_bytes=-50, admit=True, preempt=False),
        Measures(3, keep_buffers=False, resize_bytes=-50, admit=False, preempt=False),
        Measures(4, keep_buffers=False, resize_bytes=-50, admit=False, preempt=True),
        Measures(4, keep_buffers=False, resize_bytes=-50, admit=False, preempt=True),
    ]
    between = control.update(50, 5, 800, PLANNED)
    assert between == Measures(4, keep_buffers=False, resize_bytes=0, admit=False, preempt=False)


def test_it_grows_back_when_there_is_plenty_for_a_while() -> None:
    control = PressureControl(LIMITS)
    levels(control, 30, [0, 1, 2, 3])
    assert levels(control, 500, [10, 14], pool=300) == [4, 4]
    assert levels(control, 50, [14.5], pool=300) == [4], "not plenty: the wait begins anew"
    assert levels(control, 500, [15, 20, 25, 30], pool=300) == [4, 3, 2, 1]
    assert control.update(500, 31, 300, PLANNED).resize_bytes == 0
    grown = control.update(500, 35, 300, PLANNED)
    assert (grown.level, grown.resize_bytes) == (1, 440), "up to what leaves the high mark free"
    assert control.update(60, 40, 740, PLANNED).resize_bytes == 0
    assert control.update(900, 45, 740, PLANNED).resize_bytes == 0
    assert control.update(900, 50, 740, PLANNED).resize_bytes == 260
    assert levels(control, 900, [55, 60]) == [0, 0]


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.1, 3)), max_size=60), st.integers(0, PLANNED))
def test_what_must_hold_whatever_is_measured(samples: list[tuple[int, float]], pool: int) -> None:
    control, now, before = PressureControl(LIMITS), 0.0, 0
    for available, pause in samples:
        now += pause
        measures = control.update(available, now, pool, PLANNED)
        assert abs(measures.level - before) <= 1 and 0 <= measures.level < len(LEVELS)
        if LIMITS.low <= available <= LIMITS.high:
            assert measures.level == before and measures.resize_bytes == 0
        if available < LIMITS.low:
            assert measures.level >= before and measures.resize_bytes <= 0
        assert pool + measures.resize_bytes <= PLANNED or measures.resize_bytes <= 0
        before = measures.level
        pool = max(0, pool + measures.resize_bytes)


def test_thresholds_are_shares_of_what_the_plan_left() -> None:
    assert default_thresholds(800, 2000) == PressureThresholds(critical=100, low=400, high=600)
    assert default_thresholds(800, 400) == PressureThresholds(critical=50, low=200, high=300)
