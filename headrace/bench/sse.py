"""Server-sent events from bytes: an incremental parser of the ``event`` and ``data`` fields."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event; ``name`` is "" where the server gave none."""

    name: str
    data: str


class EventParser:
    """Feed bytes as they come, get the events they complete. Comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        buffer = self._rest + piece
        *lines, self._rest = buffer.split(b"\n")
        events: list[Event] = []
        for line in lines:
            self._take(line.removesuffix(b"\r"), events)
        return events

    def _take(self, line: bytes, events: list[Event]) -> None:
        if not line:
            if self._data:
                events.append(Event(self._name, "\n".join(self._data)))
            self._name, self._data = "", []
            return
        field, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode("utf-8", "replace")
        if field == b"data":
            self._data.append(text)
        elif field == b"event":
            self._name = text
