"""A real server whose worker is killed, frozen, poisoned and lied to in mid work: every answer stays exact."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from crowd import Asked, Run, check, crowd
from support.client import Answer
from support.server import Server, ServerRoom, await_ready, wait_until

COMPILER = "headrace.text.grammars.checking"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SERVE = (sys.executable, str(Path(__file__).with_name("faulty_serve.py")))
STALL_S = 6
KILLED = ("exit", "segv", "raise", "raise_launch", "nan_all", "garbage")


class FaultyServer:
    """A server that can be told what shall go wrong."""

    def __init__(self, server: Server, fault_file: Path) -> None:
        self.server = server
        self.client = server.client
        self.fault_file = fault_file
        self.requests: list[Asked] = crowd("m")
        self.undisturbed: list[Answer] = Run(self.client, self.requests).answers()
        self.server.wait_idle()

    def arm(self, kind: str, after: float) -> None:
        draft = self.fault_file.with_suffix(".draft")
        draft.write_text(json.dumps({"kind": kind, "after": after}))
        draft.rename(self.fault_file)

    @property
    def restarts(self) -> int:
        return int(self.server.status()["worker_restarts"])

    def check(self, run: Run) -> None:
        for asked, got, undisturbed in zip(self.requests, run.answers(), self.undisturbed, strict=True):
            check(asked, got, undisturbed)
        self.client.check_control()
        self.server.wait_idle()


@pytest.fixture(scope="module")
def faulty(server_room: ServerRoom, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    import subprocess

    folder = tmp_path_factory.mktemp("faults")
    words = [server_room.path("plain"), "--port", "0", "--served-model-name", "m", "--kv-memory-mb", "256"]
    words += ["--worker-stall-timeout", str(STALL_S), "--max-decode-stall-ms", "50", "--memory-headroom", "0.02"]
    environment = {**server_room.environment, "HEADRACE_TEST_FAULT": str(folder / "fault")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*SERVE, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    server = await_ready(process, "m", folder / "log")
    yield FaultyServer(server, folder / "fault")
    server.end()
    assert process.returncode == 0, server.log()[-3000:]


@pytest.mark.parametrize("kind", KILLED)
def test_a_fault_in_a_step_is_a_pause(faulty: FaultyServer, kind: str) -> None:
    before = faulty.restarts
    moment = random.Random(kind).randint(1, 120)
    faulty.arm(kind, moment)
    faulty.check(Run(faulty.client, faulty.requests))
    assert faulty.restarts == before + 1
    assert not faulty.fault_file.exists()


def test_one_bad_row_costs_nobody_a_restart(faulty: FaultyServer) -> None:
    before, pid = faulty.restarts, faulty.server.worker_pid
    for moment in (3, 60):
        faulty.arm("nan_row", moment)
        faulty.check(Run(faulty.client, faulty.requests))
        assert not faulty.fault_file.exists()
    assert (faulty.restarts, faulty.server.worker_pid) == (before, pid)


@pytest.mark.parametrize("seed", range(3))
def test_kill_9_at_any_moment(faulty: FaultyServer, seed: int) -> None:
    before, rng = faulty.restarts, random.Random(seed)
    run = Run(faulty.client, faulty.requests)
    time.sleep(rng.uniform(0.02, 0.8))
    os.kill(faulty.server.worker_pid, signal.SIGKILL)
    wait_until(lambda: faulty.client.get("/ready").status_code == 503, 2, "/ready to say so")
    assert faulty.client.get("/health").status_code == 200
    if seed == 2:
        time.sleep(rng.uniform(0.1, 0.6))  # and again, while the next one loads
        children = psutil.Process(faulty.server.pid).children()
        (worker,) = (child for child in children if COMPILER not in child.cmdline())
        worker.kill()
    faulty.check(run)
    assert faulty.restarts == before + 1 + (seed == 2)


def test_a_worker_that_dies_while_loading_is_tried_again(faulty: FaultyServer) -> None:
    before = faulty.restarts
    run = Run(faulty.client, faulty.requests)
    time.sleep(0.2)
    faulty.arm("load_exit", 0.4)
    os.kill(faulty.server.worker_pid, signal.SIGKILL)
    faulty.check(run)
    assert faulty.restarts == before + 2, faulty.server.log()[-3000:]


def test_a_frozen_worker_is_noticed_at_once_and_replaced(faulty: FaultyServer) -> None:
    before = faulty.restarts
    run = Run(faulty.client, faulty.requests)
    time.sleep(0.2)
    os.kill(faulty.server.worker_pid, signal.SIGSTOP)
    wait_until(lambda: faulty.client.get("/ready").status_code == 503, 2.5, "/ready to say so")
    answer = faulty.client.get("/ready").json()
    assert answer["status"] == "silent" and "no sign of life" in answer["reason"]
    faulty.check(run)
    assert faulty.restarts == before + 1


def test_a_short_freeze_is_forgiven(faulty: FaultyServer) -> None:
    before, pid = faulty.restarts, faulty.server.worker_pid
    run = Run(faulty.client, faulty.requests)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.8)
    os.kill(pid, signal.SIGCONT)
    faulty.check(run)
    assert (faulty.restarts, faulty.server.worker_pid) == (before, pid)


def test_a_step_that_never_ends_is_ended(faulty: FaultyServer) -> None:
    before = faulty.restarts
    faulty.arm("hang", 30)
    faulty.check(Run(faulty.client, faulty.requests))
    assert faulty.restarts == before + 1


def test_a_reload_under_load(faulty: FaultyServer) -> None:
    before, pid = faulty.restarts, faulty.server.worker_pid
    run = Run(faulty.client, faulty.requests)
    time.sleep(0.3)
    faulty.server.process.send_signal(signal.SIGHUP)
    faulty.check(run)
    wait_until(lambda: faulty.server.status()["worker_reloads"] == 1, 30, "the new worker")
    wait_until(lambda: faulty.client.get("/ready").status_code == 200, 30, "the new worker to be ready")
    assert faulty.server.worker_pid != pid
    answer = faulty.client.post("/v1/models/reload")
    assert answer.status_code == 200, answer.text + faulty.server.log()[-3000:]
    assert faulty.server.status()["worker_reloads"] == 2
    assert faulty.restarts == before
