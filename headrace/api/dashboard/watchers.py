"""What the status streams of one application share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Watchers:
    """How many watch, and the newest event that is the same for all of them."""

    count: int = 0
    _at: float = 0.0
    _event: bytes = b""

    def event(self, at: float, make: Callable[[], bytes]) -> bytes:
        """The event of the time ``at``, made once."""
        if self._at != at or not self._event:
            self._at, self._event = at, make()
        return self._event
