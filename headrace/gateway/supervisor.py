"""Keeps one worker running: start, watch, replace, give up.

    start ─► wait for Ready ─► watch ──(dead, or hung and killed)──► blame, back off ─► start …
                 │ StartFailed before the first Ready: the server ends with that line
                 └ five starts in a row without a Ready (twenty, where they were refused: memory may be short for a
                   while; fifty, where somebody killed them: another program, or the kernel for lack of memory), or
                   twenty faults in a row without one finished step: give up, keep the reason

A reload puts a worker of a new configuration in the place of the present one. Where memory holds two, the new one
is started beside it and takes over when it is ready; a start that fails changes nothing. Else the present one is
ended first, and when the new one does not start, one of the old configuration does. Open requests go on.

A hang is defined in ``worker_life``. If the gateway itself was suspended the clocks start anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.errors import StartupError
from headrace.gateway.memory_report import plan_lines
from headrace.gateway.worker_life import WorkerLife
from headrace.gateway.worker_process import WORKER_COMMAND, WorkerDeath, WorkerProcess, is_stopped
from headrace.worker.protocol import Ready, Shutdown, StepOutputs, ToGateway, ToWorker

MAX_FAILED_STARTS = 5
MAX_REFUSED_STARTS = 20
MAX_KILLED_STARTS = 50
MAX_FRUITLESS_FAULTS = 20
PROMPT_RESTARTS = 4
FIRST_BACKOFF_S = 0.2
LAST_BACKOFF_S = 30.0
KILLED_BACKOFF_S = 1.0
STOP_S = 1.0
RELOADING = "a reload is under way already"
_TICK_S = 0.25
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

    def worker_silent(self, is_silent: bool) -> None: ...

    def worker_died(self, death: WorkerDeath) -> None: ...

    def worker_retired(self) -> None: ...

    def gave_up(self, reason: str, detail: str) -> None: ...


class Supervisor:
    """One engine's worker processes, one after the other.

    Args:
        folder: private, existing; sockets and step records live there.
        stall_timeout_s: see ``worker_life``.
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
        self._present: WorkerLife | None = None
        self._successor: WorkerLife | None = None  # loading beside the present one
        self._previous: EngineConfig | None = None  # of the worker that made room for one still loading
        self._reload: asyncio.Future[str] | None = None
        self._starts = 0
        self._failed_starts = self._killed_starts = 0
        self._fruitless_faults = 0
        self._fruitless_deaths = 0
        self._ever_ready = False
        self._stop = asyncio.Event()
        self._living: set[asyncio.Task[WorkerDeath]] = set()

    @property
    def worker_pid(self) -> int | None:
        return None if self._present is None else self._present.process.pid

    async def run(self) -> None:
        """Run workers until ``stop``, or until giving up (the listener is told).

        Raises ``StartupError`` for a permanent fault before the first Ready: the server ends.
        """
        while not self._stop.is_set():
            life = await self._next()
            assert life.living is not None
            death = await asyncio.shield(life.living)
            if self._present is life:
                self._present = None
            if self._stop.is_set():
                break
            if life.is_retired:
                continue
            if death.permanent and not self._ever_ready:
                raise StartupError(death.detail or death.reason)
            log.error("worker died: %s", death.full_reason, extra={"in_step": len(death.in_step or ())})
            if self._previous is not None and life.ready is None:
                self._take_back(death)
                continue
            if reason := self._judge(death, life):
                self._listener.gave_up(reason, death.detail)
                break
            self._listener.worker_died(death)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._backoff_s())

    async def stop(self) -> None:
        """End all workers and free their sockets; ``run`` then returns."""
        self._stop.set()
        self._settle_reload("the server is stopping")
        present, living = self._present, set(self._living)
        if present is not None and present.ready is not None and present.living is not None:
            present.process.send(Shutdown())
            await asyncio.wait({present.living}, timeout=STOP_S)
        for life in (present, self._successor):
            if life is not None:
                life.process.kill()
        if living:
            await asyncio.wait(living)

    def close(self) -> None:
        self._context.destroy(linger=0)

    # -- replacing a worker on purpose

    async def reload(self, engine: EngineConfig, *, side_by_side: bool) -> str:
        """Put a worker of ``engine`` in the present one's place; "" when it steps, else why it does not."""
        if self._reload is not None:
            return RELOADING
        if self._stop.is_set() or self._present is None or self._present.ready is None:
            return "there is no running worker to replace; try again when the server is ready"
        outcome = self._reload = asyncio.get_running_loop().create_future()
        if side_by_side:
            self._successor = self._launch(engine)
        else:
            self._previous, self._engine = self._engine, engine
            self._retire(self._present)
        return await asyncio.shield(outcome)

    def _retire(self, life: WorkerLife) -> None:
        """End a worker for another one; everything open goes back to the listener."""
        life.is_retired = True
        self._listener.worker_retired()
        life.process.send(Shutdown())
        asyncio.get_running_loop().call_later(STOP_S, life.process.kill)

    def _take_over(self, life: WorkerLife) -> None:
        """The successor steps: it gets everything that is open, and the present one ends."""
        old, self._present, self._successor = self._present, life, None
        self._engine = life.engine
        if old is not None:
            self._retire(old)

    def _take_back(self, death: WorkerDeath) -> None:
        """The new configuration does not start: back to the old one."""
        assert self._previous is not None
        self._engine = self._previous
        self._settle_reload(death.reason)

    def _settle_reload(self, reason: str) -> None:
        self._previous = None
        if self._reload is not None and not self._reload.done():
            self._reload.set_result(reason)
        self._reload = None

    # -- one worker

    async def _next(self) -> WorkerLife:
        """The worker to watch now: the one that took over, or a new one (not beside one that may take over)."""
        if self._present is None and self._successor is not None and self._reload is not None:
            await asyncio.wait({self._reload})
        if self._present is None:
            self._present = self._launch(msgspec.structs.replace(self._engine, replaces=self._ever_ready))
        return self._present

    def _launch(self, engine: EngineConfig) -> WorkerLife:
        self._starts += 1
        self._folder.mkdir(mode=0o700, exist_ok=True)  # cleaners of temporary folders may have been here
        process = WorkerProcess(
            self._context, self._folder, self._starts, lambda message: self._on_message(life, message)
        )
        life = WorkerLife(process, engine, time.monotonic())
        life.living = asyncio.create_task(self._live(life))
        self._living.add(life.living)
        life.living.add_done_callback(self._living.discard)
        return life

    async def _live(self, life: WorkerLife) -> WorkerDeath:
        death = WorkerDeath("the worker cannot be started", True, False, frozenset())
        try:
            await life.process.start(self._command, life.engine)
            if self._stop.is_set():
                life.process.kill()
            death = life.verdict(await self._watch(life))
        except (OSError, zmq.ZMQError) as error:
            death = WorkerDeath(death.reason, True, False, frozenset(), str(error))
        finally:
            life.process.close()
            if life is self._successor:
                self._successor = None
                log.error("the new worker died: %s", death.full_reason)
                self._settle_reload(death.reason)
        return death

    async def _watch(self, life: WorkerLife) -> WorkerDeath:
        waiting = asyncio.create_task(life.process.wait())
        last_tick = time.monotonic()
        tick_s = min(_TICK_S, max(_SHORTEST_TICK_S, self._stall_timeout_s / 4))
        try:
            while not (await asyncio.wait({waiting}, timeout=tick_s))[0]:
                life.process.receive()
                now = time.monotonic()
                if now - last_tick > max(5.0, self._stall_timeout_s / 2):
                    life.excuse(now)  # it was the gateway that stood still
                last_tick = now
                if life is self._present and not life.is_retired:
                    self._listener.worker_silent(life.is_silent(now))
                if hang := life.hang(now, self._stall_timeout_s, is_busy=self._is_busy(life)):
                    suspended = await is_stopped(life.process.pid)
                    log.error("worker hangs: %s", hang, extra={"pid": life.process.pid, "suspended": suspended})
                    life.process.kill("" if suspended else hang)
                    break
            return await waiting
        finally:
            if not waiting.done():
                life.process.kill()
                waiting.cancel()

    def _is_busy(self, life: WorkerLife) -> bool:
        return life is self._present and not life.is_retired and self._listener.is_busy()

    def _on_message(self, life: WorkerLife, message: ToGateway) -> None:
        life.hear(message, time.monotonic())
        if life.is_retired:
            return
        if isinstance(message, Ready):
            self._worker_ready(life, message)
        elif life is self._present:
            if isinstance(message, StepOutputs) and life.steps_total:
                self._fruitless_faults = self._fruitless_deaths = 0
            self._listener.worker_message(message)

    def _worker_ready(self, life: WorkerLife, ready: Ready) -> None:
        if life is self._successor:
            self._take_over(life)
        for line in () if self._ever_ready else plan_lines(ready.plan):
            log.info(line)
        self._ever_ready = True
        self._failed_starts = self._killed_starts = 0
        log.info("worker ready", extra={"pid": ready.pid, "device": ready.device, "attention": ready.attention})
        self._listener.worker_ready(life.process, ready)
        self._settle_reload("")

    # -- between workers

    def _judge(self, death: WorkerDeath, life: WorkerLife) -> str:
        """Count the death; why to give up, or "".

        Once a worker was ready, not even a fault that it calls permanent need be: memory may be short just now.
        """
        self._fruitless_deaths += death.counts
        if life.ready is None:
            self._failed_starts += death.counts
            self._killed_starts += not death.counts
            limit = MAX_REFUSED_STARTS if death.permanent else MAX_FAILED_STARTS
            if self._failed_starts >= limit or self._killed_starts >= MAX_KILLED_STARTS:
                failed = self._failed_starts + self._killed_starts
                return f"{failed} starts in a row failed; the last: {death.reason}"
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
        if misfortunes > 0:
            return float(min(FIRST_BACKOFF_S * 2**misfortunes, LAST_BACKOFF_S))
        return KILLED_BACKOFF_S if self._killed_starts > PROMPT_RESTARTS else 0.0
