"""``headrace plan`` and a start of the worker plan with one arithmetic; what is really used is shown beside it."""

from __future__ import annotations

import json

import pytest
from support.server import LITTLE_HEADROOM, Serve, Server, ServerRoom

from headrace.cli.main import main

pytestmark = pytest.mark.slow

FLAGS = ("--kv-memory-mb", "64", "--max-num-seqs", "8", *LITTLE_HEADROOM)
EXACT = ("weights_bytes", "buffer_cache_bytes", "pool_bytes", "blocks_full", "kv_bytes_per_token", "max_model_len")


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain", *FLAGS)


def test_plan_and_worker_agree(
    server: Server, server_room: ServerRoom, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", server_room.path("plain"), *FLAGS, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    in_force = server.status()["engine"]["plan"]
    for name in EXACT:
        assert planned[name] == in_force[name], name
    # estimated from the headers there, measured here
    assert 0.3 < planned["activations_bytes"] / in_force["activations_bytes"] < 3
    assert planned["headroom_bytes"] == in_force["headroom_bytes"]


def test_status_shows_the_plan_and_what_is_used(server: Server) -> None:
    server.wait_idle()
    memory = server.status()["memory"]
    rows = memory["planned_bytes"]
    assert list(rows)[-1] == "budget" and sum(rows.values()) == 2 * rows["budget"]
    (group,) = memory["kv_blocks"]
    assert group["group"] == "full" and group["held"] == 0
    assert group["free"] + group["cached"] == group["total"]
    pool = (group["total"] + 1) * group["block_bytes"]
    actual = memory["actual_bytes"]
    assert pool + rows["weights"] <= actual["arrays"] < actual["process"]
    metrics = server.metrics()
    assert metrics("headrace:prefix_cache_bytes") == group["cached"] * group["block_bytes"]
    assert metrics("headrace:kv_group_blocks", group="full", state="free") == group["free"]
    assert metrics("headrace:memory_headroom_bytes") == memory["headroom_bytes"]


def test_the_log_has_the_table_once(server: Server) -> None:
    lines = [line for line in server.log().splitlines() if "memory plan: " in line]
    assert sum("weights" in line for line in lines) == 1
    assert sum("budget" in line for line in lines) == 1


def test_held_blocks_are_those_of_running_requests(server: Server) -> None:
    with server.client.streaming("<|s01|>" + "." * 600, max_tokens=4000) as chunks:
        next(chunks)
        (group,) = server.status()["memory"]["kv_blocks"]
        assert group["held"] * server.status()["engine"]["block_size"] >= 604
    assert server.wait_idle().blocks_held == 0
