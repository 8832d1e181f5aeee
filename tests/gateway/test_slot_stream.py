"""One slot and one event: order, merging, ends and errors of an output stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace.errors import InternalFault, QueueFull
from headrace.gateway.streams import SlotStream
from headrace.request import FinishReason, SequenceOutput, TokenLogprobs


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def tokens(*ids: int, index: int = 0, finish: FinishReason | None = None, **more: Any) -> SequenceOutput:
    return SequenceOutput(request_id="r", index=index, token_ids=list(ids), finish_reason=finish, **more)


def test_outputs_of_a_slow_reader_merge_per_sequence() -> None:
    async def main() -> None:
        stream = SlotStream("r")
        stream.put(tokens(), 0.5)
        stream.put(tokens(1, cached_tokens=7, logprobs=[TokenLogprobs(-1.0, [])]), 1.0)
        stream.put(tokens(10, index=1), 1.0)
        stream.put(tokens(2, logprobs=[TokenLogprobs(-2.0, [])]), 1.5)
        stream.put(tokens(3, finish=FinishReason.STOP), 1.5)
        stream.put(tokens(11, index=1, finish=FinishReason.LENGTH), 1.5)
        stream.end()
        assert (stream.started_at, stream.first_token_at) == (0.5, 1.0)
        first, second = await anext(stream)
        assert (first.token_ids, first.finish_reason, first.cached_tokens) == ([1, 2, 3], FinishReason.STOP, 7)
        assert [entry.logprob for entry in first.logprobs] == [-1.0, -2.0]
        assert (second.index, second.token_ids, second.finish_reason) == (1, [10, 11], FinishReason.LENGTH)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    run(main())


def test_merging_does_not_change_what_was_put_or_taken() -> None:
    async def main() -> None:
        stream = SlotStream("r")
        put = tokens(1)
        stream.put(put, 0.0)
        taken = await anext(stream)
        stream.put(tokens(2), 1.5)
        stream.put(tokens(3), 1.5)
        assert put.token_ids == [1] and taken[0].token_ids == [1]
        assert (await anext(stream))[0].token_ids == [2, 3]

    run(main())


def test_a_cancelled_wait_loses_nothing() -> None:
    async def main() -> None:
        stream = SlotStream("r")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.put(tokens(1), 1.5)
        waiting.cancel()
        await asyncio.sleep(0)
        assert (await anext(stream))[0].token_ids == [1]

    run(main())


def test_wake_returns_an_empty_list_once() -> None:
    async def main() -> None:
        stream = SlotStream("r")
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.wake()
        assert await waiting == []
        stream.wake()
        assert await anext(stream) == []
        stream.put(tokens(1), 1.5)
        assert (await anext(stream))[0].token_ids == [1]

    run(main())


def test_an_error_comes_behind_the_outputs() -> None:
    async def main() -> None:
        stream = SlotStream("r")
        stream.accept()
        await stream.accepted()
        stream.put(tokens(1), 1.5)
        stream.fail(InternalFault("gone"))
        assert (await anext(stream))[0].token_ids == [1]
        for _ in range(2):
            with pytest.raises(InternalFault):
                await anext(stream)

    run(main())


def test_a_refusal_is_raised_by_accepted_every_time() -> None:
    async def main() -> None:
        stream = SlotStream("r")
        waiting = asyncio.ensure_future(stream.accepted())
        await asyncio.sleep(0)
        stream.fail(QueueFull("full", retry_after_s=3.0))
        for wait in (waiting, stream.accepted()):
            with pytest.raises(QueueFull):
                await wait

    run(main())


def test_an_aborted_stream_forgets_what_was_not_read() -> None:
    async def main() -> None:
        stream = SlotStream("r")
        stream.put(tokens(1), 1.5)
        stream.discard()
        assert [outputs async for outputs in stream] == []

    run(main())
