"""Engines beside the main one: each a worker process with its own supervisor, journal and client.

They start before the main model, one after the other: their memory is small and planned by count, and the main
model's plan then sees what they left. What ends the start of one ends the server with one line; one that gives up
later fails its own requests only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import ServerConfig, SideModel
from headrace.errors import RequestError, StartupError
from headrace.gateway.supervisor import Supervisor
from headrace.gateway.worker_client import WorkerClient

FLAGS = {"embedding": "--embedding-model", "reranker": "--rerank-model"}


@dataclass(frozen=True, slots=True)
class _Side:
    flag: str
    model: SideModel
    client: WorkerClient
    supervisor: Supervisor


class SideEngines:
    """Those that ``config`` names. ``start`` once; then ``stop``, and ``close`` when that has returned.

    Args:
        folder: private, existing; each engine gets a folder in it.
    """

    def __init__(self, config: ServerConfig, folder: Path, command: Sequence[str]) -> None:
        self._sides: dict[str, _Side] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        for name, model in (("embedding", config.embedding), ("reranker", config.reranker)):
            if model is None:
                continue
            client = WorkerClient(max_held=model.engine.max_queue)
            supervisor = Supervisor(
                model.engine,
                client,
                folder=folder / name,
                stall_timeout_s=config.worker_stall_timeout_s,
                command=command,
            )
            self._sides[name] = _Side(FLAGS[name], model, client, supervisor)

    @property
    def clients(self) -> Mapping[str, WorkerClient]:
        return {name: side.client for name, side in self._sides.items()}

    async def start(self) -> None:
        """Return when each is ready (or has given up). StartupError: one cannot start."""
        for name, side in self._sides.items():
            running = self._running[name] = asyncio.create_task(side.supervisor.run())
            ready = asyncio.create_task(side.client.first_ready.wait())
            try:
                await asyncio.wait({running, ready}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ready.cancel()
            if running.done():
                try:
                    running.result()
                except StartupError as error:
                    reason = str(error).replace(
                        "--max-cache-blocks", "--embedding-max-length"
                    )  # it sizes the pool
                    raise StartupError(f"{side.flag} {side.model.name}: {reason}") from None

    def start_draining(self, message: str) -> None:
        for side in self._sides.values():
            side.client.start_draining(message)

    async def drained(self) -> None:
        for side in self._sides.values():
            await side.client.drained()

    def fail_all(self, error: RequestError) -> None:
        for side in self._sides.values():
            side.client.fail_all(error)

    async def stop(self) -> None:
        """End their workers."""
        await asyncio.gather(*(side.supervisor.stop() for side in self._sides.values()))
        if self._running:
            await asyncio.wait(self._running.values())

    def close(self) -> None:
        for side in self._sides.values():
            side.supervisor.close()
