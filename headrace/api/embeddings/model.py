"""A model that serves embeddings, and how inputs become its hidden states.

    texts ─► token ids, each within the limit ─► requests for hidden states, a window at a time ─► bytes in order

Each input is a request of its own to the engine, which batches it with whatever else runs there. A window keeps
one large body from filling the queue; a full queue refuses the first window and only delays the later ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from headrace.api.arrival import Arrival
from headrace.api.limits import ModelLimits, model_limits
from headrace.checkpoint.pooling import PoolingFacts
from headrace.errors import ContextLengthExceeded, InvalidRequest, NotReady, QueueFull, RequestCancelled
from headrace.gateway.events import Embedded, Event, SequenceFinished, Usage
from headrace.gateway.pipeline import GenerationRequest, Pipeline, Prompt
from headrace.gateway.sequence_text import TextOptions
from headrace.gateway.service import EngineClient
from headrace.params import SamplingParams
from headrace.request import FinishReason
from headrace.text.model_text import ModelText

MAX_WINDOW = 16
RETRY_S = 0.5
_EMBED = SamplingParams(max_tokens=1, temperature=0.0, embed=True)


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model that takes whole texts and answers with numbers.

    Attributes:
        max_length: tokens of an input at most, by flag; None: what the engine takes.
        truncates: longer inputs lose their end; else they are refused.
        window: inputs of one body in the engine at once, at most.
    """

    engine: EngineClient
    text: ModelText
    pipeline: Pipeline
    facts: PoolingFacts
    max_length: int | None
    truncates: bool
    window: int

    def limits(self) -> ModelLimits:
        """``NotReady`` until the worker has told them; ``max_model_len`` is the longest input."""
        limits = model_limits(self.engine.state(), self.text.tokenizer.vocab_size)
        room = limits.max_model_len - 1  # one position is the sampled token's
        return ModelLimits(room if self.max_length is None else min(room, self.max_length), limits.vocab_size)

    def encode(self, text: str, where: str, param: str) -> list[int]:
        """Tokens of one text with what the tokenizer puts around it, within the limit."""
        if not text:
            raise InvalidRequest(f"{where} is empty; at least one token is needed", param=param)
        closing = self.text.tokenizer.closing_ids
        ids = self.text.tokenizer.encode(text, parse_special=True, param=param)
        return self.fitted(ids, where, param, closing)

    def fitted(self, ids: list[int], where: str, param: str, closing: Sequence[int] = ()) -> list[int]:
        """``ids`` and ``closing``; cut where that is too long and the server cuts. ContextLengthExceeded else."""
        if not ids:
            raise InvalidRequest(f"{where} has no tokens; at least one is needed", param=param)
        limit, count = self.limits().max_model_len, len(ids) + len(closing)
        if count > limit and not self.truncates:
            raise ContextLengthExceeded(
                f"{where} has {count} tokens; this model takes at most {limit} (the server cuts longer inputs only"
                " when it is started with --embedding-overflow-policy truncate)",
                param=param,
            )
        return [*ids[: max(1, limit - len(closing))], *closing]


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks: for ids, fairness, clocks; ``accepted`` is called when the engine has taken the first inputs."""

    arrival: Arrival
    prefix: str
    priority: int
    accepted: Callable[[], None]


async def hidden_states(model: TextModel, inputs: Sequence[list[int]], asked: Asked) -> tuple[list[bytes], int]:
    """The state of each input's last token, in order, and the number of all their tokens."""
    found: list[bytes] = [b""] * len(inputs)
    used = 0
    prompts = [Prompt(ids, _EMBED) for ids in inputs]
    async for first, batch in windows(model, prompts, asked):
        for event in batch:
            if isinstance(event, Embedded):
                found[first + event.index] = event.hidden
            elif isinstance(event, Usage):
                used += event.prompt_tokens
    missing = sum(not hidden for hidden in found)
    if missing:  # the server ends
        raise NotReady(f"{missing} of {len(inputs)} inputs were not computed; try again")
    return found, used


async def windows(
    model: TextModel, prompts: Sequence[Prompt], asked: Asked, text: TextOptions | None = None
) -> AsyncGenerator[tuple[int, list[Event]], None]:
    """(index of the window's first prompt, events of the window) for one window after the other.

    Closed or cancelled, it drops what the engine has of it. Raises RequestCancelled when a window was cancelled by
    its id: the whole body is given up then.
    """
    for first in range(0, len(prompts), model.window):
        request = GenerationRequest(
            id=f"{asked.prefix}{asked.arrival.id}-{first}",
            prompts=tuple(prompts[first : first + model.window]),
            text=text or TextOptions(),
            priority=asked.priority,
            key=asked.arrival.key,
            received_at=asked.arrival.received_at,
        )
        async with aclosing(_patient(model, request, asked, is_first=first == 0)) as batches:
            async for batch in batches:
                if any(
                    isinstance(event, SequenceFinished) and event.reason is FinishReason.ABORT for event in batch
                ):
                    raise RequestCancelled("the request was cancelled by its id")
                yield first, batch


async def _patient(
    model: TextModel, request: GenerationRequest, asked: Asked, *, is_first: bool
) -> AsyncGenerator[list[Event], None]:
    """Events of one window; one that is not the first waits while the queue is full."""
    while True:
        try:
            async with model.pipeline.generate(request) as running:
                asked.accepted()
                async with aclosing(running.events()) as batches:
                    async for batch in batches:
                        yield batch
            return
        except QueueFull:
            if is_first:
                raise
        await asyncio.sleep(RETRY_S)
