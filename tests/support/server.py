"""Real ``headrace serve`` processes for tests.

    serve("plain", "--max-num-seqs", "2")     shared: one process per model and flags for the whole session
    start_server("plain", …)                  private: a process for this test alone, to be killed or drained

Both wait for ``/ready`` and end their process by its id. All servers of a test run share one cache folder,
so only the first start has to measure and compile, and those of a process one TMPDIR.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.files import cache_folder
from support.client import Client

SERVE = (sys.executable, "-m", "headrace.cli.main", "serve")
START_S = 120.0
STOP_S = 60.0
MIB = 2**20
POOL = ("--kv-memory-mb", "256")
# Tests run where others fill the memory; the plan's own tests are elsewhere.
LITTLE_HEADROOM = ("--memory-headroom", "0.01")
MOST_SHARED = 4

Flags = tuple[str, ...]
Serve = Callable[..., "Server"]


class Metrics:
    """One scrape of ``/metrics``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def __call__(self, name: str, **labels: str) -> float:
        """Sum of the samples with this name and these labels; there must be one."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    @property
    def running(self) -> float:
        return self("vllm:num_requests_running")

    @property
    def waiting(self) -> float:
        return self("vllm:num_requests_waiting")

    @property
    def blocks_held(self) -> float:
        return self("headrace:kv_blocks", state="held")

    @property
    def generated(self) -> float:
        return self("vllm:generation_tokens_total")

    def finished(self, reason: str) -> float:
        return self("vllm:request_success_total", finished_reason=reason)

    def rejected(self, reason: str) -> float:
        return self("headrace:requests_rejected_total", reason=reason)

    @property
    def num_series(self) -> int:
        return sum(len(family.samples) for family in self.families.values())


@dataclass
class Server:
    """A running server: gateway process, its worker, and a client."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    log_path: Path
    client: Client

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def status(self) -> dict:
        answer = self.client.get("/v1/status")
        assert answer.status_code == 200
        return answer.json()

    @property
    def worker_pid(self) -> int:
        return int(self.status()["engine"]["pid"])

    def metrics(self) -> Metrics:
        answer = self.client.get("/metrics")
        assert answer.status_code == 200
        return Metrics(answer.text)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def tree(self) -> list[psutil.Process]:
        gateway = psutil.Process(self.pid)
        return [gateway, *gateway.children(recursive=True)]

    def rss_bytes(self) -> int:
        """Resident, without the buffers that MLX keeps for reuse: those have a line of their own in the plan."""
        name = "headrace:device_memory_bytes"  # known from the worker's first heartbeat on
        wait_until(lambda: name in self.metrics().families, 10.0, name)
        kept = self.metrics()(name, kind="cache")
        return sum(process.memory_info().rss for process in self.tree()) - int(kept)

    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.tree())

    def wait_idle(self, timeout_s: float = 30.0) -> Metrics:
        """The first scrape that shows nothing running, waiting or holding blocks."""
        wait_until(lambda: is_idle(self.metrics()), timeout_s, "the server to be idle")
        return self.metrics()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the signal, wait, return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)
            raise
        finally:
            self.client.close()


def is_idle(metrics: Metrics) -> bool:
    return metrics.running == metrics.waiting == metrics.blocks_held == 0


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)


def launch(words: Flags, environment: Mapping[str, str], log_path: Path) -> subprocess.Popen[bytes]:
    """The process alone; what it prints goes to ``log_path``."""
    with log_path.open("wb") as log:
        return subprocess.Popen(
            [*SERVE, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(environment)
        )


def await_ready(process: subprocess.Popen[bytes], model: str, log_path: Path, key: str | None = None) -> Server:
    """The server once its ready line is out and ``/ready`` says 200."""
    deadline = time.monotonic() + START_S
    while not (found := re.search(r"^Ready: (https?://[^\s/]+)", log_path.read_text(errors="replace"), re.M)):
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}:\n{log_path.read_text(errors='replace')}")
        if time.monotonic() > deadline:
            raise AssertionError(f"not ready after {START_S:g} s:\n{log_path.read_text(errors='replace')[-8000:]}")
        time.sleep(0.05)
    client = Client(found[1], model, key)
    assert client.get("/ready").status_code == 200
    return Server(process, found[1], model, log_path, client)


@dataclass(frozen=True)
class Ended:
    """A serve command that ended by itself."""

    code: int
    output: str
    seconds: float
    peak_rss_bytes: int


