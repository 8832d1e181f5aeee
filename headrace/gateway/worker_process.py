"""One worker process: started with ``subprocess``, fed and heard over its own socket, watched until it is dead.

Each start gets a fresh socket, token and step record, so nothing of a dead worker can be taken for the new one's.
The first line of the worker's standard input is its configuration; the pipe then stays open, and its end of file
tells the worker that the gateway is gone. What the worker prints becomes log lines of the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.worker.log_lines import read_line
from headrace.worker.protocol import (
    EXIT_START_FAILED,
    ToGateway,
    ToWorker,
    WorkerStart,
    engine_identity,
    heartbeat_identity,
)
from headrace.worker.step_record import read_step_record

WORKER_COMMAND = (sys.executable, "-u", "-X", "faulthandler", "-m", "headrace.worker.main")

# A signal that a program of ours cannot have raised against itself by a fault of its own.
_OUTSIDE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_MAX_LINE_BYTES = 4096
_IPC_PATH_LIMIT = 100
_FLUSH_S = 0.05

log = logging.getLogger("headrace.gateway")
worker_log = logging.getLogger("headrace.worker")


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """How a worker ended.

    Attributes:
        reason: one line that anybody may read.
        counts: whether its requests are suspects (a fault of the worker's own, or a hang).
        permanent: the worker said that starting again would not help.
        in_step: ids of the requests in the step that died; None when that is not known.
        detail: what the worker itself said last, for the log and the operator.
    """

    reason: str
    counts: bool
    permanent: bool
    in_step: frozenset[str] | None
    detail: str = ""

    @property
    def full_reason(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class WorkerProcess:
    """Lifecycle: ``start`` once, ``send`` any time, ``wait`` for the death, ``close`` once."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        number: int,
        on_message: Callable[[ToGateway], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._token = secrets.token_hex(16)
        self._record = folder / f"step-{number}"
        self._folder = folder
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._endpoint = ""
        self._number = number
        self._decoder = msgspec.msgpack.Decoder(ToGateway)
        self._encoder = msgspec.msgpack.Encoder()
        self._process: asyncio.subprocess.Process | None = None
        self._last_line = ""
        self._killed_for = ""
        self._is_broken = False

    async def start(self, command: Sequence[str], engine: EngineConfig) -> None:
        """Raises ``OSError`` or ``ZMQError`` when the program cannot be run at all."""
        self._endpoint = bind_private(self._socket, self._folder, self._number)
        self._loop.add_reader(self._socket.FD, self.receive)
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal is for the gateway alone; one group to end
        )
        start = WorkerStart(
            engine=engine,
            endpoint=self._endpoint,
            token=self._token,
            folder=str(self._folder),
            record=str(self._record),
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Never blocks; only meaningful after the worker's first message (the socket knows its peer then)."""
        self._socket.send_multipart([engine_identity(self._token), self._encoder.encode(message)], zmq.NOBLOCK)
        self._loop.call_soon(self.receive)  # sending may swallow the descriptor's edge

    def kill(self, reason: str = "") -> None:
        """End the process now; ``reason`` marks a fault (a hang), none an orderly stop."""
        self._killed_for = self._killed_for or reason
        if self._process is not None and self._process.returncode is None:  # else the pid may be another's by now
            self._end_group()

    async def wait(self) -> WorkerDeath:
        """Log the worker's lines until it is dead; all its messages have been passed on by then."""
        assert self._process is not None and self._process.stdout is not None
        pump = asyncio.create_task(self._pump_lines(self._process.stdout))
        code = await self._process.wait()
        self._end_group()
        await asyncio.wait({pump}, timeout=1.0)  # a grandchild may hold the pipe open
        pump.cancel()
        await asyncio.sleep(_FLUSH_S)
        self.receive()
        return self._death(code)

    def close(self) -> None:
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(0)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(OSError):
            self._record.unlink(missing_ok=True)
            if self._endpoint.startswith("ipc://"):
                Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)

    def receive(self) -> None:
        """Pass on every message that is there. One that cannot be read ends the worker: what it said is lost."""
        peers = (engine_identity(self._token), heartbeat_identity(self._token))
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2 or frames[0] not in peers:
                continue
            try:
                message = self._decoder.decode(frames[1])
            except msgspec.MsgspecError as error:
                if self._is_broken:
                    continue
                log.error("a message of the worker cannot be read: %s", error)
                self._is_broken = True
                self.kill("the worker sent a message that cannot be read")
            if not self._is_broken:  # behind a lost message nothing fits
                self._on_message(message)

    # -- inside

    def _end_group(self) -> None:
        """The worker, and what it started (compilers at a first start)."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _pump_lines(self, stdout: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stdout.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._log_line(line)
            if len(rest) > _MAX_LINE_BYTES:
                self._log_line(rest)
                rest = b""
        self._log_line(rest)

    def _log_line(self, raw: bytes) -> None:
        line = raw[:_MAX_LINE_BYTES].decode(errors="replace").rstrip()
        level, text = read_line(line)
        if text:
            self._last_line = text
            worker_log.log(level, "%s", text)

    def _death(self, code: int) -> WorkerDeath:
        in_step = read_step_record(self._record)
        if self._killed_for:
            return WorkerDeath(self._killed_for, True, False, in_step)
        if code < 0:
            number = signal.Signals(-code)
            return WorkerDeath(
                f"the worker was ended by {number.name}", number not in _OUTSIDE_SIGNALS, False, in_step
            )
        reason = f"the worker ended with exit code {code}"
        return WorkerDeath(reason, True, code == EXIT_START_FAILED, in_step, self._last_line)


def bind_private(socket: zmq.Socket[bytes], folder: Path, number: int) -> str:
    """Bind in the private folder (loopback TCP where there is no ipc, or the path is too long for it)."""
    path = folder / f"worker-{number}"
    if zmq.has("ipc") and len(str(path)) < _IPC_PATH_LIMIT:
        socket.bind(f"ipc://{path}")
        return f"ipc://{path}"
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


async def is_stopped(pid: int) -> bool:
    """Whether somebody suspended the process (SIGSTOP): then a hang is not its own fault."""
    with contextlib.suppress(OSError):  # Linux; "pid (name) state …"
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "Tt"
    with contextlib.suppress(OSError):
        ps = await asyncio.create_subprocess_exec(
            "ps", "-o", "stat=", "-p", str(pid), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        output, _ = await ps.communicate()
        return output.strip().startswith(b"T")
    return False
