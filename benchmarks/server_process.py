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
from contextlib import contextmanager, suppress
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
    """Asks the process group to end, then insists; also ends children that have left the group."""
    family = [stat.pid for stat in _tree(process.pid)]
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + 15
    while time.monotonic() < deadline_s and (process.poll() is None or any(map(_stat_of, family))):
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in family:
        if _stat_of(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
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


def cpu_times(root: int) -> CpuTimes | None:
    """``root``: the server's first process; its children count, also those in sessions of their own."""
    if not sys.platform.startswith("linux"):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    server = sum(stat.ticks for stat in _tree(root))
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return CpuTimes(server / tick, (sum(fields) - idle) / tick)


@dataclass(frozen=True, slots=True)
class _Stat:
    """Of one living process; ``ticks`` of CPU time include those of children that it has reaped."""

    pid: int
    parent: int
    ticks: int


def _tree(root: int) -> list[_Stat]:
    """The process ``root`` and its descendants, as far as they live."""
    if not sys.platform.startswith("linux"):
        return []
    stats = [stat for name in os.listdir("/proc") if name.isdigit() and (stat := _stat_of(int(name)))]
    tree = [stat for stat in stats if stat.pid == root]
    for parent in tree:  # grows while it is walked
        tree += [stat for stat in stats if stat.parent == parent.pid]
    return tree


def _stat_of(pid: int) -> _Stat | None:
    """None: it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold spaces; fields[0] is field 3, the state
    if fields[0] == "Z":
        return None
    return _Stat(pid, int(fields[1]), sum(int(field) for field in fields[11:15]))
