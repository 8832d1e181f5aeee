"""Workers that die, hang, fail to load: streams go on where they stopped, and nothing is sent twice.

The worker is the real process and loop around a runner without a model (``fake_worker.py``).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import fake_worker
import psutil
import pytest
from engine_harness import engine_config, expected, read, read_some, request, running_engine, until

from headrace.errors import InternalFault, InvalidRequest, NotReady, QueueFull, RequestError, StartupError


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_requests_are_answered_and_idle_gauges_return() -> None:
    async def main() -> None:
        async with running_engine(engine_config()) as engine:
            requests = [request(f"r{i}", 30, seed=i, n=1 + i % 3) for i in range(12)]
            streams = [engine.client.submit(each) for each in requests]
            for each, stream in zip(requests, streams, strict=True):
                await stream.accepted()
                assert await read(stream) == {i: expected(each, i) for i in range(each.n)}
            await until(lambda: engine.client.state().stats.running == 0)
            stats = engine.client.state().stats
            assert (stats.waiting, stats.blocks_held) == (0, 0)
            assert engine.client.generation_tokens_total == sum(30 * each.n for each in requests)
            assert engine.client.prompt_tokens_total == 5 * len(requests)
            await engine.client.drained()

    run(main())


def test_kill_9_in_mid_stream_is_a_pause() -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.005)) as engine:
            requests = [request(f"r{i}", 60, seed=i) for i in range(8)]
            streams = [engine.client.submit(each) for each in requests]
            begun = [await read_some(stream, 5) for stream in streams]
            os.kill(engine.pid, signal.SIGKILL)
            await engine.replaced()
            for each, first, stream in zip(requests, begun, streams, strict=True):
                rest = await read(stream)
                assert first + rest.get(0, []) == expected(each)
            assert engine.client.replayed_total >= 1

    run(main())


@pytest.mark.slow
def test_outside_kills_never_blame_a_request() -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.01)) as engine:
            only = request("r", 200)
            stream = engine.client.submit(only)
            reading = asyncio.create_task(read(stream))
            for restarts in range(1, 5):
                seen = engine.client.generation_tokens_total
                await until(lambda seen=seen: engine.client.generation_tokens_total > seen)
                os.kill(engine.pid, signal.SIGKILL)
                await engine.replaced(restarts)
            assert await reading == {0: expected(only)}

    run(main())


@pytest.mark.parametrize(
    "mark", [fake_worker.EXIT, fake_worker.POISON, fake_worker.SEGFAULT, fake_worker.LATE_EXIT]
)
@pytest.mark.slow
def test_a_poisonous_request_gets_a_500_and_the_others_their_answers(mark: int) -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.003)) as engine:
            good = [request(f"good{i}", 40, seed=i) for i in range(4)]
            streams = [engine.client.submit(each) for each in good]
            await asyncio.gather(*(stream.accepted() for stream in streams))
            bad = engine.client.submit(request("bad", 40, marks=(mark,)))
            with pytest.raises(InternalFault):
                await read(bad)
            for each, stream in zip(good, streams, strict=True):
                assert await read(stream) == {0: expected(each)}
            assert engine.client.state().restarts <= 4
            after = request("after", 5)
            await engine.ready()
            assert await read(engine.client.submit(after)) == {0: expected(after)}

    run(main())


@pytest.mark.slow
def test_a_hang_is_ended_and_its_request_given_up() -> None:
    async def main() -> None:
        async with running_engine(engine_config(), stall_timeout_s=1.0) as engine:
            with pytest.raises(InternalFault):
                await read(engine.client.submit(request("bad", 10, marks=(fake_worker.HANG,))))
            assert engine.client.state().restarts == 2

    run(main())


@pytest.mark.slow
def test_a_suspended_worker_is_replaced_and_nobody_is_blamed() -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.01), stall_timeout_s=1.0) as engine:
            only = request("r", 100)
            stream = engine.client.submit(only)
            first = await read_some(stream, 3)
            for restarts in (1, 2, 3):
                os.kill(engine.pid, signal.SIGSTOP)
                await engine.replaced(restarts)
            assert first + (await read(stream))[0] == expected(only)

    run(main())


def test_a_failing_row_is_that_requests_error_alone() -> None:
    async def main() -> None:
        async with running_engine(engine_config()) as engine:
            pid = engine.pid
            good = request("good", 30)
            stream = engine.client.submit(good)
            outputs = [o for o_list in [x async for x in engine.client.submit(
                request("bad", 10, marks=(fake_worker.FAIL_ROW,)))] for o in o_list]  # fmt: skip
            assert outputs[-1].finish_reason == "error" and outputs[-1].error
            assert await read(stream) == {0: expected(good)}
            assert engine.pid == pid

    run(main())


def test_a_permanent_fault_at_start_is_one_line() -> None:
    async def main() -> None:
        async with running_engine(engine_config(fail="shard 2 of 3 is missing"), wait=False) as engine:
            with pytest.raises(StartupError, match=r"^shard 2 of 3 is missing$"):
                await engine.task
            with pytest.raises(NotReady):
                engine.client.submit(request("r"))

    run(main())


@pytest.mark.slow
def test_a_crash_while_loading_is_retried(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_engine(engine_config(crash_once=str(tmp_path / "crashed"))) as engine:
            only = request("r", 5)
            assert await read(engine.client.submit(only)) == {0: expected(only)}
            assert engine.client.state().restarts == 1

    run(main())


@pytest.mark.slow
def test_a_worker_that_cannot_be_run_is_a_kept_reason(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_engine(engine_config(), wait=False, command=(str(tmp_path / "missing"),)) as engine:
            await until(lambda: engine.client.state().status == "failed", 60)
            assert "cannot be started" in engine.client.state().message

    run(main())


@pytest.mark.slow
def test_crashes_at_every_start_end_in_a_kept_reason() -> None:
    async def main() -> None:
        async with running_engine(engine_config(crash=True), wait=False) as engine:
            await until(lambda: engine.client.state().status == "failed", 60)
            assert engine.client.state().message.endswith("the worker ended with exit code 1")
            assert engine.client.state().detail == "about to crash"
            with pytest.raises(NotReady, match="failed"):
                engine.client.submit(request("r"))

    run(main())


def test_requests_before_the_first_ready_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        gate = tmp_path / "gate"
        async with running_engine(engine_config(block=str(gate)), wait=False) as engine:
            await until(lambda: engine.client.state().load is not None)
            with pytest.raises(NotReady) as caught:
                engine.client.submit(request("r"))
            assert caught.value.retry_after_s
            gate.touch()
            await engine.ready()
            assert engine.client.state().load is None

    run(main())


def test_requests_during_a_restart_wait_in_bounds() -> None:
    async def main() -> None:
        async with running_engine(engine_config(max_queue=3)) as engine:
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: engine.client.state().status == "restarting")
            requests = [request(f"r{i}", 5, seed=i) for i in range(3)]
            streams = [engine.client.submit(each) for each in requests]
            with pytest.raises(QueueFull):
                engine.client.submit(request("more"))
            for each, stream in zip(requests, streams, strict=True):
                assert await read(stream) == {0: expected(each)}

    run(main())


@pytest.mark.slow
def test_replays_are_not_refused_by_a_full_queue() -> None:
    async def main() -> None:
        async with running_engine(engine_config(max_num_seqs=8, max_queue=2, step_s=0.01)) as engine:
            requests = [request(f"r{i}", 40, seed=i) for i in range(10)]
            streams = []
            for each in requests:
                streams.append(engine.client.submit(each))
                await streams[-1].accepted()
                await asyncio.sleep(0.05)
            os.kill(engine.pid, signal.SIGKILL)
            for each, stream in zip(requests, streams, strict=True):
                assert await read(stream) == {0: expected(each)}

    run(main())


def test_a_refusal_of_the_worker_reaches_the_reader() -> None:
    async def main() -> None:
        async with running_engine(engine_config()) as engine:
            long = request("long", 5, marks=tuple(range(1, 5)) * 2000)
            stream = engine.client.submit(long)
            with pytest.raises(InvalidRequest):
                await stream.accepted()
            with pytest.raises(RequestError):
                await anext(stream)
            engine.client.submit(request("twice", 5))
            with pytest.raises(InvalidRequest):
                engine.client.submit(request("twice", 5))

    run(main())


def test_an_abort_ends_the_stream_and_frees_the_blocks() -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.005)) as engine:
            stream = engine.client.submit(request("r", 3000))
            await read_some(stream, 3)
            engine.client.abort("r")
            engine.client.abort("unknown")
            assert await read(stream) == {}
            await until(lambda: engine.client.state().stats.running == 0)
            assert engine.client.state().stats.blocks_held == 0
            both = request("both", 100, n=2)
            stream = engine.client.submit(both)
            await read_some(stream, 1)
            engine.client.abort("both", 1)
            tokens = await read(stream)
            assert len(tokens.get(1, [])) < 100
            await engine.client.drained()

    run(main())


def test_an_interrupt_does_not_reach_the_worker() -> None:
    async def main() -> None:
        async with running_engine(engine_config(step_s=0.005)) as engine:
            only = request("r", 40)
            stream = engine.client.submit(only)
            first = await read_some(stream, 2)
            os.kill(engine.pid, signal.SIGINT)
            assert first + (await read(stream))[0] == expected(only)
            assert engine.client.state().restarts == 0

    run(main())


def test_slow_readers_merge_and_hold_nobody_up() -> None:
    async def main() -> None:
        async with running_engine(engine_config()) as engine:
            slow, quick = request("slow", 200), request("quick", 200, seed=1)
            slow_stream, quick_stream = engine.client.submit(slow), engine.client.submit(quick)
            assert await read(quick_stream) == {0: expected(quick)}
            await engine.client.drained()
            outputs = [outputs async for outputs in slow_stream]
            assert len(outputs) == 1 and outputs[0][0].token_ids == expected(slow)

    run(main())


@pytest.mark.slow
def test_an_idle_worker_uses_no_cpu() -> None:
    async def main() -> None:
        async with running_engine(engine_config()) as engine:
            await read(engine.client.submit(request("r", 5)))
            await until(lambda: engine.client.state().stats.running == 0)
            worker = psutil.Process(engine.pid)
            before, own = worker.cpu_times(), psutil.Process().cpu_times()
            await asyncio.sleep(5)
            after, own_after = worker.cpu_times(), psutil.Process().cpu_times()
            assert (after.user + after.system) - (before.user + before.system) < 0.1
            assert (own_after.user + own_after.system) - (own.user + own.system) < 0.15

    run(main())
