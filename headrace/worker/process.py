"""The worker process around the engine: start, loop, end. Everything here runs on the main thread.

    read the start line ─► load (progress, or StartFailed and exit 2) ─► Ready ─► loop:
        receive (waits only while there is no work) ─► step ─► send

A step that raises is poisoned: nothing of it is released, the reason is sent, and the process exits with code 70;
the gateway starts another one and replays. Device faults cannot be recovered inside a process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.core.collector import settle_collector
from headrace.core.scheduler import Scheduler
from headrace.errors import StartupError
from headrace.worker.engine import Engine, MemoryUse, Runner
from headrace.worker.grammar_queue import Compiler
from headrace.worker.lifeline import end_with_parent
from headrace.worker.log_lines import LineFormatter
from headrace.worker.mailbox import HeartbeatThread, Mailbox
from headrace.worker.memory_watch import CHECK_IDLE_S, MemoryWatch, PoolMemory
from headrace.worker.protocol import (
    EXIT_POISONED_STEP,
    EXIT_START_FAILED,
    Heartbeat,
    LoadProgress,
    Ready,
    Shutdown,
    StartFailed,
    StepOutputs,
    StepPoisoned,
    WorkerStart,
)
from headrace.worker.step_record import StepRecord

# With work that the scheduler does not run just now, look again this soon.
STARVED_POLL_S = 0.02

log = logging.getLogger("headrace.worker")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What loading a model gives; ``pool_memory``: None where memory pressure is nothing to act on."""

    scheduler: Scheduler
    runner: Runner
    ready: Ready
    read_memory: Callable[[], MemoryUse] = MemoryUse
    pool_memory: PoolMemory | None = None
    grammars: Compiler | None = None


Load = Callable[[EngineConfig, Progress], LoadedEngine]


def run_worker(load: Load) -> int:
    """The whole life of a worker; returns the exit code.

    ``load`` raises ``StartupError`` for a permanent fault; anything else it raises is a crash.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway decides
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    stdin = sys.stdin.fileno()
    start = read_start(stdin)
    end_with_parent(stdin, start.folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mailbox = Mailbox(context, start.endpoint, start.token)
    heartbeat = HeartbeatThread(context, start.endpoint, start.token)
    heartbeat.start()
    try:
        loaded = load(start.engine, lambda stage, fraction: mailbox.send(LoadProgress(stage, fraction)))
        record = StepRecord(start.record)
        watch = None if loaded.pool_memory is None else MemoryWatch(loaded.pool_memory, loaded.scheduler)
        read_memory = partial(memory_use, loaded, watch)
        engine = Engine(
            loaded.scheduler,
            loaded.runner,
            record,
            read_memory,
            grammars=loaded.grammars,
            announce=partial(tell, mailbox, heartbeat),
        )
        settle_collector()
        mailbox.send(loaded.ready)
        mailbox.send(Heartbeat(engine.stats()))  # the pools' state, before anybody can ask
        return serve(engine, mailbox, heartbeat, watch)
    except StartupError as error:
        mailbox.send(StartFailed(str(error)))
        return EXIT_START_FAILED
    finally:
        heartbeat.end()
        mailbox.close()
        context.term()


def read_start(fd: int) -> WorkerStart:
    """The first line of standard input; the gateway writes nothing behind it."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(fd, 65536)
        if not chunk:
            raise SystemExit("a worker is started by its gateway, with its configuration on standard input")
        line += chunk
    return msgspec.json.decode(line, type=WorkerStart)


def memory_use(loaded: LoadedEngine, watch: MemoryWatch | None) -> MemoryUse:
    use = loaded.read_memory()
    return use if watch is None else use._replace(available=watch.available_bytes, pressure=watch.level)


def tell(mailbox: Mailbox, heartbeat: HeartbeatThread, outputs: StepOutputs) -> None:
    """Send outputs. Heartbeats repeat their stats from now on: older ones would take the gauges back."""
    heartbeat.stats = outputs.stats
    mailbox.send(outputs)


def relieve(engine: Engine, mailbox: Mailbox, heartbeat: HeartbeatThread, watch: MemoryWatch) -> None:
    """See to the machine's memory; a resize waits for the step that is outstanding."""
    sizes = watch.check()
    if sizes is not None:
        if (outputs := engine.settle()) is not None:
            tell(mailbox, heartbeat, outputs)
        watch.resize(sizes)


def serve(engine: Engine, mailbox: Mailbox, heartbeat: HeartbeatThread, watch: MemoryWatch | None = None) -> int:
    """Loop until told to shut down (0) or until a step is poisoned (70)."""
    idled = False
    idle_s = None if watch is None else CHECK_IDLE_S
    heartbeat.stats = engine.stats()  # before the first step the pool is known already
    while True:
        wait_s = idle_s if not engine.has_work else STARVED_POLL_S if idled else 0
        try:
            for message in mailbox.receive(wait_s):
                if isinstance(message, Shutdown):
                    return 0
                if (answer := engine.handle(message)) is not None:
                    mailbox.send(answer)
            for answer in engine.compiled():
                mailbox.send(answer)
            if watch is not None:
                relieve(engine, mailbox, heartbeat, watch)
            outputs = engine.step()
        except Exception as error:
            log.exception("step poisoned")
            mailbox.send(StepPoisoned(f"a step failed: {type(error).__name__}: {error}".splitlines()[0]))
            return EXIT_POISONED_STEP
        idled = outputs is None
        if outputs is None:
            heartbeat.stats = engine.stats()
        else:
            tell(mailbox, heartbeat, outputs)
