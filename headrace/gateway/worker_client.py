"""The gateway's side of one engine: submit, dispatch, replay.

    submit ──► journal ──► held ──► worker ──► StepOutputs ──► journal ──► streams

A request is held while no worker is there to take it (a restart), or while a suspect runs alone. All outputs of a
step are recorded and dispatched in one go. After a worker's death everything open goes back to ``held``
with what it has emitted, and the next worker continues it; clients see a pause.

Implements ``headrace.gateway.service.EngineClient``; the supervisor reports to it through ``WorkerListener``'s
methods. Everything runs on the event loop; no method blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from headrace.errors import InternalFault, InvalidRequest, NotReady, QueueFull, RequestError
from headrace.gateway.journal import Journal, blame, next_suspect, open_entry, record, resubmission
from headrace.gateway.service import EngineState, Interruption
from headrace.gateway.streams import SlotStream
from headrace.gateway.supervisor import WorkerLink
from headrace.gateway.worker_process import WorkerDeath
from headrace.request import EngineRequest
from headrace.worker.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    ClearPrefixCache,
    EngineStats,
    Heartbeat,
    LoadProgress,
    Ready,
    Rejected,
    StepOutputs,
    ToGateway,
)

RETRY_STARTING_S = 5.0
RETRY_RESTARTING_S = 10.0
RETRY_REPLAY_S = 0.25

log = logging.getLogger("headrace.gateway")


class WorkerClient:
    """One engine as the API side sees it.

    Args:
        max_held: requests that may wait in the gateway for a worker's replacement, at most.
    """

    def __init__(self, *, max_held: int) -> None:
        self._max_held = max_held
        self._journal: Journal = {}
        self._streams: dict[str, SlotStream] = {}
        self._held: dict[str, None] = {}  # ids not given to the present worker, in order
        self._trial: str | None = None  # the suspect that runs alone
        self._link: WorkerLink | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.first_ready = asyncio.Event()
        self.settled = asyncio.Event()  # a worker is ready, or none will come
        self._state = EngineState(status="starting")
        self._past = EngineStats()  # totals of the workers before the present one
        self._steps_told = 0  # of the present worker, to ``on_step``
        self.prompt_tokens_total = 0
        self.generation_tokens_total = 0
        self.replayed_total = 0
        self.on_reload: Callable[[], Awaitable[str]] | None = None
        self.on_step: Callable[[EngineStats, float], None] = lambda stats, now: None

    # -- EngineClient

    def submit(self, request: EngineRequest) -> SlotStream:
        is_continuation = bool(request.emitted)  # it was let in before, and is no new work
        if not is_continuation:
            self._refuse_unless_open()
        if request.id in self._journal:
            raise InvalidRequest("a request with this id is already open")
        if not is_continuation and self._held and self._held_new() >= self._max_held:
            raise QueueFull("the engine restarts and its queue is full", retry_after_s=RETRY_RESTARTING_S)
        stream = SlotStream(request.id)
        if is_continuation:
            stream.accept()
        self._journal[request.id] = open_entry(request)
        self._streams[request.id] = stream
        self._idle.clear()
        self._held[request.id] = None
        self._release()
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        entry = self._journal.get(request_id)
        if entry is None:
            return
        if self._link is not None and request_id not in self._held:
            self._link.send(AbortRequest(request_id, index))
        if index is not None:
            entry.done.add(index)
            if not entry.is_finished:
                return
            self._close(request_id).end()
        else:
            self._close(request_id).discard()
        self._release()

    def state(self) -> EngineState:
        return self._state

    def clear_prefix_cache(self) -> None:
        if self._link is not None:
            self._link.send(ClearPrefixCache())

    async def reload(self) -> str:
        return "this server cannot reload" if self.on_reload is None else await self.on_reload()

    def set_max_held(self, max_held: int) -> None:
        self._max_held = max_held

    # -- totals over all workers (metrics)

    @property
    def held(self) -> int:
        return len(self._held)

    def lifetime_stats(self) -> EngineStats:
        return _add_totals(self._state.stats, self._past)

    # -- WorkerListener (called by the supervisor)

    def is_busy(self) -> bool:
        """Whether the present worker was given work that is not finished."""
        return len(self._journal) > len(self._held)

    def worker_ready(self, link: WorkerLink, ready: Ready) -> None:
        self._link = link
        self._steps_told = 0
        self._set(ready=ready, load=None, stats=EngineStats(blocks_total=ready.num_blocks))
        if self._state.status != "draining":
            self._set(status="ready", message="", detail="")
        self.first_ready.set()
        self.settled.set()
        self.replayed_total += len(self._held) - self._held_new()
        self._release()

    def worker_message(self, message: ToGateway) -> None:
        match message:
            case StepOutputs():
                self._dispatch(message)
            case Heartbeat(stats):
                self._set(stats=stats)
            case Accepted(request_id):
                if stream := self._streams.get(request_id):
                    stream.accept()
            case Rejected():
                self._reject(message)
            case LoadProgress():
                self._set(load=message)
            case _:
                pass

    def worker_silent(self, is_silent: bool) -> None:
        """Say whether the present worker shows signs of life; requests wait for it meanwhile."""
        if is_silent and self._state.status == "ready":
            self._set(status="silent", message="the worker shows no sign of life; it is replaced if that lasts")
        elif not is_silent and self._state.status == "silent":
            self._set(status="ready", message="")

    def worker_retired(self) -> None:
        """Another worker takes the present one's place: take everything back."""
        self._take_back()
        self.settled.clear()
        self._set(reloads=self._state.reloads + 1, stats=EngineStats())
        if self._state.status in ("ready", "silent"):
            self._set(status="restarting", message="the worker is being replaced")

    def worker_died(self, death: WorkerDeath) -> None:
        """Take everything back; whoever died alone too often is given up."""
        in_worker = [request_id for request_id in self._journal if request_id not in self._held]
        if death.counts:
            in_step = death.in_step or frozenset(in_worker)  # not known: everybody
            for request_id in blame(self._journal, in_step):
                log.error("request given up: the worker died on it", extra={"request_id": request_id})
                self._close(request_id).fail(InternalFault("the engine failed on this request, alone and twice"))
        self._take_back()
        self.settled.clear()
        self._set(restarts=self._state.restarts + 1, stats=EngineStats())
        if self._state.status in ("ready", "silent", "restarting"):
            self._set(status="restarting", message=death.reason, detail=death.detail)

    def gave_up(self, reason: str, detail: str = "") -> None:
        """No worker will come; ``reason`` is one line that anybody may read."""
        self._link = None
        self.settled.set()
        self._set(status="failed", message=reason, detail=detail, stats=EngineStats())
        self.fail_all(InternalFault("the engine failed and cannot be restarted"))

    # -- shutdown

    def start_draining(self, message: str) -> None:
        self._set(status="draining", message=message)

    async def drained(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def fail_all(self, error: RequestError) -> None:
        for request_id in list(self._journal):
            if self._link is not None and request_id not in self._held:
                self._link.send(AbortRequest(request_id))
            self._close(request_id).fail(error)

    # -- inside

    def _refuse_unless_open(self) -> None:
        status, message = self._state.status, self._state.message
        if status == "starting":
            raise NotReady("the model is still loading", retry_after_s=RETRY_STARTING_S)
        if status == "draining":
            raise NotReady("the server is shutting down", retry_after_s=RETRY_RESTARTING_S)
        if status == "failed":
            raise NotReady(f"the engine has failed: {message}", retry_after_s=60.0)

    def _take_back(self) -> None:
        """Hold everything that is open, for the next worker."""
        now = time.monotonic()
        for request_id, stream in self._streams.items():
            if request_id not in self._held:
                stream.interruptions.append(Interruption(now))
        self._link, self._trial = None, None
        self._held = dict.fromkeys(self._journal)
        self._past = self.lifetime_stats()

    def _held_new(self) -> int:
        """Requests that no worker has accepted yet, among those held."""
        return sum(not self._streams[request_id].is_accepted for request_id in self._held)

    def _release(self) -> None:
        """Give the worker what is held: a suspect alone and first, then everything else."""
        if self._link is None or not self._held:
            return
        if self._trial is not None:
            trial = self._journal.get(self._trial)
            if trial is not None and trial.is_suspect:
                return
            self._trial = None
        self._trial = next_suspect(self._journal, self._held)
        if self._trial is not None:
            self._set(quarantined=self._state.quarantined + 1)
        for request_id in [self._trial] if self._trial is not None else list(self._held):
            del self._held[request_id]
            self._link.send(AddRequest(resubmission(self._journal[request_id])))
            if interruptions := self._streams[request_id].interruptions:
                interruptions[-1].replayed_at = time.monotonic()

    def _dispatch(self, message: StepOutputs) -> None:
        self._set(stats=message.stats)
        for output in message.outputs:
            entry = self._journal.get(output.request_id)
            if entry is None:
                continue
            is_first = not entry.begun
            passed = record(entry, output)
            if passed is None:
                continue
            if (
                is_first and entry.begun and not entry.request.emitted
            ):  # a continuation's prompt was counted before
                self.prompt_tokens_total += len(entry.request.prompt_token_ids)
            self.generation_tokens_total += len(passed.token_ids)
            self._streams[output.request_id].put(passed, message.at)
            if entry.is_finished:
                self._close(output.request_id).end()
        if self._trial is not None:
            self._release()
        if message.stats.steps_total != self._steps_told:  # else a sign of life, between two steps
            self._steps_told = message.stats.steps_total
            self.on_step(message.stats, message.at)

    def _reject(self, message: Rejected) -> None:
        stream = self._streams.get(message.request_id)
        if stream is None:
            return
        if message.status == QueueFull.status and stream.is_accepted:  # a replay; it is in already, and waits
            self._held[message.request_id] = None
            asyncio.get_running_loop().call_later(RETRY_REPLAY_S, self._release)
            return
        self._close(message.request_id).fail(_request_error(message))
        self._release()

    def _close(self, request_id: str) -> SlotStream:
        """Forget an open request; the caller ends its stream."""
        del self._journal[request_id]
        self._held.pop(request_id, None)
        if not self._journal:
            self._idle.set()
        return self._streams.pop(request_id)

    def _set(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)


def _add_totals(stats: EngineStats, past: EngineStats) -> EngineStats:
    names = [name for name in EngineStats.__struct_fields__ if name.endswith("_total") and name != "blocks_total"]
    sums = {name: getattr(stats, name) + getattr(past, name) for name in names}
    return msgspec.structs.replace(stats, **sums)


def _request_error(message: Rejected) -> RequestError:
    """The worker's refusal as the error it stands for."""
    kinds = {429: QueueFull, 503: NotReady, 500: InternalFault}
    kind = kinds.get(message.status, InvalidRequest)
    return kind(
        message.message, param=message.param, code=message.code or None, retry_after_s=message.retry_after_s
    )
