"""A traced request's times as its worker notes them."""

from __future__ import annotations

from headrace.request import FinishReason, SequenceOutput
from headrace.worker.timelines import Timelines


def token(request_id: str, index: int = 0, *, last: bool = False) -> SequenceOutput:
    reason = FinishReason.STOP if last else None
    return SequenceOutput(request_id=request_id, index=index, token_ids=[1], finish_reason=reason)


def test_a_life() -> None:
    notes = Timelines()
    assert not notes
    notes.add("a", 1, 1.0)
    assert notes
    notes.launched(frozenset(), 2.0)
    for now in (3.0, 4.0):
        notes.launched({"a"}, now)
    assert notes.took([token("a")], 5.0)[0].timeline is None
    notes.launched({"b"}, 6.0)  # preempted
    notes.launched({"a", "b"}, 7.0)
    (first, other) = notes.took([token("a", last=True), token("b", last=True)], 8.0)
    timeline = first.timeline
    assert timeline is not None and other.timeline is None
    assert (timeline.queued_at, timeline.scheduled_at, timeline.first_token_at, timeline.finished_at) == (
        1,
        3,
        5,
        8,
    )
    assert (timeline.prefill_steps, timeline.steps, timeline.preemptions) == (2, 2, 1)
    assert not notes


def test_several_sequences_and_aborts_leave_nothing_behind() -> None:
    notes = Timelines()
    notes.add("a", 3, 1.0)
    notes.launched({"a"}, 2.0)
    notes.took([token("a", 0, last=True)], 3.0)
    notes.drop("a", 1)
    assert notes
    (output,) = notes.took([token("a", 2, last=True)], 4.0)
    assert output.timeline is not None and output.timeline.finished_at == 4.0
    assert not notes
    notes.add("b", 2, 1.0)
    notes.drop("b")
    notes.drop("unknown", 0)
    assert not notes


def test_an_end_without_a_step_has_all_its_times() -> None:
    notes = Timelines()
    notes.add("a", 1, 1.0)
    ended = SequenceOutput(request_id="a", finish_reason=FinishReason.ERROR)
    (output,) = notes.took([ended], 2.0)
    assert output.timeline is not None
    assert (output.timeline.scheduled_at, output.timeline.first_token_at) == (2.0, 2.0)
