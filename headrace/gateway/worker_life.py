"""What the gateway knows of one worker between its start and its death, as its messages told.

Plain bookkeeping: times are passed in. A worker is silent when nothing was heard for ``SILENT_S`` (its heartbeat
has a thread of its own and is three times as frequent); it hangs when it had work and finished no step for the
stall limit, or was silent that long.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from headrace.config import EngineConfig
from headrace.gateway.worker_process import WorkerDeath, WorkerProcess
from headrace.worker.protocol import (
    Heartbeat,
    LoadProgress,
    Ready,
    StartFailed,
    StepOutputs,
    StepPoisoned,
    ToGateway,
)

LOAD_SILENCE_S = 120.0
SLOW_LOAD_S = 2.0
SILENT_S = 1.5

log = logging.getLogger("headrace.gateway")


@dataclass(slots=True, eq=False)
class WorkerLife:
    """One worker.

    Attributes:
        process: started, or about to be.
        engine: what it was started with.
        ready: what it said when it could step; None before that.
        progress_at: when it last finished a step, or had nothing to do.
        start_fault, poison: what it said about its own end.
        is_retired: the gateway ends it to put another one in its place; nobody is blamed, nothing more is heard.
        living: runs from its start until it is dead and its socket is closed.
    """

    process: WorkerProcess
    engine: EngineConfig
    started_at: float
    heard_at: float = field(init=False)
    progress_at: float = field(init=False)
    ready: Ready | None = None
    steps_total: int = -1
    start_fault: str = ""
    poison: str = ""
    stage: str = ""
    is_retired: bool = False
    living: asyncio.Task[WorkerDeath] | None = None

    def __post_init__(self) -> None:
        self.heard_at = self.progress_at = self.started_at

    def hear(self, message: ToGateway, now: float) -> None:
        """Note what a message says about the worker itself."""
        self.heard_at = now
        match message:
            case StepOutputs():
                self.progress_at = now
                self.steps_total = message.stats.steps_total
            case Heartbeat(stats) if stats.steps_total != self.steps_total:
                self.progress_at = now
                self.steps_total = stats.steps_total
            case StartFailed(line):
                self.start_fault = line
            case StepPoisoned(line):
                self.poison = line
            case LoadProgress(stage):
                self._note_stage(stage, now)
            case Ready():
                self.ready = message
                self.progress_at = now
            case _:
                pass

    def excuse(self, now: float) -> None:
        """Start the clocks anew: it was the gateway that stood still."""
        self.heard_at = self.progress_at = now

    def is_silent(self, now: float) -> bool:
        return self.ready is not None and now - self.heard_at > SILENT_S

    def hang(self, now: float, limit_s: float, *, is_busy: bool) -> str:
        """Why the worker must be replaced, or ""."""
        silent_s = now - self.heard_at
        if self.ready is None:
            limit_s = max(limit_s, LOAD_SILENCE_S)
            return f"the worker was silent for {silent_s:.0f} s while loading" if silent_s > limit_s else ""
        if not is_busy:
            self.progress_at = now
        if now - self.progress_at > limit_s:
            return f"the worker finished no step for {limit_s:.0f} s while it had work"
        return f"the worker was silent for {limit_s:.0f} s" if silent_s > limit_s else ""

    def verdict(self, death: WorkerDeath) -> WorkerDeath:
        """The death as the worker's own words explain it."""
        if self.start_fault:
            return WorkerDeath("the model cannot be loaded", death.counts, True, death.in_step, self.start_fault)
        if self.poison:
            return WorkerDeath("a step failed on the device", True, False, death.in_step, self.poison)
        return death

    def _note_stage(self, stage: str, now: float) -> None:
        """Say what a slow load is at, once per stage; a quick one is silent."""
        if stage != self.stage and now - self.started_at > SLOW_LOAD_S:
            self.stage = stage
            log.info("loading: %s", stage)
