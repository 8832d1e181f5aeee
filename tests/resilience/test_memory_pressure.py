"""A neighbour takes memory and gives it back: the server gives way and recovers, and no answer changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from crowd import Asked, Run, check, crowd
from support.client import Answer
from support.server import Server, ServerRoom, await_ready, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SERVE = (sys.executable, str(Path(__file__).with_name("faulty_serve.py")))
MACHINE_MB, POOL_MB = 400, 600
MIB = 2**20


class Neighbour:
    def __init__(self, pid_file: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("neighbour.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        pid_file.write_text(str(self.process.pid))

    def take(self, mib: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{mib}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{mib}\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass(frozen=True)
class Pressed:
    """A server of one variant, and the crowd that it serves."""

    server: Server
    variant: str

    def crowd(self, scale: int = 1) -> list[Asked]:
        """Behind a window the trigger is out of sight before long texts end: only undisturbed runs tell them."""
        asked = crowd("m", scale)
        return asked if self.variant == "plain" else [replace(each, known=None) for each in asked]

    def blocks(self) -> dict[str, int]:
        """Total per layer group."""
        return {group["group"]: group["total"] for group in self.server.status()["memory"]["kv_blocks"]}


@pytest.fixture(scope="module", params=["plain", "swa64"])
def pressed(
    request: pytest.FixtureRequest, server_room: ServerRoom, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pressed]:
    folder = tmp_path_factory.mktemp("pressure")
    words = [server_room.path(request.param), "--port", "0", "--served-model-name", "m"]
    words += ["--kv-memory-mb", str(POOL_MB)]
    words += ["--max-num-seqs", "32", "--memory-headroom", "0.02"]
    environment = {
        **server_room.environment,
        "HEADRACE_TEST_FAULT": str(folder / "fault"),
        "HEADRACE_TEST_MACHINE_MB": str(MACHINE_MB),
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*SERVE, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    found = await_ready(process, "m", folder / "log")
    yield Pressed(found, request.param)
    assert found.end() == 0, found.log()[-3000:]


@pytest.fixture
def neighbour(pressed: Pressed) -> Iterator[Neighbour]:
    other = Neighbour(pressed.server.log_path.with_name("fault.neighbour"))
    yield other
    other.end()


def stats(server: Server) -> dict:
    return server.status()["stats"]


def calm(server: Server) -> bool:
    return stats(server)["pressure"] == "none"


def checked(run: Run, requests: list[Asked], undisturbed: list[Answer]) -> None:
    for asked, got, before in zip(requests, run.answers(), undisturbed, strict=True):
        check(asked, got, before)


def test_memory_goes_to_the_neighbour_and_comes_back(pressed: Pressed, neighbour: Neighbour) -> None:
    server, requests = pressed.server, pressed.crowd()
    undisturbed = Run(server.client, requests).answers()
    wait_until(lambda: calm(server), 20, "calm")
    planned, rss = pressed.blocks(), psutil.Process(server.worker_pid).memory_info().rss
    run = Run(server.client, requests)
    neighbour.take(MACHINE_MB * 3 // 4)
    wait_until(lambda: all(pressed.blocks()[name] < planned[name] for name in planned), 20, "smaller pools")
    checked(run, requests, undisturbed)
    wait_until(lambda: stats(server)["available_bytes"] >= MACHINE_MB // 2 * MIB, 20, "memory to be given back")
    assert psutil.Process(server.worker_pid).memory_info().rss < rss - 50 * MIB
    assert server.metrics()("headrace:memory_pressure") >= 1
    neighbour.take(0)
    run = Run(server.client, requests)
    wait_until(lambda: calm(server), 30, "calm")
    assert pressed.blocks() == planned
    checked(run, requests, undisturbed)
    assert server.status()["worker_restarts"] == 0


def test_with_nothing_left_admission_pauses_and_requests_wait(pressed: Pressed, neighbour: Neighbour) -> None:
    """Some end while there is nothing left; the others may wait until there is."""
    server, requests = pressed.server, pressed.crowd(scale=2)
    undisturbed = Run(server.client, requests).answers()
    wait_until(lambda: calm(server), 20, "calm")
    preemptions = stats(server)["preemptions_total"]
    run = Run(server.client, requests)
    wait_until(lambda: stats(server)["running"] > 4, 20, "a crowd that runs")
    neighbour.take(MACHINE_MB * 5)
    wait_until(lambda: stats(server)["pressure"] == "preempt", 20, "the last measure")
    wait_until(lambda: stats(server)["preemptions_total"] > preemptions, 20, "sequences to be preempted")
    assert server.client.get("/ready").status_code == 200
    still_open = run.num_open
    wait_until(lambda: run.num_open <= max(0, still_open - 3), 90, "requests to end all the same")
    assert stats(server)["pressure"] == "preempt"
    server.client.check_control()
    neighbour.take(0)
    checked(run, requests, undisturbed)
    wait_until(lambda: calm(server), 40, "calm")
    assert server.status()["worker_restarts"] == 0
    server.wait_idle()
