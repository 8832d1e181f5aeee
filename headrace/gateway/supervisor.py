"""Keeps one worker running: start, watch, replace, give up.

    start ─► wait for Ready ─► watch ──(dead, or hung and killed)──► blame, back off ─► start …
                 │ StartFailed before the first Ready: the server ends with that line
                 └ five starts in a row without a Ready, or twenty faults in a row without one finished step:
                   give up, keep the reason

A hang: the worker has unfinished work and no step finished for ``worker_stall_timeout_s``, or nothing at all was
heard from it for that long (its heartbeat has a thread of its own). If the gateway itself was suspended the clocks
start anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import zmq

from headrace.config import EngineConfig
from headrace.errors import StartupError
from headrace.gateway.worker_process import WORKER_COMMAND, WorkerDeath, WorkerProcess, is_stopped
from headrace.worker.protocol import (
    Heartbeat,
    LoadProgress,
    Ready,
    Shutdown,
    StartFailed,
    StepOutputs,
    StepPoisoned,
    ToGateway,
    ToWorker,
)

MAX_FAILED_STARTS = 5
MAX_FRUITLESS_FAULTS = 20
PROMPT_RESTARTS = 4
FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 30.0
LOAD_SILENCE_S = 120.0
SLOW_LOAD_S = 2.0
STOP_S = 1.0
_TICK_S = 0.5
_SHORTEST_TICK_S = 0.05

log = logging.getLogger("headrace.gateway")


class WorkerLink(Protocol):
    """Where the client sends what is for the present worker."""

    def send(self, message: ToWorker) -> None: ...


class WorkerListener(Protocol):
    """What the supervisor reports to, always on the event loop."""

    def is_busy(self) -> bool: ...

    def worker_ready(self, link: WorkerLink, ready: Ready) -> None: ...

    def worker_message(self, message: ToGateway) -> None: ...

    def worker_died(self, death: WorkerDeath) -> None: ...

    def gave_up(self, reason: str) -> None: ...


class Supervisor:
    """One engine's worker processes, one after the other.

    Args:
        folder: private, existing; sockets and step records live there.
        stall_timeout_s: see the module's text.
        command: the worker's program.
    """

    def __init__(
        self,
        engine: EngineConfig,
        listener: WorkerListener,
        *,
        folder: Path,
        stall_timeout_s: float,
        command: Sequence[str] = WORKER_COMMAND,
    ) -> None:
        self._engine = engine
        self._listener = listener
        self._folder = folder
        self._stall_timeout_s = stall_timeout_s
        self._command = command
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._worker: WorkerProcess | None = None
        self._starts = 0
        self._failed_starts = 0
        self._fruitless_faults = 0
        self._fruitless_deaths = 0
        self._ready = False
        self._ever_ready = False
        self._start_fault = ""
        self._poison = ""
        self._steps_total = -1
        self._stage = ""
        self._heard_at = self._progress_at = self._started_at = 0.0
        self._stop = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def worker_pid(self) -> int | None:
        return None if self._worker is None else self._worker.pid

    async def run(self) -> None:
        """Run workers until ``stop``, or until giving up (the listener is told).

        Raises ``StartupError`` for a permanent fault before the first Ready: the server ends.
        """
        while not self._stop.is_set():
            death = await self._run_one()
            if self._stop.is_set():
                break
            if death.permanent and not self._ever_ready:
                raise StartupError(death.reason)
            log.error("worker died: %s", death.reason, extra={"in_step": len(death.in_step or ())})
            if reason := self._judge(death):
                self._listener.gave_up(reason)
                break
            self._listener.worker_died(death)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._backoff_s())

    async def stop(self) -> None:
        """End the present worker and free the socket; ``run`` then returns."""
        self._stop.set()
        if self._worker is not None and self._ready:
            self._worker.send(Shutdown())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), STOP_S)
        if self._worker is not None:
            self._worker.kill()
            await self._gone.wait()

    def close(self) -> None:
        self._context.destroy(linger=0)

    # -- one worker

    async def _run_one(self) -> WorkerDeath:
        self._ready, self._start_fault, self._poison = False, "", ""
        self._steps_total = -1
        self._stage = ""
        self._heard_at = self._progress_at = self._started_at = time.monotonic()
        self._starts += 1
        self._folder.mkdir(mode=0o700, exist_ok=True)  # cleaners of temporary folders may have been here
        worker = WorkerProcess(self._context, self._folder, self._starts, self._on_message)
        try:
            try:
                await worker.start(self._command, self._engine)
            except (OSError, zmq.ZMQError) as error:
                return WorkerDeath(f"the worker cannot be started: {error}", False, False, frozenset())
            self._worker = worker
            self._gone.clear()
            if self._stop.is_set():
                worker.kill()
            death = await self._watch(worker)
        finally:
            self._worker = None
            worker.close()
            self._gone.set()
        if self._start_fault:
            return WorkerDeath(self._start_fault, death.counts, True, death.in_step)
        if self._poison:
            return WorkerDeath(self._poison, True, False, death.in_step)
        return death

    async def _watch(self, worker: WorkerProcess) -> WorkerDeath:
        waiting = asyncio.create_task(worker.wait())
        last_tick = time.monotonic()
        tick_s = min(_TICK_S, max(_SHORTEST_TICK_S, self._stall_timeout_s / 4))
        try:
            while not (await asyncio.wait({waiting}, timeout=tick_s))[0]:
                now = time.monotonic()
                if now - last_tick > max(5.0, self._stall_timeout_s / 2):
                    self._heard_at = self._progress_at = now  # it was the gateway that stood still
                last_tick = now
                if hang := self._hang(now):
                    suspended = await is_stopped(worker.pid)
                    log.error("worker hangs: %s", hang, extra={"pid": worker.pid, "suspended": suspended})
                    worker.kill("" if suspended else hang)
                    break
            return await waiting
        finally:
            if not waiting.done():
                worker.kill()
                waiting.cancel()

    def _hang(self, now: float) -> str:
        """Why the worker must be replaced, or ""."""
        silent_s, limit_s = now - self._heard_at, self._stall_timeout_s
        if not self._ready:
            limit_s = max(limit_s, LOAD_SILENCE_S)
            return f"the worker was silent for {silent_s:.0f} s while loading" if silent_s > limit_s else ""
        if not self._listener.is_busy():
            self._progress_at = now
        if now - self._progress_at > limit_s:
            return f"the worker finished no step for {limit_s:.0f} s while it had work"
        return f"the worker was silent for {limit_s:.0f} s" if silent_s > limit_s else ""

    def _on_message(self, message: ToGateway) -> None:
        self._heard_at = time.monotonic()
        match message:
            case StepOutputs():
                self._progress_at = self._heard_at
                self._steps_total = message.stats.steps_total
                if self._steps_total:
                    self._fruitless_faults = self._fruitless_deaths = 0
            case Heartbeat(stats) if stats.steps_total != self._steps_total:
                self._progress_at = self._heard_at
                self._steps_total = stats.steps_total
            case StartFailed(line):
                self._start_fault = line
            case StepPoisoned(line):
                self._poison = line
            case LoadProgress(stage):
                self._log_stage(stage)
            case Ready():
                self._worker_ready(message)
                return
            case _:
                pass
        self._listener.worker_message(message)

    def _log_stage(self, stage: str) -> None:
        """Say what a slow load is at, once per stage; a quick one is silent."""
        if stage != self._stage and self._heard_at - self._started_at > SLOW_LOAD_S:
            self._stage = stage
            log.info("loading: %s", stage)

    def _worker_ready(self, ready: Ready) -> None:
        assert self._worker is not None
        self._ready = self._ever_ready = True
        self._failed_starts = 0
        self._progress_at = self._heard_at
        log.info("worker ready", extra={"pid": ready.pid, "device": ready.device, "attention": ready.attention})
        self._listener.worker_ready(self._worker, ready)

    # -- between workers

    def _judge(self, death: WorkerDeath) -> str:
        """Count the death; why to give up, or ""."""
        if death.permanent:
            return death.reason
        self._fruitless_deaths += 1
        if not self._ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                return f"{self._failed_starts} starts in a row failed; the last: {death.reason}"
        elif death.counts:
            self._fruitless_faults += 1
            if self._fruitless_faults >= MAX_FRUITLESS_FAULTS:
                return (
                    f"{self._fruitless_faults} faults in a row without a finished step; the last: {death.reason}"
                )
        return ""

    def _backoff_s(self) -> float:
        """Nothing after a first death; more from one fruitless death to the next."""
        misfortunes = max(self._failed_starts, self._fruitless_deaths - PROMPT_RESTARTS)
        return float(min(FIRST_BACKOFF_S * 2**misfortunes, LAST_BACKOFF_S)) if misfortunes > 0 else 0.0
