"""``headrace serve`` as a child, for benchmarks that kill, flood and watch it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
SERVE = (sys.executable, "-m", "headrace.cli.main", "serve")


def model_path(name: str, folder: Path) -> str:
    """Of "scripted" (the checkpoint that says known text, written into ``folder``), "demo", or the path itself."""
    if name == "demo":
        from headrace.cli.demo_model import ensure_demo_model

        return str(ensure_demo_model())
    if name != "scripted":
        return name
    sys.path.insert(0, str(ROOT / "tests"))
    from support import scripted

    return str(scripted.build(folder / "scripted"))


@dataclass
class LiveServer:
    process: subprocess.Popen[bytes]
    url: str
    http: httpx.AsyncClient

    async def get(self, path: str) -> Any:
        return (await self.http.get(self.url + path)).json()

    async def worker_pid(self) -> int:
        return int((await self.get("/v1/status"))["engine"]["pid"])

    def present_worker(self) -> psutil.Process | None:
        """The newest child, whether it is ready or still loads."""
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self.process.pid).children()
            workers = [child for child in children if "headrace.text.grammars.checking" not in child.cmdline()]
            return max(workers, key=lambda child: child.create_time(), default=None)
        return None

    async def is_ready(self) -> bool:
        return bool((await self.http.get(self.url + "/ready")).status_code == 200)

    async def until_restarted(self, restarts: int) -> None:
        """Until a worker is ready that came after ``restarts`` others had died."""
        while True:
            status = await self.get("/v1/status")
            if status["status"] == "failed":
                raise RuntimeError(f"the server gave up: {status['message']}")
            if status["worker_restarts"] > restarts and status["status"] == "ready":
                return
            await asyncio.sleep(0.005)

    async def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.get("/v1/status"))["stats"]
        return found

    async def until_idle(self) -> dict[str, Any]:
        while True:
            stats = await self.stats()
            if stats["running"] == stats["waiting"] == stats["blocks_held"] == 0:
                return stats
            await asyncio.sleep(0.05)

    def resources(self) -> dict[str, int]:
        """Of gateway and worker: resident bytes, descriptors, threads."""
        found: dict[str, int] = {}
        gateway = psutil.Process(self.process.pid)
        for name, process in (("gateway", gateway), ("worker", self.present_worker())):
            if process is not None:
                with contextlib.suppress(psutil.Error):
                    found[f"{name}_rss"] = process.memory_info().rss
                    found[f"{name}_fds"] = process.num_fds()
                    found[f"{name}_threads"] = process.num_threads()
        return found


@asynccontextmanager
async def live_server(model: str, log_path: Path, flags: Sequence[str]) -> AsyncIterator[LiveServer]:
    """Started, ready, and ended behind the block; raises RuntimeError when it does not come up."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        words = [*SERVE, model_path(model, Path(folder)), "--port", "0", "--served-model-name", "m", *flags]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(os.environ)
            )
        try:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as http:
                yield LiveServer(process, await _announced(process, log_path), http)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _announced(process: subprocess.Popen[bytes], log_path: Path) -> str:
    while True:
        text = log_path.read_text(errors="replace")
        if found := re.search(r"^Ready: (http://[^\s/]+)", text, re.MULTILINE):
            return found[1]
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}:\n{text[-2000:]}")
        await asyncio.sleep(0.05)


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, mean and quantiles; None where there is nothing."""
    if not values:
        return {"count": 0, "mean": None, "p50": None, "p95": None, "max": None}
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    mean = round(sum(ordered) / len(ordered), 3)
    return {"count": len(ordered), "mean": mean, "p50": at(0.5), "p95": at(0.95), "max": round(ordered[-1], 3)}
