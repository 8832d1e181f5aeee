"""Responses that are being made: who may cancel them, and when they are over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from headrace.api.arrival import Arrival


@dataclass(slots=True)
class RunningResponse:
    """One response; ``leave`` it when it is over. ``final`` is the whole of it, when it came to an end."""

    id: str
    key: str
    _all: dict[str, RunningResponse]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    final: dict[str, Any] | None = None

    async def leave(self) -> None:
        self._all.pop(self.id, None)
        self.over.set()


class RunningResponses:
    """All of one server."""

    def __init__(self) -> None:
        self._all: dict[str, RunningResponse] = {}

    def enter(self, response_id: str, arrival: Arrival) -> RunningResponse:
        self._all[response_id] = RunningResponse(response_id, arrival.key, self._all)
        return self._all[response_id]

    def find(self, response_id: str, key: str) -> RunningResponse | None:
        """None when it does not run, or belongs to another key."""
        found = self._all.get(response_id)
        return found if found is not None and found.key == key else None
