"""The real worker with faults: the model runner is wrapped, and misbehaves when a test says so.

A test arms a fault by writing JSON ``{"kind": …, "after": n}`` to the file named in ``HEADRACE_TEST_FAULT``. The
first worker that sees it takes it (renames it, so that it happens once) and misbehaves at its n-th step from then:

    raise_launch, raise   the device reports an error, before and in the step
    exit, segv, hang      the process ends, or the step never does
    nan_row, nan_all      not-a-numbers in the KV of one row, or of all rows
    garbage               a message that is none is sent to the gateway
    load_exit             the process ends while it loads (``after`` seconds into it)
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import psutil

from headrace.config import EngineConfig
from headrace.core.pressure import PressureThresholds
from headrace.core.step import ScheduledRow, SchedulerOutput, StepResult
from headrace.worker import main as real
from headrace.worker import process
from headrace.worker.mailbox import Mailbox
from headrace.worker.process import LoadedEngine, Progress, run_worker

FAULT_FILE = os.environ["HEADRACE_TEST_FAULT"]
# A machine with this much memory free when the model is loaded; who takes of it is named by its pid in a file.
MACHINE_MB = int(os.environ.get("HEADRACE_TEST_MACHINE_MB", "0"))
NEIGHBOUR_FILE = FAULT_FILE + ".neighbour"
MIB = 2**20


def take_fault(*, loading: bool) -> dict[str, Any] | None:
    """The armed fault, if it is one for this moment; nobody else gets it."""
    try:
        with open(FAULT_FILE) as file:
            fault: dict[str, Any] = json.load(file)
        if fault["kind"].startswith("load_") == loading:
            os.rename(FAULT_FILE, FAULT_FILE + ".taken")
            return fault
    except OSError:
        pass
    return None


class FaultyHandle:
    def __init__(self, handle: Any, kind: str) -> None:
        self.handle, self.kind = handle, kind

    def result(self) -> StepResult:
        if self.kind == "raise":
            raise RuntimeError("injected: the command buffer failed")
        if self.kind == "exit":
            os._exit(3)
        if self.kind == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.kind == "hang":
            time.sleep(3600)
        result: StepResult = self.handle.result()
        return result


class FaultyRunner:
    """A ``ModelRunner`` that may be told to fail."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.fault: dict[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, output: SchedulerOutput) -> Any:
        self.fault = self.fault or take_fault(loading=False)
        kind = ""
        if self.fault is not None:
            self.fault["after"] -= 1
            if self.fault["after"] <= 0 and self.can_happen(output):
                kind, self.fault = self.fault["kind"], None
        if kind == "raise_launch":
            raise RuntimeError("injected: out of device memory")
        if kind == "garbage":
            FaultyMailbox.garbage = True
        if kind in ("nan_row", "nan_all"):
            rows = poisonable(output)
            for row in rows[:1] if kind == "nan_row" else rows:
                self.poison(row)
        return FaultyHandle(self.runner.launch(output), kind)

    def can_happen(self, output: SchedulerOutput) -> bool:
        """Wait for a step in which bad rows are some, or all."""
        kind = self.fault["kind"] if self.fault else ""
        rows = (*output.decode, *output.prefill)
        if kind == "nan_row":
            return bool(poisonable(output)) and sum(row.samples for row in rows) > 1
        if kind == "nan_all":
            return 0 < len(poisonable(output)) == len(rows)
        return True

    def poison(self, row: ScheduledRow) -> None:
        import mlx.core as mx

        pool = self.runner._pool
        for layer, shape in enumerate(pool.layers):
            block = row.block_tables[shape.group][(row.start - 1) // pool.block_size]
            slot = block * pool.block_size + (row.start - 1) % pool.block_size
            if pool.head_major:
                pool.keys[layer][:, slot] = mx.array(float("nan"))
            else:
                pool.keys[layer][slot] = mx.array(float("nan"))


def poisonable(output: SchedulerOutput) -> list[ScheduledRow]:
    """Rows that sample and read KV of their own."""
    return [row for row in (*output.decode, *output.prefill) if row.samples and row.start > 0]


class FaultyMailbox(Mailbox):
    garbage = False

    def send(self, message: Any) -> None:
        if FaultyMailbox.garbage:
            FaultyMailbox.garbage = False
            self._socket.send(b"\x93\xff\x00 no message")
            return
        super().send(message)


def load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    fault = take_fault(loading=True)
    if fault is not None:
        threading.Timer(fault["after"], lambda: os._exit(4)).start()
    loaded = real.load(config, progress)
    if fault is not None:
        time.sleep(3600)
    if MACHINE_MB and loaded.pool_memory is not None:
        make_small_machine(loaded.pool_memory)
    return replace(loaded, runner=FaultyRunner(loaded.runner))


def make_small_machine(pool_memory: Any) -> None:
    """What is free is measured: the resident memory of this process and of its neighbour, in a machine for two."""
    worker = psutil.Process()
    total = worker.memory_info().rss + MACHINE_MB * MIB

    def available() -> int:
        neighbour = 0
        try:
            with open(NEIGHBOUR_FILE) as file:
                neighbour = psutil.Process(int(file.read())).memory_info().rss
        except (OSError, ValueError, psutil.Error):
            pass
        return max(0, total - worker.memory_info().rss - neighbour)

    pool_memory.available = available
    quarter = MACHINE_MB * MIB // 4
    pool_memory.thresholds = PressureThresholds(
        quarter // 4, 2 * quarter, 3 * quarter, raise_every_s=0.5, lower_after_s=1.0
    )


if __name__ == "__main__":
    process.Mailbox = FaultyMailbox  # type: ignore[misc]
    sys.exit(run_worker(load))
