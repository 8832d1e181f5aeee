"""The first hundreds of the fuzz benchmark's requests, beside streams that must not notice; keys in no log."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from crowd import Run, check, crowd
from support.server import Serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import fuzz

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_hostile_requests_disturb_nobody(serve: Serve) -> None:
    server = serve("plain")
    pids = server.pid, server.worker_pid
    requests = crowd("m")
    undisturbed = Run(server.client, requests).answers()
    run = Run(server.client, requests)
    found = asyncio.run(fuzz.fuzz(server.port, range(300), 12))
    assert found.faults == []
    for asked, got, before in zip(requests, run.answers(), undisturbed, strict=True):
        check(asked, got, before)
    server.wait_idle()
    server.client.check_control()
    assert (server.pid, server.worker_pid) == pids


def test_no_key_is_in_the_log_at_any_level(start_server: Serve) -> None:
    secret, wrong = "sk-right-" + "7" * 30, "sk-wrong-" + "8" * 30
    server = start_server("plain", "--api-key", f"team:{secret}", "--log-level", "debug", key=secret)
    server.client.check_control()
    for header in ({"authorization": f"Bearer {wrong}"}, {"x-api-key": wrong}, {"authorization": wrong}):
        assert server.client.get("/v1/models", headers=header).status_code in (200, 401)
    assert server.client.http.get(f"/v1/models?api_key={wrong}").status_code in (200, 401)
    server.client.post("/v1/chat/completions", {"model": "m", "api_key": wrong})
    log = server.log()
    assert log and secret not in log and wrong not in log
