"""The seam between HTTP and engine: what the API side needs of the gateway, as protocols.

    pipeline ── submit(EngineRequest) ──► EngineClient ──► worker
        ◄── async iteration over OutputStream (lists of SequenceOutput) ──┘

A stream is one slot and one event: outputs that arrive while the reader is busy merge in the slot, so a slow
reader costs bounded memory and nobody else waits for it. Everything runs on the gateway's event loop; no
method blocks.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from headrace.request import EngineRequest, SequenceOutput
from headrace.worker.protocol import EngineStats, LoadProgress, Ready

EngineStatus = Literal["starting", "ready", "silent", "restarting", "failed", "draining"]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one engine.

    Attributes:
        status: "starting" until the first worker is ready, "ready" while one steps, "silent" while it shows no
            sign of life (suspended, or the machine is), "restarting" while a dead worker is being replaced,
            "failed" after giving up, "draining" while shutting down.
        message: one line that anybody may read; empty when there is nothing to say.
        detail: what a worker that failed said last; for the operator.
        ready: what the worker said when it became ready; the last one's while restarting.
        stats: the newest that the worker sent.
        restarts: workers started in the place of one that died.
        reloads: workers started in the place of one that was told to go.
        quarantined: requests that were replayed alone, as suspects of a death.
        load: the newest progress report while no worker is ready.
    """

    status: EngineStatus
    message: str = ""
    detail: str = ""
    ready: Ready | None = None
    stats: EngineStats = EngineStats()
    restarts: int = 0
    reloads: int = 0
    quarantined: int = 0
    load: LoadProgress | None = None


class Interruption(msgspec.Struct):
    """A request lost its worker at ``lost_at``, and another one was given it at ``replayed_at`` (monotonic)."""

    lost_at: float
    replayed_at: float | None = None


class OutputStream(Protocol):
    """Outputs of one request; one reader.

    Iteration yields lists of outputs, in order, and ends behind the last sequence's finish. It raises the
    ``RequestError`` the request died of: a rejection by the worker, an engine that gave up, a shutdown.
    A pending ``__anext__`` may be cancelled without losing an output.

    Attributes:
        interruptions: of the request so far, in order.
        started_at, first_token_at: when the worker had the first output and the first token (monotonic).
    """

    interruptions: list[Interruption]
    started_at: float | None
    first_token_at: float | None

    async def accepted(self) -> None:
        """Return when the worker has taken the request in; raise its ``RequestError`` when it refused.

        May be cancelled, and called more than once.
        """
        ...

    def wake(self) -> None:
        """Make the pending (or else the next) ``__anext__`` return now, with an empty list if nothing is there.

        The reader uses it to look at its clocks without cancelling anything.
        """
        ...

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> list[SequenceOutput]: ...


class EngineClient(Protocol):
    """One engine (one model), whatever worker process serves it at the moment."""

    def submit(self, request: EngineRequest) -> OutputStream:
        """Send a request; raise ``NotReady`` at once when there is no worker to wait for."""
        ...

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request, or one sequence of it; unknown ids are ignored.

        The reader of a request that is aborted whole gets no further outputs, and its iteration ends. A
        sequence aborted alone counts as done: it is not replayed and the iteration does not wait for it.
        """
        ...

    def state(self) -> EngineState: ...

    def clear_prefix_cache(self) -> None: ...

    async def reload(self) -> str:
        """Replace the worker, with its configuration read anew; "" when that is done, else why it is not.

        Open requests go on in the new one. When it cannot be had, the old one stays, or one like it comes.
        """
        ...


class RequestMetrics(Protocol):
    """What the API side reports. Times are in seconds; docs/metrics.md defines each interval.

    One call per event of a request's life: ``rejected``, or ``scheduled``, ``first_token``, ``inter_token``
    per further output of a sequence, ``sequence_finished`` once per sequence, ``ended``.
    """

    def rejected(self, reason: str) -> None:
        """A request was refused before any output; ``reason`` is the error's code or kind."""
        ...

    def scheduled(self, queue_s: float) -> None:
        """A request left the queue (its prefill began) this long after it was submitted."""
        ...

    def first_token(self, ttft_s: float, prefill_s: float) -> None:
        """A request's first token: since it was received, and since it was scheduled."""
        ...

    def inter_token(self, gap_s: float, tokens: int) -> None:
        """``tokens`` further tokens of one sequence came together, ``gap_s`` per token."""
        ...

    def forced_tokens(self, count: int) -> None:
        """A sequence got output tokens that no engine sampled: what ends its thinking at a budget."""
        ...

    def sequence_finished(self, reason: str) -> None:
        """One sequence ended: stop, length, abort, error, timeout."""
        ...

    def ended(
        self, *, e2e_s: float | None, decode_s: float | None, prompt_tokens: int, completion_tokens: int, key: str
    ) -> None:
        """A request that was begun is over; received to last token, and first to last token.

        No ``decode_s``: it has no output token. No ``e2e_s`` either: it has no hidden state, too.
        """
        ...

    def unknown_field(self, count: int = 1) -> None:
        """Request fields were accepted that no documented API has."""
        ...

    def render(self) -> bytes:
        """The exposition in Prometheus' text format 0.0.4."""
        ...
