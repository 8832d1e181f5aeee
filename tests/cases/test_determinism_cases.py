"""A request's text does not depend on its neighbours in the batch."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
from support.client import Answer, at_once
from support.reference import GreedyReference, until_close_call
from support.scripted import expected_prompt_tokens, expected_text
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROMPTS = (
    "What is the capital of France?",
    "Hi",
    "Write one line about the sea.",
    "List three colours, separated by commas.",
    "Translate to French: good morning",
    "def add(a, b):",
    "2 + 2 =",
    "Explain why the sky is blue to a child who likes trains and asks many questions. " * 3,
    "Name a fruit.",
    "Who wrote Hamlet?",
    "Count from one to five.",
    "Give me a recipe for bread with flour, water, salt and yeast; be brief. " * 8,
    "What is a mill?",
    "Is water wet? Answer yes or no.",
    "A poem about rain:",
    "Describe how a water wheel works, step by step. " * 20,
)


def test_equal_requests_together_give_one_text(serve: Serve) -> None:
    server = serve("plain")
    solo = [server.client.chat("<|s04|>" + "e" * 100).text() for _ in range(2)]
    crowd = at_once(server.client.chat, ["<|s04|>" + "e" * 100] * 24, 8)
    assert {*solo, *(answer.text() for answer in crowd)} == {expected_text("s04")}


def test_equal_requests_together_give_one_text_up_to_close_calls(serve: Serve) -> None:
    server = serve("demo")
    fields = {"max_tokens": 48, "logprobs": True, "top_logprobs": 2}

    def ask(_: int) -> Answer:
        return server.client.chat("Tell me a short story about a mill.", **fields)

    before = ask(0)
    crowd = at_once(ask, range(8), 8)
    after = ask(0)
    assert after.text() == before.text()
    decided = until_close_call([[top["logprob"] for top in entry["top_logprobs"]] for entry in before.logprobs()])
    tokens = [entry["token"] for entry in before.logprobs()]
    for answer in crowd:
        assert [entry["token"] for entry in answer.logprobs()][:decided] == tokens[:decided]


def test_a_long_generation_among_comers_and_goers(serve: Serve) -> None:
    server = serve("plain")

    def short(number: int) -> str:
        content = "<|s05|>" + "j" * (number * 7)
        if number % 3 == 2:
            with server.client.streaming(content) as chunks:
                next(chunks)
            return "ABCDEFGH"
        return server.client.chat(content).text()

    with ThreadPoolExecutor(8) as pool:
        long = pool.submit(server.client.chat, "<|s01|>", max_tokens=1500, stream=True)
        shorts = []
        for number in range(45):
            shorts.append(pool.submit(short, number))
            time.sleep(0.02)
        assert {future.result() for future in shorts} == {"ABCDEFGH"}
        assert long.result().text() == " one two three four five six" * 250


def test_greedy_answers_in_a_crowd_are_mlx_lms_own(serve: Serve, greedy_reference: GreedyReference) -> None:
    """16 prompts of different lengths at once; equal up to where the reference's best two are close."""
    server = serve("demo")
    max_tokens = 16
    expected = greedy_reference(server, PROMPTS, max_tokens)
    answers = at_once(
        lambda prompt: server.client.chat(prompt, max_tokens=max_tokens, return_token_ids=True), PROMPTS, 16
    )
    for prompt, answer, reference in zip(PROMPTS, answers, expected, strict=True):
        (choice,) = answer.choices()
        assert answer.body is not None and answer.body["prompt_token_ids"] == reference.prompt_token_ids
        decided = until_close_call(reference.top_logprobs)
        assert choice["token_ids"][:decided] == reference.token_ids[:decided], prompt
        assert decided == len(reference.token_ids) or decided > 0


def test_the_capital_of_france(serve: Serve) -> None:
    server = serve("demo")
    for answer in server.client.both("What is the capital of France?"):
        assert answer.text() == "The capital of France is Paris."
        assert answer.finish_reason() == "stop"


def test_a_joining_long_prompt_leaves_running_streams_right(serve: Serve) -> None:
    server: Server = serve("plain")
    with server.client.streaming("<|s01|>", max_tokens=600) as chunks:
        first = list(islice(chunks, 10))
        content = "<|s05|>" + "l" * 3000
        answer = server.client.chat(content)
        assert answer.text() == "ABCDEFGH"
        assert answer.usage["prompt_tokens"] == expected_prompt_tokens(content)
        rest = list(chunks)
    joined = "".join(c["delta"].get("content") or "" for chunk in first + rest for c in chunk["choices"])
    assert joined == expected_text("s01", 600)
