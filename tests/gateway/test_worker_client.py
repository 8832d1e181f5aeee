"""The client against scripted workers: what is sent to whom and when, and what the reader sees."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.errors import InternalFault, NotReady, QueueFull
from headrace.gateway.journal import PROBATION_TOKENS
from headrace.gateway.worker_client import WorkerClient
from headrace.gateway.worker_process import WorkerDeath
from headrace.params import SamplingParams
from headrace.request import EngineRequest, FinishReason, SequenceOutput
from headrace.worker.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    EngineStats,
    Heartbeat,
    Ready,
    Rejected,
    StepOutputs,
    ToWorker,
)

READY = Ready(
    pid=1, device="cpu", max_model_len=100, block_size=16, num_blocks=10, vocab_size=10, attention="a", plan={}
)


class Link:
    def __init__(self) -> None:
        self.sent: list[ToWorker] = []

    def send(self, message: ToWorker) -> None:
        self.sent.append(message)

    def take(self) -> list[EngineRequest]:
        """Requests that were sent since the last look."""
        taken = [message.request for message in self.sent if isinstance(message, AddRequest)]
        self.sent.clear()
        return taken


def request(name: str, n: int = 1) -> EngineRequest:
    return EngineRequest(id=name, prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=50), n=n)


def say(client: WorkerClient, name: str, *tokens: int, finish: FinishReason | None = None) -> None:
    output = SequenceOutput(request_id=name, token_ids=list(tokens), finish_reason=finish)
    client.worker_message(StepOutputs([output], EngineStats(running=1), 1.0))


def fault(*in_step: str) -> WorkerDeath:
    return WorkerDeath("fault", True, False, frozenset(in_step))


def started(client: WorkerClient) -> Link:
    link = Link()
    client.worker_ready(link, READY)
    return link


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_suspects_run_alone_one_after_the_other_and_first() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        link = started(client)
        streams = {name: client.submit(request(name)) for name in "abc"}
        assert [r.id for r in link.take()] == ["a", "b", "c"]
        client.worker_died(fault("a", "b"))
        link = started(client)
        assert [r.id for r in link.take()] == ["a", "b", "c"]
        say(client, "a", 7)
        client.worker_died(fault("a", "b"))
        link = started(client)
        (alone,) = link.take()
        assert alone.id == "b"
        client.submit(request("new"))
        say(client, "b", *range(PROBATION_TOKENS - 1))
        assert link.take() == []
        say(client, "b", 9)
        (second,) = link.take()
        assert second.id == "a" and second.emitted == {0: [7]}
        say(client, "a", 8, finish=FinishReason.STOP)
        assert [r.id for r in link.take()] == ["c", "new"]
        assert [o.token_ids for outputs in [x async for x in streams["a"]] for o in outputs] == [[7, 8]]

    run(main())


def test_who_dies_alone_twice_gets_an_error_and_the_rest_goes_on() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        link = started(client)
        bad, good = client.submit(request("bad")), client.submit(request("good"))
        client.worker_died(fault("bad"))
        link = started(client)
        client.worker_died(fault("bad"))
        link = started(client)
        with pytest.raises(InternalFault):
            await anext(bad)
        assert [r.id for r in link.take()] == ["good"]
        say(client, "good", 1)
        assert (await anext(good))[0].token_ids == [1]

    run(main())


def test_outside_deaths_and_unknown_steps() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        started(client)
        client.submit(request("a"))
        for _ in range(5):
            client.worker_died(WorkerDeath("SIGKILL", False, False, frozenset("a")))
            started(client)
        assert client.state().status == "ready" and client.state().restarts == 5
        for _ in range(2):  # no step record: everybody in the worker is a suspect
            client.worker_died(WorkerDeath("fault", True, False, None))
            link = started(client)
        assert link.take() == [] and client.held == 0

    run(main())


def test_a_replay_that_meets_a_full_queue_is_sent_again_not_failed() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        started(client)
        stream = client.submit(request("old"))
        client.worker_message(Accepted("old"))
        say(client, "old", 1)
        client.worker_died(WorkerDeath("SIGKILL", False, False, None))
        link = started(client)
        link.take()
        full = Rejected(request_id="old", status=429, code="queue_full", message="full", retry_after_s=2.0)
        client.worker_message(full)
        async with asyncio.timeout(5):
            while not (again := link.take()):
                await asyncio.sleep(0.01)
        assert again[0].emitted == {0: [1]}
        client.submit(request("new"))
        client.worker_message(Rejected(request_id="new", status=429, code="queue_full", message="full"))
        assert (await anext(stream))[0].token_ids == [1]

    run(main())


def test_a_refused_newcomer_gets_the_workers_words() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        started(client)
        stream = client.submit(request("r"))
        client.worker_message(
            Rejected(request_id="r", status=429, code="queue_full", message="64 wait", retry_after_s=3.0)
        )
        with pytest.raises(QueueFull, match="64 wait") as caught:
            await stream.accepted()
        assert caught.value.retry_after_s == 3.0
        await client.drained()

    run(main())


def test_aborts_reach_the_worker_only_for_what_it_has() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        link = started(client)
        stream = client.submit(request("a", n=2))
        client.abort("a", 1)
        assert link.sent[-1] == AbortRequest("a", 1)
        say(client, "a", 1, finish=FinishReason.STOP)
        assert [o.token_ids for outputs in [x async for x in stream] for o in outputs] == [[1]]
        client.worker_died(WorkerDeath("SIGKILL", False, False, None))
        client.submit(request("b"))
        client.abort("b")
        link = started(client)
        assert link.sent == []
        await client.drained()

    run(main())


def test_draining_and_failing() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        link = started(client)
        stream = client.submit(request("a"))
        client.start_draining("bye")
        with pytest.raises(NotReady):
            client.submit(request("b"))
        client.worker_died(WorkerDeath("SIGKILL", False, False, None))
        assert client.state().status == "draining"
        link = started(client)
        assert [r.id for r in link.take()] == ["a"] and client.state().status == "draining"
        client.fail_all(NotReady("too late"))
        assert link.sent == [AbortRequest("a")]
        with pytest.raises(NotReady, match="too late"):
            await anext(stream)
        await client.drained()

    run(main())


def test_a_step_is_told_once_and_signs_of_life_are_none() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        told: list[int] = []
        client.on_step = lambda stats, now: told.append(stats.steps_total)
        for _ in range(2):  # a worker and its successor
            started(client)
            for steps in (0, 1, 1, 1, 2):
                client.worker_message(StepOutputs([], EngineStats(steps_total=steps), 1.0))
        assert told == [1, 2, 1, 2]

    run(main())


def test_totals_go_on_over_restarts_and_gauges_do_not() -> None:
    async def main() -> None:
        client = WorkerClient(max_held=10)
        started(client)
        client.worker_message(
            Heartbeat(EngineStats(running=5, steps_total=10, blocks_total=7, preemptions_total=1))
        )
        client.worker_died(WorkerDeath("SIGKILL", False, False, None))
        assert client.state().stats == EngineStats()
        started(client)
        client.worker_message(Heartbeat(EngineStats(running=2, steps_total=3, blocks_total=7)))
        totals = client.lifetime_stats()
        assert (totals.steps_total, totals.preemptions_total, totals.running, totals.blocks_total) == (13, 1, 2, 7)

    run(main())
