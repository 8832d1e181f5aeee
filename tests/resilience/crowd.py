"""A crowd of different requests, and whether all of them got what they get when nothing happens.

Every kind that the API has in one crowd: streamed and in one piece, chat and text, several choices, logprobs,
penalties, seeds, long prompts. The scripted model's greedy text is known; everything else is compared with an
undisturbed run of the same request.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from support.client import Answer, Client, chat_body, completion_body
from support.scripted import expected_text

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Asked:
    path: str
    body: dict[str, Any]
    known: str | None = None

    @property
    def n(self) -> int:
        return int(self.body.get("n", 1))


def crowd(model: str, scale: int = 1) -> list[Asked]:
    """``scale``: multiplies the lengths of the answers."""
    long = 220 * scale
    filler = [f"{i:02d}" + "filler " * (150 + 90 * i) for i in range(3)]
    known = expected_text("s01", long)
    return [
        Asked(CHAT, chat_body(model, "a<|s01|>", max_tokens=long, **STREAM), known),
        Asked(CHAT, chat_body(model, "b<|s01|>", max_tokens=long), known),
        Asked(CHAT, chat_body(model, "c<|s02|>", max_tokens=long, **STREAM), expected_text("s02")),
        Asked(
            CHAT,
            chat_body(model, "d<|s01|>", max_tokens=long // 2, n=3, **STREAM),
            expected_text("s01", long // 2),
        ),
        Asked(CHAT, chat_body(model, "e<|s01|>", max_tokens=long, logprobs=True, top_logprobs=3, **STREAM), known),
        Asked(CHAT, chat_body(model, "f<|s01|>", max_tokens=long, logprobs=True, top_logprobs=2), known),
        Asked(CHAT, chat_body(model, "g<|s01|>", max_tokens=long, seed=5, temperature=1.3, **STREAM)),
        Asked(CHAT, chat_body(model, "h<|s01|>", max_tokens=long, seed=6, temperature=2.0, top_p=0.9, n=2)),
        Asked(CHAT, chat_body(model, "i<|s01|>", max_tokens=long, seed=7, temperature=1.9, **STREAM)),
        Asked(
            CHAT,
            chat_body(model, "j<|s01|>", max_tokens=long, presence_penalty=1.5, frequency_penalty=0.7, **STREAM),
        ),
        Asked(CHAT, chat_body(model, "k<|s01|>", max_tokens=long, repetition_penalty=1.4)),
        Asked(TEXT, completion_body(model, "l<|s01|><|assistant|>", max_tokens=long, n=2, **STREAM), known),
        Asked(TEXT, completion_body(model, "m<|s05|><|assistant|>", logprobs=2), "ABCDEFGH"),
        *(Asked(CHAT, chat_body(model, text + "<|s01|>", max_tokens=long, **STREAM), known) for text in filler),
    ]


def send(client: Client, asked: Asked) -> Answer:
    return client.send(asked.path, asked.body)


class Run:
    """The crowd on its way; ``answers`` waits for all."""

    def __init__(self, client: Client, requests: list[Asked]) -> None:
        self._pool = ThreadPoolExecutor(len(requests))
        self._futures: list[Future[Answer]] = [self._pool.submit(send, client, asked) for asked in requests]

    @property
    def num_open(self) -> int:
        return sum(not future.done() for future in self._futures)

    def answers(self) -> list[Answer]:
        with self._pool:
            return [future.result() for future in self._futures]


def check(asked: Asked, got: Answer, undisturbed: Answer) -> None:
    """Nothing lost, nothing twice, nothing else."""
    for index in range(asked.n):
        assert got.text(index) == undisturbed.text(index), asked.body
        if asked.known is not None:
            assert got.text(index) == asked.known, asked.body
        assert got.finish_reason(index) == undisturbed.finish_reason(index)
        ours, theirs = logprobs(asked, got, index), logprobs(asked, undisturbed, index)
        assert ours == pytest.approx(theirs, abs=0.01)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got.usage[name] == undisturbed.usage[name], (name, asked.body)
    assert got.done == bool(asked.body.get("stream"))


def logprobs(asked: Asked, answer: Answer, index: int) -> list[float]:
    parts = [choice["logprobs"] for choice in answer.choices(index) if choice.get("logprobs")]
    if asked.path == CHAT:
        return [entry["logprob"] for part in parts for entry in part["content"]]
    return [value for part in parts for value in part["token_logprobs"]]
