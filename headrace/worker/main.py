"""``python -m headrace.worker.main``: the worker process of one model. Started by the gateway only.

The matrix library must be chosen before MLX is loaded, so nothing that imports MLX is imported at the top.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.core.machine import process_bytes, read_memory
from headrace.core.pressure import default_thresholds
from headrace.core.scheduler import Scheduler
from headrace.worker.engine import MemoryUse
from headrace.worker.process import LoadedEngine, Progress, run_worker
from headrace.worker.protocol import Ready

if TYPE_CHECKING:
    from headrace.runner.build import BuiltRunner
    from headrace.runner.pool_memory import PoolMemory


def load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    """Load the model and plan its memory. Raises ``StartupError`` for a permanent fault."""
    from headrace.runner import mlx_environment
    from headrace.runner.cpu import blas

    blas.prepare()
    mlx_environment.prepare()
    from headrace.runner.build import build_runner

    built = build_runner(config, progress)
    info = built.ready_info
    ready = Ready(
        pid=os.getpid(),
        device=info.device,
        max_model_len=info.max_model_len,
        block_size=built.layout.block_size,
        num_blocks=sum(built.num_blocks),
        vocab_size=info.vocab_size,
        attention=info.attention,
        plan=info.plan,
    )
    scheduler = Scheduler(built.scheduler_config, built.layout, built.num_blocks)
    return LoadedEngine(scheduler, built.runner, ready, _memory, pool_memory(config, built), built.grammars)


def pool_memory(config: EngineConfig, built: BuiltRunner) -> PoolMemory | None:
    """None on CUDA: a device's memory is nobody else's, so the machine's says nothing about it."""
    from headrace.runner.build import BUFFER_CACHE_BYTES
    from headrace.runner.pool_memory import PoolMemory

    kind = built.ready_info.device.partition(":")[0]
    if kind == "cuda":
        return None
    memory = read_memory()
    headroom = int(memory.total_bytes * config.memory_headroom)
    thresholds = default_thresholds(headroom, memory.available_bytes)
    return PoolMemory(built.runner, built.layout, built.num_blocks, BUFFER_CACHE_BYTES[kind], thresholds)


def _memory() -> MemoryUse:
    import mlx.core as mx

    return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), process_bytes())


if __name__ == "__main__":
    sys.exit(run_worker(load))
