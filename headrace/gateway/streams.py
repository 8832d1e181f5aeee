"""One request's outputs on their way to its reader: one slot and one event.

The dispatcher puts, the reader takes. What arrives while the reader is busy merges in the slot, per sequence, so
a reader that is slow or gone costs no more than the tokens themselves, and a dispatcher never waits. No task,
no queue, no lock: everything runs on the gateway's event loop.
"""

from __future__ import annotations

import asyncio

from headrace.errors import RequestError
from headrace.gateway.service import Interruption
from headrace.request import FinishReason, SequenceOutput, TokenLogprobs


class _Merged:
    """Outputs of one sequence since the reader last looked."""

    __slots__ = (
        "cached_tokens", "error", "finish_reason", "hidden", "logprobs", "prompt_logprobs", "refused", "single",
        "timeline", "token_ids",
    )  # fmt: skip

    def __init__(self, output: SequenceOutput) -> None:
        self.single: SequenceOutput | None = output
        self.token_ids = list(output.token_ids)
        self.logprobs: list[TokenLogprobs] = list(output.logprobs)
        self.finish_reason: FinishReason | None = output.finish_reason
        self.cached_tokens = output.cached_tokens
        self.prompt_logprobs = output.prompt_logprobs
        self.error = output.error
        self.refused = output.refused
        self.hidden = output.hidden
        self.timeline = output.timeline

    def add(self, output: SequenceOutput) -> None:
        self.single = None
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason or self.finish_reason
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        self.error = output.error or self.error
        self.refused = output.refused or self.refused
        self.hidden = output.hidden or self.hidden
        self.timeline = output.timeline or self.timeline
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs

    def output(self, request_id: str, index: int) -> SequenceOutput:
        return self.single or SequenceOutput(
            request_id=request_id,
            index=index,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=self.prompt_logprobs,
            error=self.error,
            refused=self.refused,
            hidden=self.hidden,
            timeline=self.timeline,
        )


class SlotStream:
    """Implements ``headrace.gateway.service.OutputStream``."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._slot: dict[int, _Merged] = {}
        self._changed = asyncio.Event()
        self._answered = asyncio.Event()
        self._woken = False
        self._ended = False
        self._error: RequestError | None = None
        self.interruptions: list[Interruption] = []
        self.started_at: float | None = None
        self.first_token_at: float | None = None

    # -- the dispatcher's side

    def put(self, output: SequenceOutput, at: float) -> None:
        """``at``: when the worker had it."""
        if self.first_token_at is None:
            if self.started_at is None:
                self.started_at = at
            if output.token_ids or output.hidden:
                self.first_token_at = at
        merged = self._slot.get(output.index)
        if merged is None:
            self._slot[output.index] = _Merged(output)
        else:
            merged.add(output)
        self._changed.set()

    def accept(self) -> None:
        self._answered.set()

    @property
    def is_accepted(self) -> bool:
        return self._answered.is_set()

    def end(self) -> None:
        """No output will follow; what is in the slot is still read."""
        self._ended = True
        self._answered.set()
        self._changed.set()

    def fail(self, error: RequestError) -> None:
        """As ``end``, but the reader then gets ``error``."""
        self._error = error
        self.end()

    def discard(self) -> None:
        """End and forget what was not read (the reader asked for it by aborting)."""
        self._slot.clear()
        self.end()

    # -- the reader's side

    async def accepted(self) -> None:
        await self._answered.wait()
        if self._error is not None and not self._slot:
            raise self._error

    def wake(self) -> None:
        self._woken = True
        self._changed.set()

    def __aiter__(self) -> SlotStream:
        return self

    async def __anext__(self) -> list[SequenceOutput]:
        while not (self._slot or self._woken or self._ended):
            self._changed.clear()
            await self._changed.wait()
        if self._slot or self._woken:
            self._woken = False
            taken, self._slot = self._slot, {}
            return [merged.output(self._request_id, index) for index, merged in taken.items()]
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration
