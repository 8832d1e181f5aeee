"""When traced requests waited, ran and answered, as their worker saw it; nothing is noted of any other request.

add ──► launched … (every step it runs in) ──► took (tokens) … ──► took (finish): the timeline goes out
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import msgspec

from headrace.request import SequenceOutput, Timeline


@dataclass(slots=True)
class _Notes:
    """``open``: sequences that have not ended."""

    queued_at: float
    open: int
    scheduled_at: float = 0.0
    first_token_at: float = 0.0
    prefill_steps: int = 0
    steps: int = 0
    preemptions: int = 0
    runs: bool = False

    def timeline(self, now: float) -> Timeline:
        return Timeline(
            self.queued_at,
            self.scheduled_at or now,
            self.first_token_at or now,
            now,
            self.prefill_steps,
            self.steps,
            self.preemptions,
        )


class Timelines:
    """Notes of the traced requests of one engine. False while there are none."""

    def __init__(self) -> None:
        self._notes: dict[str, _Notes] = {}

    def __bool__(self) -> bool:
        return bool(self._notes)

    def add(self, request_id: str, sequences: int, now: float) -> None:
        """It was queued; ``sequences`` of it are to run."""
        self._notes[request_id] = _Notes(now, sequences)

    def drop(self, request_id: str, index: int | None = None) -> None:
        """It was aborted, or one sequence of it."""
        notes = self._notes.get(request_id)
        if notes is not None:
            notes.open = 0 if index is None else notes.open - 1
            self._forget_ended(request_id, notes)

    def launched(self, running: Set[str], now: float) -> None:
        """A step is launched while these requests run."""
        for request_id, notes in self._notes.items():
            is_running = request_id in running
            if is_running:
                notes.scheduled_at = notes.scheduled_at or now
                notes.prefill_steps += not notes.first_token_at
            elif notes.runs:
                notes.preemptions += 1
            notes.runs = is_running

    def took(self, outputs: Iterable[SequenceOutput], now: float) -> list[SequenceOutput]:
        """A step's outputs, with the timelines of the sequences that it ended."""
        passed: list[SequenceOutput] = []
        for output in outputs:
            notes = self._notes.get(output.request_id)
            if notes is not None:
                if output.token_ids:
                    notes.first_token_at = notes.first_token_at or now
                    notes.steps += 1
                if output.finish_reason is not None:
                    output = msgspec.structs.replace(output, timeline=notes.timeline(now))
                    notes.open -= 1
                    self._forget_ended(output.request_id, notes)
            passed.append(output)
        return passed

    def _forget_ended(self, request_id: str, notes: _Notes) -> None:
        if notes.open <= 0:
            self._notes.pop(request_id, None)
