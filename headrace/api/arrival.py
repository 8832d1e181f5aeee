"""What is known of an HTTP request before its body is understood."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

THREAD_ABOVE_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request's beginnings.

    Attributes:
        id: of the request, without a dialect's prefix.
        key: name of its API key.
        received_at: on the monotonic clock.
        body_bytes: size of its body.
    """

    id: str
    key: str
    received_at: float
    body_bytes: int

    async def call(self, function: Callable[[], T]) -> T:
        """Call here, or in a thread when the body is long, so that other streams go on."""
        return await asyncio.to_thread(function) if self.body_bytes > THREAD_ABOVE_BYTES else function()
