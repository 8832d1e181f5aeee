"""A supervisor, a client and a worker process without a model, for tests on one event loop."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fake_worker

from headrace.config import EngineConfig
from headrace.gateway.service import OutputStream
from headrace.gateway.supervisor import Supervisor
from headrace.gateway.worker_client import WorkerClient
from headrace.params import SamplingParams, sequence_seed
from headrace.request import EngineRequest

FAKE_WORKER = (sys.executable, "-u", str(Path(__file__).with_name("fake_worker.py")))


def engine_config(max_num_seqs: int = 64, max_queue: int = 64, **behaviour: Any) -> EngineConfig:
    return EngineConfig(model=json.dumps(behaviour), max_num_seqs=max_num_seqs, max_queue=max_queue)


def request(
    request_id: str, max_tokens: int = 20, *, marks: tuple[int, ...] = (), n: int = 1, seed: int = 0
) -> EngineRequest:
    prompt = [*marks, 1, 2, 3, 4, 5]
    return EngineRequest(
        id=request_id, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens, seed=seed), n=n
    )


def expected(request: EngineRequest, index: int = 0) -> list[int]:
    """What the engine must answer, whatever happens on the way."""
    start, seed = len(request.prompt_token_ids), sequence_seed(request.params.seed, index)
    return [fake_worker.token_at(seed, start + i) for i in range(request.params.max_tokens)]


async def read(stream: OutputStream) -> dict[int, list[int]]:
    """All tokens by sequence; raises what the stream raises."""
    tokens: dict[int, list[int]] = {}
    async for outputs in stream:
        for output in outputs:
            tokens.setdefault(output.index, []).extend(output.token_ids)
    return tokens


async def read_some(stream: OutputStream, count: int) -> list[int]:
    """The first tokens of sequence 0, at least ``count``."""
    tokens: list[int] = []
    while len(tokens) < count:
        for output in await anext(stream):
            tokens += output.token_ids
    return tokens


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class RunningEngine:
    def __init__(
        self, client: WorkerClient, supervisor: Supervisor, task: asyncio.Task[None], folder: Path
    ) -> None:
        self.client, self.supervisor, self.task, self.folder = client, supervisor, task, folder

    @property
    def pid(self) -> int:
        pid = self.supervisor.worker_pid
        assert pid is not None
        return pid

    async def ready(self) -> None:
        await until(lambda: self.client.state().status == "ready")

    async def replaced(self, restarts: int = 1) -> None:
        """Until a worker after ``restarts`` deaths is ready."""
        await until(lambda: self.client.state().restarts >= restarts and self.client.state().status == "ready")


@asynccontextmanager
async def running_engine(
    config: EngineConfig, stall_timeout_s: float = 30.0, wait: bool = True, command: Sequence[str] = FAKE_WORKER
) -> AsyncIterator[RunningEngine]:
    with tempfile.TemporaryDirectory(prefix="hr-test-") as name:
        folder = Path(name)
        client = WorkerClient(max_held=config.max_queue)
        supervisor = Supervisor(config, client, folder=folder, stall_timeout_s=stall_timeout_s, command=command)
        task = asyncio.create_task(supervisor.run())
        engine = RunningEngine(client, supervisor, task, folder)
        try:
            if wait:
                await engine.ready()
            yield engine
        finally:
            await supervisor.stop()
            await asyncio.wait({task})
            supervisor.close()
            assert list(folder.iterdir()) == [], "socket or record left behind"
