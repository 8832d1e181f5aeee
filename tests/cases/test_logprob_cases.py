"""Logprobs: their shape in both dialects, their values whatever is cached or batched beside them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.client import Answer, at_once
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOLERANCE = 1e-3


@pytest.fixture
def demo(serve: Serve) -> Server:
    return serve("demo")


@pytest.mark.parametrize("k", [0, 3, 20])
@pytest.mark.parametrize("temperature", [0, 1])
def test_entries_of_the_chat_form(demo: Server, k: int, temperature: float) -> None:
    fields = {"logprobs": True, "top_logprobs": k, "max_tokens": 12, "temperature": temperature, "seed": 3}
    for answer in demo.client.both("Describe a river.", **fields):
        entries = answer.logprobs()
        assert "".join(entry["token"] for entry in entries) == answer.text()
        assert len(entries) == answer.usage["completion_tokens"] - (answer.finish_reason() == "stop")
        for entry in entries:
            check_entry(entry, k, greedy=temperature == 0)


def check_entry(entry: dict[str, Any], k: int, greedy: bool) -> None:
    top = entry["top_logprobs"]
    values = [other["logprob"] for other in top]
    assert math.isfinite(entry["logprob"]) and entry["logprob"] <= 0
    assert len(top) == k and all(math.isfinite(value) and value <= 0 for value in values)
    assert values == sorted(values, reverse=True)
    assert len({tuple(other["bytes"]) for other in top}) == k
    assert sum(math.exp(value) for value in values) <= 1.000001
    if greedy and k:
        assert (top[0]["token"], top[0]["logprob"]) == (entry["token"], entry["logprob"])


def test_no_logprobs_unless_asked(demo: Server) -> None:
    for fields in ({}, {"logprobs": False}):
        for answer in demo.client.both("Hi", max_tokens=3, **fields):
            assert all(choice.get("logprobs") is None for choice in answer.choices())


def values(answer: Answer) -> list[float]:
    return [entry["logprob"] for entry in answer.logprobs()]


def close(first: list[float], second: list[float]) -> bool:
    return len(first) == len(second) and all(
        math.isclose(a, b, abs_tol=TOLERANCE) for a, b in zip(first, second, strict=True)
    )


def test_asking_changes_nothing_and_company_changes_no_value(demo: Server) -> None:
    shared = "The mill stands by the river. " * 12
    prompts = [shared + ending for ending in ("Who owns it?", "How old is it?", "What does it grind?")]
    fields = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}

    def ask(prompt: str) -> Answer:
        return demo.client.chat(prompt, **fields)

    cold = ask(prompts[0])
    assert demo.client.chat(prompts[0], max_tokens=8).text() == cold.text()
    warm = ask(prompts[0])
    assert warm.cached_tokens > 0 and warm.text() == cold.text() and close(values(warm), values(cold))
    alone = [ask(prompt) for prompt in prompts]
    crowd = at_once(ask, [prompts[0], *prompts], 4)[1:]
    for one, other in zip(alone, crowd, strict=True):
        assert one.text() == other.text() and close(values(one), values(other))


def test_the_order_of_requests_changes_no_value(demo: Server) -> None:
    first, second = "A: the sea at night", "B: the sea at noon"
    fields = {"max_tokens": 6, "logprobs": True}
    seen: dict[str, list[list[float]]] = {first: [], second: []}
    for order in ((first, second), (second, first)):
        assert demo.client.http.request("DELETE", "/v1/cache").status_code == 200
        for prompt in order:
            seen[prompt].append(values(demo.client.chat(prompt, **fields)))
    assert all(close(*runs) for runs in seen.values())


def check_legacy(answer: Answer, k: int, prefix: str) -> None:
    text, logprobs = answer.text(), answer.choices()[0]["logprobs"]
    lists = [logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
    assert len({len(part) for part in lists}) == 1 and lists[0]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset:].startswith(token)
    scored = [entry for entry in logprobs["top_logprobs"] if entry is not None]
    assert all(len(entry) >= min(k, 1) for entry in scored)
    assert text.startswith(prefix)


def test_the_legacy_form(demo: Server, serve: Serve) -> None:
    answer = demo.client.complete("The sky is", logprobs=2, max_tokens=4)
    check_legacy(answer, 2, "")
    assert all(value <= 0 for value in answer.choices()[0]["logprobs"]["token_logprobs"])
    for max_tokens in (4, 0):
        echoed = demo.client.complete("The sky is", logprobs=2, max_tokens=max_tokens, echo=True)
        check_legacy(echoed, 2, "The sky is")
        token_logprobs = echoed.choices()[0]["logprobs"]["token_logprobs"]
        assert token_logprobs[0] is None and all(value <= 0 for value in token_logprobs[1:])
    assert echoed.text() == "The sky is"
    scripted = serve("plain")
    echoed = scripted.client.complete("<|s05|><|assistant|>", echo=True, logprobs=1, max_tokens=20)
    assert echoed.text() == "<|s05|><|assistant|>ABCDEFGH"
    check_legacy(echoed, 1, "<|s05|><|assistant|>")
    scripted.client.check_control()
