"""Replacing a worker on purpose: streams go on in the new one, one that does not start changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from engine_harness import engine_config, expected, read, read_some, request, running_engine, until

from headrace.config import EngineConfig, ServerConfig
from headrace.core.machine import Memory
from headrace.gateway.reload import changes_http, fits_twice, needs_restart, refusal, with_fixed, worker_bytes
from headrace.worker.protocol import Ready

pytestmark = pytest.mark.slow

GIB = 1 << 30


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_open_streams_go_on_in_the_new_worker(side_by_side: bool) -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.01)) as engine:
            old = psutil.Process(engine.pid)
            requests = [request(f"r{i}", 120, seed=i) for i in range(6)]
            streams = [engine.client.submit(each) for each in requests]
            begun = [await read_some(stream, 4) for stream in streams]
            statuses: set[str] = set()
            reloading = asyncio.create_task(
                engine.supervisor.reload(engine_config(step_s=0.002), side_by_side=side_by_side)
            )
            while not reloading.done():
                statuses.add(engine.client.state().status)
                await asyncio.sleep(0.005)
            assert reloading.result() == ""
            assert statuses == ({"ready"} if side_by_side else {"ready", "restarting"})
            for each, first, stream in zip(requests, begun, streams, strict=True):
                rest = await read(stream)
                assert first + rest.get(0, []) == expected(each)
            await until(lambda: not old.is_running())
            state = engine.client.state()
            assert (state.restarts, state.reloads, state.quarantined) == (0, 1, 0)

    run(main())


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("behaviour", [{"fail": "shard 2 is missing"}, {"crash": True}])
def test_a_new_worker_that_does_not_start_changes_nothing(side_by_side: bool, behaviour: Any) -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.005)) as engine:
            only = request("r", 100)
            stream = engine.client.submit(only)
            first = await read_some(stream, 3)
            reason = await engine.supervisor.reload(engine_config(**behaviour), side_by_side=side_by_side)
            assert "loaded" in reason or "exit code 1" in reason
            assert first + (await read(stream)).get(0, []) == expected(only)
            await engine.ready()
            assert await read(engine.client.submit(request("after", 5))) == {0: expected(request("after", 5))}

    run(main())


def test_the_old_worker_may_die_while_the_new_one_loads(tmp_path: Path) -> None:
    async def main() -> None:
        gate = tmp_path / "gate"
        async with running_engine(engine_config(step_s=0.01)) as engine:
            only = request("r", 100)
            stream = engine.client.submit(only)
            first = await read_some(stream, 3)
            loading = engine.supervisor.reload(engine_config(block=str(gate)), side_by_side=True)
            reloading = asyncio.create_task(loading)
            await asyncio.sleep(0.3)
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.client.state().status == "restarting")
            assert await engine.supervisor.reload(engine_config(), side_by_side=True)  # one at a time
            gate.touch()
            assert await reloading == ""
            assert first + (await read(stream)).get(0, []) == expected(only)

    run(main())


def test_a_stop_during_a_reload_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        others = set(psutil.Process().children())  # servers that other tests share
        async with running_engine(engine_config()) as engine:
            loading = engine.supervisor.reload(engine_config(block=str(tmp_path / "never")), side_by_side=True)
            reloading = asyncio.create_task(loading)
            await asyncio.sleep(0.3)
            children = set(psutil.Process().children()) - others
            await engine.supervisor.stop()
            assert "stopping" in await reloading
            await until(lambda: not any(child.is_running() for child in children))

    run(main())


def server_config(**fields: Any) -> ServerConfig:
    return ServerConfig(engine=EngineConfig(model="a"), served_model_names=("m",), **fields)


def test_what_a_reload_may_change() -> None:
    old = server_config(port=1)
    assert refusal(old, server_config(max_tokens=5)) == ""
    assert "model" in refusal(old, msgspec.structs.replace(old, engine=EngineConfig(model="b")))
    assert needs_restart(old, server_config(port=2, max_tokens=7)) == ["port"]
    assert with_fixed(old, server_config(port=2, max_tokens=7)) == server_config(port=1, max_tokens=7)
    assert not changes_http(old, msgspec.structs.replace(old, engine=EngineConfig(model="a", max_queue=1)))
    assert changes_http(old, server_config(port=1, max_tokens=7))


def test_two_workers_need_the_memory_of_two() -> None:
    plan: dict[str, int | float | str] = {"weights_bytes": 3 * GIB, "pool_bytes": 4 * GIB, "budget_bytes": 9 * GIB}
    assert worker_bytes(plan) == 7 * GIB
    ready = Ready(
        pid=1, device="cpu: x", max_model_len=1, block_size=1, num_blocks=1, vocab_size=1, attention="", plan=plan
    )
    engine = EngineConfig(model="a", memory_headroom=0.25)
    assert fits_twice(ready, engine, Memory(16 * GIB, None, 11 * GIB))
    assert not fits_twice(ready, engine, Memory(16 * GIB, None, 11 * GIB - 1))
    assert not fits_twice(
        msgspec.structs.replace(ready, device="cuda: y"), engine, Memory(64 * GIB, None, 60 * GIB)
    )
