"""One pipeline for all APIs, streamed or not: validated request in, events out.

    GenerationRequest ── one EngineRequest per prompt ──► engine
    events ◄── SequenceText (one per sequence) ◄── PromptRun (one per prompt) ◄── OutputStream

There is no task per token, and none per request unless it has several prompts: a run reads its stream in the
handler's own task. Leaving the ``async with`` block, for whatever reason, aborts what is still running.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec

from headrace.errors import InvalidRequest
from headrace.gateway.events import Event, Usage
from headrace.gateway.prompt_run import PHASES, Phase, PipelineLimits, PromptRun, RunServices
from headrace.gateway.run_record import RunTracing
from headrace.gateway.sequence_text import TextOptions
from headrace.gateway.service import EngineClient, EngineState, RequestMetrics
from headrace.params import SamplingParams
from headrace.request import EngineRequest
from headrace.text.tokenizer import Tokenizer

ACCEPTANCE_WAIT_S = 2.0
"""A streaming answer begins after this long even when the worker has not said yes (it may be restarting)."""
BUSY_ACCEPTANCE_WAIT_S = 15.0
"""The same while a worker steps: it answers between two steps, however long one takes on a busy machine."""


class Prompt(msgspec.Struct, frozen=True):
    """One prompt with its resolved parameters (the room for output depends on the prompt's length)."""

    token_ids: list[int]
    params: SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: what every API dialect is turned into.

    Sequence indices count through all prompts: prompt ``p`` has ``p * n`` … ``p * n + n - 1``.

    Attributes:
        id: unique; what the client can cancel.
        prompts: at least one.
        n: sequences per prompt.
        text: how tokens become text.
        priority, key, cache_salt: as in ``EngineRequest``.
        received_at: ``time.monotonic()`` when the HTTP request came.
    """

    id: str
    prompts: tuple[Prompt, ...]
    n: int = 1
    text: TextOptions = TextOptions()
    priority: int = 0
    key: str = ""
    cache_salt: str = ""
    received_at: float


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What may be shown of a request in flight: counts and times, nothing of what it says.

    Attributes:
        phase: of the prompt that is furthest.
        prompt_tokens, cached_tokens, output_tokens: of all prompts and sequences.
        max_output_tokens: ``output_tokens`` at most.
        sequences: of all prompts.
        age_s: since it was received.
    """

    id: str
    phase: Phase
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_output_tokens: int
    sequences: int
    age_s: float


class Pipeline:
    """Runs requests on one engine and knows those in flight.

    Args:
        isolate_keys: API keys share no prefixes with each other.
        tracing: told of every run that ended; None: tracing is off.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        metrics: RequestMetrics,
        limits: PipelineLimits,
        *,
        isolate_keys: bool = False,
        tracing: RunTracing | None = None,
    ) -> None:
        self._shared = RunServices(engine, tokenizer, metrics, limits, tracing)
        self._isolate_keys = isolate_keys
        self._running: dict[str, Generation] = {}

    @property
    def num_running(self) -> int:
        return len(self._running)

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """Submit all prompts and wait until the engine has taken them in.

        Raises the ``RequestError`` of the first that is refused; the others are then aborted.
        """
        _refuse_foreign_tokens(request, self._shared.engine.state())
        runs: list[PromptRun] = []
        try:
            salt = key_salt(request.key, request.cache_salt) if self._isolate_keys else request.cache_salt
            for engine_request in _engine_requests(request, salt):
                first_index = len(runs) * request.n
                runs.append(
                    PromptRun(engine_request, first_index, request.text, request.received_at, self._shared)
                )
            await _all_accepted(runs, self._shared.engine)
            generation = Generation(request.id, runs, self._shared.engine)
            self._running[request.id] = generation
            yield generation
        finally:
            self._running.pop(request.id, None)
            for run in runs:
                run.close()

    def cancel(self, request_id: str, key: str) -> bool:
        """End a request of this key: its client gets what there is, with reason "abort". False: unknown."""
        generation = self._running.get(request_id)
        if generation is None or generation.key != key:
            return False
        generation.cancel()
        return True

    def open_requests(self, key: str) -> list[OpenRequest]:
        """Those that ``cancel`` would find with this key, oldest first."""
        return [generation.shown() for generation in self._running.values() if generation.key == key]


class Generation:
    """A request that the engine has taken in. ``events`` may be iterated once."""

    def __init__(self, request_id: str, runs: list[PromptRun], engine: EngineClient) -> None:
        self._id = request_id
        self._runs = runs
        self._engine = engine
        self.key = runs[0].request.key

    def cancel(self) -> None:
        for run in self._runs:
            self._engine.abort(run.request.id)

    def shown(self) -> OpenRequest:
        runs = self._runs
        return OpenRequest(
            id=self._id,
            phase=max((run.phase for run in runs), key=PHASES.index),
            prompt_tokens=sum(len(run.request.prompt_token_ids) for run in runs),
            cached_tokens=sum(run.cached_tokens for run in runs),
            output_tokens=sum(run.completion_tokens for run in runs),
            max_output_tokens=sum(run.request.n * run.request.params.max_tokens for run in runs),
            sequences=sum(run.request.n for run in runs),
            age_s=max(run.age_s for run in runs),
        )

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """All events, a ``Usage`` last; raises the ``RequestError`` that ends the request early."""
        batches = self._runs[0].batches() if len(self._runs) == 1 else _merged(self._runs)
        async with aclosing(batches):
            async for batch in batches:
                yield batch
        yield [
            Usage(
                prompt_tokens=sum(len(run.request.prompt_token_ids) for run in self._runs),
                completion_tokens=sum(run.completion_tokens for run in self._runs),
                cached_tokens=sum(run.cached_tokens for run in self._runs),
                reasoning_tokens=sum(run.reasoning_tokens for run in self._runs),
            )
        ]


def key_salt(key: str, cache_salt: str) -> str:
    """A salt of its own for every pair; the length keeps a key's name and the client's salt apart."""
    return f"{len(key)}:{key}:{cache_salt}"


def _refuse_foreign_tokens(request: GenerationRequest, state: EngineState) -> None:
    """A tokenizer may know more tokens than the model has embeddings; what such a token means is undefined."""
    if state.ready is None:
        return
    thinking = request.text.thinking
    highest = max(
        *(max(prompt.token_ids, default=0) for prompt in request.prompts),
        max(thinking.ending, default=0) if thinking else 0,
    )
    if highest >= state.ready.vocab_size:
        raise InvalidRequest(
            f"the prompt's text has a token, id {highest}, that this model does not know: its vocabulary ends at"
            f" {state.ready.vocab_size - 1}, its tokenizer's does not; leave that token's text out"
        )


def _engine_requests(request: GenerationRequest, cache_salt: str) -> list[EngineRequest]:
    several = len(request.prompts) > 1
    return [
        EngineRequest(
            id=f"{request.id}-{position}" if several else request.id,
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            n=request.n,
            priority=request.priority,
            key=request.key,
            cache_salt=cache_salt,
        )
        for position, prompt in enumerate(request.prompts)
    ]


async def _all_accepted(runs: list[PromptRun], engine: EngineClient) -> None:
    began = time.monotonic()
    while True:
        try:
            async with asyncio.timeout(ACCEPTANCE_WAIT_S):
                for run in runs:
                    await run.accepted()
            return
        except TimeoutError:
            if (
                engine.state().status not in ("ready", "silent")
                or time.monotonic() - began > BUSY_ACCEPTANCE_WAIT_S
            ):
                return


async def _merged(runs: list[PromptRun]) -> AsyncGenerator[list[Event], None]:
    """Batches of several runs as they come. One task per run; each waits until its last batch is taken."""
    queue: asyncio.Queue[list[Event] | BaseException | None] = asyncio.Queue(maxsize=1)

    async def read(run: PromptRun) -> None:
        try:
            async with aclosing(run.batches()) as batches:
                async for batch in batches:
                    await queue.put(batch)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(read(run)) for run in runs]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if item is None:
                unfinished -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
