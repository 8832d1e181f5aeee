"""From a cell to the requests that are sent: prompts of its kind, as bodies of the chosen route."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.bench.cells import Cell
from headrace.bench.load import Conversation, LoadRequest, Work
from headrace.bench.prompts import Draft, Fitted, Message, PromptSet, draft, estimated_tokens, fit, follow_up
from headrace.bench.server import BenchFault, TokenCounter
from headrace.bench.workload_file import Entry

ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Shape:
    """What all bodies have in common; ``route`` is a key of ROUTES."""

    model: str
    route: str = "chat"
    temperature: float = 0.0
    ignore_eos: bool = False

    def request(self, messages: Sequence[Mapping[str, object]], max_tokens: int) -> LoadRequest:
        body: dict[str, object] = {"model": self.model, "max_tokens": max_tokens, "temperature": self.temperature}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.route == "chat":
            body["messages"] = list(messages)
        else:
            body["prompt"] = as_text(messages)
        return LoadRequest(ROUTES[self.route], body)


def as_text(messages: Sequence[Mapping[str, object]]) -> str:
    return "\n\n".join(str(message["content"]) for message in messages)


@dataclass(frozen=True, slots=True)
class Composed:
    """Requests of one run.

    Attributes:
        tokens: length that was wished for each first prompt, the shared prefix included; None: a workload's own.
        exact: whether the server's tokenizer confirmed it for every one; None where nothing was wished.
    """

    work: list[Work]
    tokens: int | None
    exact: bool | None


@dataclass
class Composer:
    """Makes requests. ``counter``: None where the server cannot count; lengths are estimates then."""

    shape: Shape
    seed: int
    counter: TokenCounter | None = None
    shared_prefix_tokens: int = 0
    turns: int = 1
    workload: Sequence[Entry] = ()
    _guesses: dict[tuple[str, int], int] = field(default_factory=dict)
    _prefix: str | None = None

    async def compose(self, cell: Cell, repetition: int, count: int) -> Composed:
        """``count`` requests (conversations). Raises BenchFault: the server stopped answering."""
        seed = f"{self.seed}:{cell}:{repetition}"
        if self.workload:
            return Composed(self._from_file(cell, seed, count), None, None)
        kind = PromptSet.of(cell.prompts)
        prefix = await self._shared_prefix()
        target = kind.tokens + self.shared_prefix_tokens
        work: list[Work] = []
        exact = self.counter is not None
        for index in range(count):
            fitted = await self._fit(kind.name, draft(kind, prefix, f"{seed}:{index}"), target)
            exact = exact and fitted.tokens == target
            turns = [fitted.messages] + [
                [{"role": "user", "content": follow_up(f"{seed}:{index}:{turn}")}] for turn in range(1, self.turns)
            ]
            work.append(self._work(turns, cell.output_tokens))
        return Composed(work, target, exact)

    def _work(self, turns: Sequence[Sequence[Mapping[str, object]]], max_tokens: int) -> Work:
        requests = [self.shape.request(messages, max_tokens) for messages in turns]
        return requests[0] if len(requests) == 1 else Conversation(tuple(requests))

    def _from_file(self, cell: Cell, seed: str, count: int) -> list[Work]:
        """Entries in an order of the seed's; from the beginning again when there are fewer than requests."""
        order = random.Random(seed).sample(range(len(self.workload)), len(self.workload))
        entries = [self.workload[order[index % len(order)]] for index in range(count)]
        return [self._work(entry.turns, entry.max_tokens or cell.output_tokens) for entry in entries]

    async def _fit(self, name: str, source: Draft, target: int) -> Fitted:
        guess = self._guesses.get((name, target))
        fitted = await fit(source, target, self._count, guess)
        self._guesses[name, target] = fitted.num_words
        return fitted

    async def _count(self, messages: list[Message]) -> int:
        if self.counter is None:
            return estimated_tokens(messages)
        if self.shape.route == "chat":
            counted = await self.counter.of_messages(messages)
        else:
            counted = await self.counter.of_prompt(as_text(messages))
        if counted is None:
            raise BenchFault("the server's /tokenize stopped answering")
        return counted

    async def _shared_prefix(self) -> str:
        """A text of ``shared_prefix_tokens`` tokens, the same for every request of these seeds."""
        if self._prefix is None:
            source = draft(PromptSet.of(str(max(1, self.shared_prefix_tokens))), "", f"{self.seed}:prefix")
            fitted = (
                await fit(source, self.shared_prefix_tokens, self._count_text)
                if self.shared_prefix_tokens
                else None
            )
            self._prefix = as_text(fitted.messages) if fitted else ""
        return self._prefix

    async def _count_text(self, messages: list[Message]) -> int:
        counted = await self.counter.of_text(as_text(messages)) if self.counter else None
        return estimated_tokens(messages) if counted is None else counted
