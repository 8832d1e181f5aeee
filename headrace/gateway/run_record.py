"""What is known of one prompt's run when it is over, for tracing: times, counts, ends; nothing of what it says."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from headrace.gateway.service import Interruption
from headrace.params import SamplingParams
from headrace.request import Timeline


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times are on the monotonic clock; None: it did not come so far.

    Attributes:
        id: of the engine's request.
        received_at, submitted_at, started_at, first_token_at, last_token_at: as docs/metrics.md defines them.
        ended_at: the run was closed.
        finish_reasons: per sequence, in the order of their ends.
        timelines: from the worker, per sequence that ended there; empty when it was not one worker from queue to
            finish.
        interruptions: workers that were lost on the way.
    """

    id: str
    params: SamplingParams
    n: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    received_at: float
    submitted_at: float
    started_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    ended_at: float
    finish_reasons: tuple[str, ...]
    timelines: tuple[Timeline, ...]
    interruptions: tuple[Interruption, ...]


class RunTracing(Protocol):
    """Where runs are reported to when tracing is on."""

    def current(self) -> object | None:
        """The span of the request being handled; None: it is not traced."""
        ...

    def run_ended(self, span: Any, run: RunRecord) -> None: ...