class ServerRoom:
    """Starts servers, keeps the shared ones, ends them all."""

    def __init__(self, folder: Path, cache: Path, scripted_folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._scripted_folder = scripted_folder
        self._shared: dict[tuple[str, Flags], Server] = {}
        self._count = 0
        (folder / "tmp").mkdir(mode=0o700)
        cache.mkdir(mode=0o700, exist_ok=True)
        for built in ("extensions", "blas"):  # half a minute on both cores, once a machine instead of once a run
            with contextlib.suppress(FileExistsError):
                (cache / built).symlink_to(cache_folder(built))
        self.environment = {
            **os.environ,
            "TMPDIR": str(folder / "tmp"),
            "HEADRACE_CACHE": str(cache),
            "HF_HOME": str(cache / "hf"),
        }
        for name in ("HEADRACE_API_KEY", "VLLM_API_KEY"):
            self.environment.pop(name, None)

    def path(self, model: str | Path) -> str:
        """Of a scripted variant, of "demo", or the path itself."""
        if model == "demo":
            from headrace.cli.demo_model import ensure_demo_model

            return str(ensure_demo_model())
        return str(model) if os.sep in str(model) else str(self._scripted_folder(str(model)))

    def launch(self, model: str | Path, *flags: str, **environment: str) -> tuple[subprocess.Popen[bytes], Path]:
        self._count += 1
        log_path = self._folder / f"server-{self._count}.log"
        port = () if "--port" in flags else ("--port", "0")
        words = (self.path(model), *LITTLE_HEADROOM, *port, *flags)
        return launch(words, {**self.environment, **environment}, log_path), log_path

    def start(self, model: str | Path, *flags: str, key: str | None = None, **environment: str) -> Server:
        """``key``: sent with every request of the server's client."""
        memory = () if {"--kv-memory-mb", "--max-cache-blocks"} & set(flags) else POOL
        process, log_path = self.launch(model, "--served-model-name", "m", *memory, *flags, **environment)
        try:
            return await_ready(process, "m", log_path, key)
        except BaseException:
            process.kill()
            process.wait(timeout=10)
            raise

    def shared(self, model: str = "plain", *flags: str, key: str | None = None) -> Server:
        """The running server of this model and these flags, started when there is none.

        At most ``MOST_SHARED`` run; the one not asked for longest makes room.
        """
        found = self._shared.pop((model, flags), None)
        if found is None:
            if len(self._shared) == MOST_SHARED:
                self._shared.pop(next(iter(self._shared))).end()
            found = self.start(model, *flags, key=key)
        self._shared[model, flags] = found
        assert found.process.poll() is None, f"a shared server has died:\n{found.log()[-4000:]}"
        return found

    def ends(self, *words: str, timeout_s: float = 60.0, **environment: str) -> Ended:
        """A serve command with these words that is expected to end by itself."""
        self._count += 1
        log_path = self._folder / f"server-{self._count}.log"
        began = time.monotonic()
        process = launch(words, {**self.environment, **environment}, log_path)
        deadline = began + timeout_s
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                process.kill()
                process.wait(timeout=10)
                raise AssertionError(f"still running after {timeout_s:g} s:\n{log_path.read_text()}")
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        output = log_path.read_text(errors="replace")
        return Ended(process.returncode, output, time.monotonic() - began, usage.ru_maxrss * 1024)

    def close(self) -> None:
        for server in self._shared.values():
            server.process.terminate()
        for server in self._shared.values():
            server.end()


@pytest.fixture(scope="session")
def server_room(
    tmp_path_factory: pytest.TempPathFactory, scripted_folder: Callable[[str], Path]
) -> Iterator[ServerRoom]:
    # Test runs that go side by side (pytest-xdist) have folders of their own in one of the whole run.
    whole_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        whole_run = whole_run.parent
    room = ServerRoom(tmp_path_factory.mktemp("servers"), whole_run / "server-cache", scripted_folder)
    yield room
    room.close()


@pytest.fixture
def serve(server_room: ServerRoom) -> Serve:
    """``serve(model="plain", *flags)``: a server that other tests use too. Leave it idle and alive."""
    return server_room.shared


@pytest.fixture
def start_server(server_room: ServerRoom) -> Iterator[Serve]:
    """``start_server(model, *flags)``: a server for this test alone, ended behind it."""
    started: list[Server] = []

    def start(model: str | Path = "plain", *flags: str, **options: str) -> Server:
        started.append(server_room.start(model, *flags, **options))
        return started[-1]

    yield start
    for server in started:
        server.end(signal.SIGKILL if server.process.poll() is None else signal.SIGTERM)
