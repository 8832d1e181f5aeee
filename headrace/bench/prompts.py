"""Prompts of a wished length, each unlike any other from its first words on.

A prompt is a head that names it (so that no two share a prefix by chance), a task, and as many words of filler as
its length takes. Everything is drawn from generators seeded by (seed, cell, repetition, index): the same seed
gives the same prompts, another one shares nothing with them.

Lengths are those of the whole prompt as the server counts it, chat template included: where the server has
``/tokenize`` the filler is fitted until the count is exact, elsewhere it is an estimate and marked as one.

    count │        ┌ target
    words ├──guess─┤ too long → fewer words … the most words that still fit, then single-token fillers
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import count as count_up
from itertools import islice

from headrace.bench.texts import FOLLOW_UPS, NOTES, PUZZLES, QUESTIONS, TASKS, WORDS

# Stated lengths of the built-in sets, tokens of the whole prompt.
BUILT_IN = {"short": 64, "medium": 512, "long": 2048, "thinking": 256}

# Used where the server cannot be asked: tokens per character and of a chat template around a message.
TOKENS_PER_CHARACTER = 0.22
TEMPLATE_TOKENS = 12
_TOKENS_PER_WORD = 1.3
_FILLER = " a"
_LINEAR_TRIES = 8
_CLOSE = 6  # so few missing tokens are filled up at once

Message = dict[str, str]
Count = Callable[[list[Message]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """A kind of prompt.

    Attributes:
        name: "short", "medium", "long", "thinking", or the number of tokens.
        tokens: length of the whole prompt, the shared prefix excluded.
    """

    name: str
    tokens: int

    @classmethod
    def of(cls, name: str) -> PromptSet:
        """Raises ValueError: neither a built-in set nor a number of tokens."""
        if name in BUILT_IN:
            return cls(name, BUILT_IN[name])
        if not name.isdecimal() or int(name) < 1:
            raise ValueError(f"{name!r} is neither of {', '.join(BUILT_IN)} nor a number of tokens")
        return cls(name, int(name))


@dataclass(frozen=True, slots=True)
class Draft:
    """Everything of a prompt but its length; ``messages`` makes it with so many words and fillers."""

    prefix: str
    head: str
    words: tuple[str, ...]

    def messages(self, num_words: int, fillers: int = 0) -> list[Message]:
        body = " ".join(self.words[:num_words])
        text = self.head + ("\n\n" + body if body else "") + _FILLER * fillers
        system = [{"role": "system", "content": self.prefix}] if self.prefix else []
        return [*system, {"role": "user", "content": text}]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt, its length in tokens as counted, and the words it took (a good guess for the next one)."""

    messages: list[Message]
    tokens: int
    num_words: int


def draft(kind: PromptSet, prefix: str, seed: str) -> Draft:
    """A prompt of ``kind``; ``seed`` decides all of it but ``prefix``."""
    picker = random.Random(seed)
    name = " ".join((*picker.sample(WORDS, 2), f"{picker.getrandbits(24):06x}"))
    task = _task(kind.name, picker)
    enough = max(64, 2 * kind.tokens)
    return Draft(prefix, f"{name}: {task}", tuple(islice(_filler(kind.name, picker), enough)))


def _task(name: str, picker: random.Random) -> str:
    if name == "short":
        return picker.choice(QUESTIONS)
    if name == "thinking":
        return picker.choice(PUZZLES)
    return picker.choice(TASKS)


def _filler(name: str, picker: random.Random) -> Iterator[str]:
    """Words without end: notes in changing order for the built-in sets, single words for exact lengths."""
    while True:
        if name in BUILT_IN:
            for note in picker.sample(NOTES, len(NOTES)):
                yield from note.split()
        else:
            yield picker.choice(WORDS)


def follow_up(seed: str) -> str:
    """What a user says in a later turn."""
    picker = random.Random(seed)
    return f"{picker.choice(WORDS).capitalize()}. {picker.choice(FOLLOW_UPS)}"


def estimated_tokens(messages: list[Message]) -> int:
    """By length alone."""
    return sum(TEMPLATE_TOKENS + round(TOKENS_PER_CHARACTER * len(message["content"])) for message in messages)


async def fit(source: Draft, target: int, count: Count, guess: int | None = None) -> Fitted:
    """``source`` in the size whose count is ``target``, or the nearest that could be found.

    A head that is too long by itself comes without any filler.
    """
    low, low_count, high, high_count = -1, 0, len(source.words) + 1, 0
    words = min(len(source.words), max(0, round(target / _TOKENS_PER_WORD) if guess is None else guess))
    for tries in count_up():
        counted = await count(source.messages(words))
        if counted == target or (counted > target and words == 0):
            return Fitted(source.messages(words), counted, words)
        if counted < target:
            low, low_count = words, counted
        else:
            high, high_count = words, counted
        if 0 < target - counted <= _CLOSE or high - low == 1:
            return await _fill(source, low, low_count, target, count)
        if low >= 0 and high_count:  # between two known sizes: a straight line, then halves
            share = (target - low_count) / (high_count - low_count) if tries < _LINEAR_TRIES else 0.5
            words = low + round(share * (high - low))
        else:
            step = round((target - counted) / max(_TOKENS_PER_WORD, counted / max(words, 1)))
            words += step or (1 if counted < target else -1)
        words = min(max(words, low + 1), high - 1)
    raise AssertionError("the interval shrinks with every try")


async def _fill(source: Draft, words: int, counted: int, target: int, count: Count) -> Fitted:
    """Fillers behind ``words`` words; each is one token in most vocabularies, which the count checks."""
    best = Fitted(source.messages(words), counted, words)
    fillers = target - counted
    for _ in range(4):
        tried = source.messages(words, fillers)
        counted = await count(tried)
        if abs(target - counted) < abs(target - best.tokens):
            best = Fitted(tried, counted, words)
        if counted == target or fillers + target - counted < 0:
            break
        fillers += target - counted
    return best
