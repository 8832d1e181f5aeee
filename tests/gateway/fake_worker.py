"""A worker without a model, for tests: the real process, loop and scheduler around a runner in plain Python.

Sampled tokens are a pure function of (seed, position), as in a real worker. ``EngineConfig.model`` holds a JSON
object of load behaviour (see ``load``); tokens of a prompt from ``EXIT`` on make the runner misbehave.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.scheduler import Scheduler, SchedulerConfig
from headrace.core.step import SampledToken, SchedulerOutput, StepResult
from headrace.errors import StartupError
from headrace.worker.engine import MemoryUse
from headrace.worker.process import LoadedEngine, Progress, run_worker
from headrace.worker.protocol import Ready

EXIT, POISON, HANG, SEGFAULT, LATE_EXIT, FAIL_ROW = 900, 901, 902, 903, 904, 905
LATE_TOKENS = 6


def token_at(seed: int, position: int) -> int:
    """The token that every worker samples there."""
    return (seed * 7919 + position * 104729) % 797 + 50


class Handle:
    def __init__(self, runner: FakeRunner, output: SchedulerOutput) -> None:
        self.runner, self.output = runner, output

    def result(self) -> StepResult:
        time.sleep(self.runner.step_s)
        rows = (*self.output.decode, *self.output.prefill)
        bad = {seq_id: mark for row in rows if (mark := self.runner.marks.get(seq_id := row.seq_id))}
        if POISON in bad.values():
            raise RuntimeError("the device reported a fault")
        if HANG in bad.values():
            time.sleep(3600)
        if SEGFAULT in bad.values():
            os.kill(os.getpid(), signal.SIGSEGV)
        for row in rows:
            late = row.samples and row.sample_position >= row.num_prompt_tokens + LATE_TOKENS
            if self.runner.marks.get(row.seq_id) == LATE_EXIT and late:
                os._exit(1)
        good = [row for row in rows if row.samples and bad.get(row.seq_id) != FAIL_ROW]
        sampled = {row.seq_id: SampledToken(token_at(row.seed, row.sample_position)) for row in good}
        failed = {seq_id: "this row failed" for seq_id, mark in bad.items() if mark == FAIL_ROW}
        return StepResult(self.output.step_id, sampled, failed, {}, self.runner.step_s)


class FakeRunner:
    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.marks: dict[int, int] = {}

    def launch(self, output: SchedulerOutput) -> Handle:
        for row in output.prefill:
            for token in row.token_ids:
                if token >= EXIT:
                    self.marks[row.seq_id] = token
                if token == EXIT:
                    os._exit(1)
        return Handle(self, output)


def load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    """``step_s``: time per step; ``fail``: a permanent fault; ``crash``: die; ``crash_once``/``block``: a file
    that must not exist yet / must exist for loading to go on; ``child``: note a program's pid there."""
    behaviour = json.loads(config.model)
    progress("weights", 0.5)
    if "fail" in behaviour:
        raise StartupError(behaviour["fail"])
    if "crash" in behaviour:
        print("about to crash")
        os._exit(1)
    if "crash_once" in behaviour and not Path(behaviour["crash_once"]).exists():
        Path(behaviour["crash_once"]).touch()
        os._exit(1)
    if "child" in behaviour:
        Path(behaviour["child"]).write_text(str(subprocess.Popen(["sleep", "300"]).pid))
    while "block" in behaviour and not Path(behaviour["block"]).exists():
        time.sleep(0.01)
    layout = KVLayout(16, (LayerGroup("full", 1, 64),))
    num_blocks = config.max_cache_blocks or 1000
    ready = Ready(
        pid=os.getpid(), device="fake", max_model_len=4096, block_size=16, num_blocks=num_blocks, vocab_size=1000,
        attention="fake", plan={"pool_bytes": 1024 * num_blocks, "blocks_full": num_blocks - 1},
    )  # fmt: skip
    scheduler_config = SchedulerConfig(
        max_num_seqs=config.max_num_seqs, max_model_len=4096, max_queue=config.max_queue, prefill_step_size=64
    )
    scheduler = Scheduler(scheduler_config, layout, (num_blocks,))
    return LoadedEngine(scheduler, FakeRunner(behaviour.get("step_s", 0.001)), ready, lambda: MemoryUse(1, 2, 3))


if __name__ == "__main__":
    sys.exit(run_worker(load))
