"""``python -m headrace.worker.main``: the worker process of one model. Started by the gateway only.

The matrix library must be chosen before MLX is loaded, so nothing that imports MLX is imported at the top.
"""

from __future__ import annotations

import os
import sys

from headrace.config import EngineConfig
from headrace.core.scheduler import Scheduler
from headrace.worker.engine import MemoryUse
from headrace.worker.process import LoadedEngine, Progress, run_worker
from headrace.worker.protocol import Ready


def load(config: EngineConfig, progress: Progress) -> LoadedEngine:
    """Load the model and plan its memory. Raises ``StartupError`` for a permanent fault."""
    from headrace.runner import blas

    blas.prepare()
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
    return LoadedEngine(scheduler, built.runner, ready, _memory, built.grammars)


def _memory() -> MemoryUse:
    import mlx.core as mx

    return MemoryUse(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


if __name__ == "__main__":
    sys.exit(run_worker(load))
