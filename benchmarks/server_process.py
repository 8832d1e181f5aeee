"""A server under measurement: started as a process group of its own, awaited, stopped, its CPU time read.

Also the machine's CPU time, so that a run on a busy machine can be told from one on a quiet one.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.bench.http_stream import BodyCut, ConnectFailed, MalformedAnswer, Server, send


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is measured: its name, its command line with ``{port}`` and ``{model}``, the model's folder, and the
    name that requests carry (None: the first one of GET /v1/models, else the folder)."""

    name: str
    command: str
    model: str
    request_model: str | None
    environment: Mapping[str, str]

    def words(self, port: int) -> list[str]:
        replaced = {"{port}": str(port), "{model}": self.model, "{python}": sys.executable}
        words = shlex.split(self.command)
        for mark, value in replaced.items():
            words = [word.replace(mark, value) for word in words]
        return words


class ServerDied(Exception):
    """The server ended, or was not ready in time; the message names its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def running(candidate: Candidate, log_dir: Path) -> Iterator[RunningServer]:
    """The server's processes, from start until they are gone; only this process group is ended."""
    port = _free_port()
    log_path = log_dir / f"{candidate.name}.log"
    with open(log_path, "ab") as log:
        process = subprocess.Popen(
            candidate.words(port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **candidate.environment},
        )
    try:
        yield RunningServer(f"http://127.0.0.1:{port}", process)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and (process.poll() is None or _session_pids(process.pid)):
            time.sleep(0.1)
    process.wait(timeout=10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def wait_until_listed(server: RunningServer, timeout_s: float) -> bytes:
    """Body of the first GET /v1/models that is answered with 200. Raises ServerDied."""
    deadline_s = time.monotonic() + timeout_s
    target = Server.of(server.url)
    while time.monotonic() < deadline_s:
        if server.process.poll() is not None:
            raise ServerDied(f"it ended with code {server.process.returncode}")
        try:
            async with asyncio.timeout(5), send(target, "GET", "/v1/models", {}) as answer:
                if answer.status == 200:
                    return await answer.read()
        except (ConnectFailed, BodyCut, MalformedAnswer, TimeoutError):
            pass
        await asyncio.sleep(0.25)
    raise ServerDied(f"not ready within {timeout_s:g} s")


# -- CPU time, from Linux's /proc; None elsewhere -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of CPU: of the server's processes, and of the whole machine."""

    server_s: float
    machine_s: float


def cpu_times(session: int) -> CpuTimes | None:
    if not sys.platform.startswith("linux"):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    server = sum(_stat_of(pid)[1] for pid in _session_pids(session)) / tick
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return CpuTimes(server, (sum(fields) - idle) / tick)


def _session_pids(session: int) -> list[int]:
    if not sys.platform.startswith("linux"):
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _stat_of(pid)[0] == session]


def _stat_of(pid: int) -> tuple[int, int]:
    """Session of a process and clock ticks it and its reaped children used; (0, 0) when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, 0
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces; fields[0] is field 3, the state
    if fields[0] == "Z":
        return 0, 0
    return int(fields[3]), sum(int(field) for field in fields[11:15])
