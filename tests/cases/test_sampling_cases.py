"""Sampling fields: what is refused, what is honoured, seeds alone and in company, lists of prompts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.client import ABSENT, Answer, at_once, chat_body
from support.scripted import expected_text, vocabulary
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


@pytest.fixture
def demo(serve: Serve) -> Server:
    return serve("demo")


BAD_FIELDS: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-1, 3, "hot")),
    *(("top_p", value) for value in (-0.1, 1.5)),
    *(("top_k", value) for value in (-2, 1.5)),
    ("min_p", 2),
    *(("max_tokens", value) for value in (0, -1, 1.5, "5")),
    *(("n", value) for value in (0, -1)),
    ("seed", "x"),
    ("stop", 5),
    ("presence_penalty", 3),
    *(("repetition_penalty", value) for value in (0, -1)),
    *(("logit_bias", value) for value in ({"abc": 1}, {"99999999": 1}, [1])),
    *(("top_logprobs", value) for value in (21, -1, 3)),
    ("stream", "yes"),
    *(("messages", value) for value in ([], ABSENT, "hi", [{"role": 3}], [{"role": "wizard", "content": "x"}])),
    ("tools", "x"),
    ("response_format", {"type": "yaml"}),
]


def test_invalid_fields_are_refused_by_name(server: Server) -> None:
    for name, value in BAD_FIELDS:
        answer = server.client.chat("<|s05|>", **{name: value})
        assert answer.status == 400, (name, value, answer.body)
        assert answer.error is not None and answer.error["type"] == "invalid_request_error"
        assert name in (answer.error["param"] or ""), (name, value, answer.error)
        assert name.rstrip("s") in answer.message, (name, value, answer.message)
    server.client.check_control()


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(server: Server, literal: str) -> None:
    body = json.dumps(chat_body("m", "<|s05|>", temperature="@")).replace('"@"', literal)
    answer = server.client.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_several_sequences_per_prompt(demo: Server) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 7, "max_tokens": 12}
    whole, streamed = demo.client.both("Say something surprising.", **fields)
    for answer in (whole, streamed):
        texts = [answer.text(index) for index in range(3)]
        assert len(set(texts)) > 1
        assert [answer.finish_reason(index) in ("stop", "length") for index in range(3)] == [True] * 3
        assert 3 < answer.usage["completion_tokens"] <= 36
    assert [whole.text(index) for index in range(3)] == [streamed.text(index) for index in range(3)]
    assert whole.usage["completion_tokens"] == streamed.usage["completion_tokens"]


def test_logit_bias_acts_on_its_own_row_alone(demo: Server) -> None:
    content = "Name a fruit."

    def ask(bias: dict[str, float] | None) -> tuple[list[int], str]:
        answer = demo.client.chat(content, max_tokens=6, return_token_ids=True, logit_bias=bias)
        return answer.choices()[0]["token_ids"], answer.text()

    reference, text = ask(None)
    banned = {str(reference[0]): -100.0}
    alone, _ = ask(banned)
    rows = at_once(ask, [banned, None, None, None], 4)
    assert reference[0] not in alone
    assert rows[0][0] == alone
    assert [row[1] for row in rows[1:]] == [text] * 3
    assert ask({"1234": 100.0})[0] == [1234] * 6


def test_both_names_of_the_length_limit(server: Server) -> None:
    five = server.client.chat("<|s01|>", max_tokens=ABSENT, max_completion_tokens=5)
    assert (five.text(), five.finish_reason()) == (expected_text("s01", 5), "length")
    both = server.client.chat("<|s01|>", max_tokens=9, max_completion_tokens=5)
    assert both.usage["completion_tokens"] == 5


def test_null_is_absent(server: Server) -> None:
    names = (
        "max_completion_tokens", "n", "stream", "stream_options", "stop", "seed", "top_p", "top_k", "min_p",
        "tools", "tool_choice", "response_format", "logit_bias", "logprobs", "top_logprobs", "presence_penalty",
        "user", "frequency_penalty", "repetition_penalty", "metadata", "parallel_tool_calls", "reasoning_effort",
    )  # fmt: skip
    answer = server.client.chat("<|s05|>", **dict.fromkeys(names))
    assert answer.text() == "ABCDEFGH"
    greedy_by_default = server.client.chat("<|s05|>", temperature=None, max_tokens=None)
    assert greedy_by_default.text() == "ABCDEFGH"


def test_without_a_limit_generation_ends_by_itself_or_at_the_context(serve: Serve) -> None:
    server = serve("plain", "--max-model-len", "512")
    ends = server.client.chat("<|s00|>", max_tokens=ABSENT)
    assert (ends.text(), ends.finish_reason()) == (expected_text("s00"), "stop")
    runs_on = server.client.chat("<|s01|>", max_tokens=ABSENT)
    assert (runs_on.text(), runs_on.finish_reason()) == (expected_text("s01", 508), "length")
    assert runs_on.usage["total_tokens"] == 512


def test_all_spellings_of_no_top_k_are_one(demo: Server) -> None:
    vocab_size = demo.status()["engine"]["vocab_size"]
    spellings = (0, -1, vocab_size)

    def ask(item: tuple[int, int]) -> str:
        top_k, seed = item
        return demo.client.chat("Invent a word.", temperature=1.2, top_k=top_k, seed=seed, max_tokens=8).text()

    texts = at_once(ask, [(top_k, seed) for top_k in spellings for seed in range(6)], 6)
    off, minus_one, all_tokens = texts[:6], texts[6:12], texts[12:]
    assert off == minus_one == all_tokens
    assert len(set(off)) >= 3


def test_a_tiny_temperature_is_greedy(demo: Server) -> None:
    greedy = demo.client.chat("Invent a word.", max_tokens=8).text()
    assert {demo.client.chat("Invent a word.", temperature=1e-5, max_tokens=8).text() for _ in range(3)} == {
        greedy
    }


def test_seeds_reproduce_and_their_absence_does_not(demo: Server, start_server: Serve) -> None:
    """Also behind a restart."""

    def ask(server: Server, seed: object) -> str:
        return server.client.chat("Invent a name for a mill.", temperature=1, seed=seed, max_tokens=16).text()

    seeded = [ask(demo, seed) for seed in (1, 2, 3)]
    assert [ask(demo, seed) for seed in (1, 2, 3)] == seeded
    assert len(set(seeded)) > 1
    unseeded = [ask(demo, ABSENT) for _ in range(4)]
    assert len(set(unseeded)) > 1
    other = start_server("demo")
    assert ask(other, 1) == seeded[0]
    assert ask(other, ABSENT) != unseeded[0]


def test_a_seed_reproduces_in_a_crowd(demo: Server) -> None:
    """Among an unseeded and two other-seeded requests of other temperatures, in all three orders."""
    content = "Write a line about rivers."

    def ask(fields: dict[str, Any]) -> str:
        return demo.client.chat(content, **{"temperature": 0.8, "max_tokens": 24, **fields}).text()

    reference = ask({"seed": 42})
    others = [{"temperature": 1.3}, {"seed": 1}, {"seed": 43, "temperature": 0.2}]
    for place in (0, 2, 3):
        crowd = [*others[:place], {"seed": 42}, *others[place:]]
        assert at_once(ask, crowd, 4)[place] == reference


def test_a_list_of_prompts_is_a_choice_each(server: Server) -> None:
    scripts = ("s05", "s00", "s02")
    ids = vocabulary().added
    as_text = [f"<|{script}|><|assistant|>" for script in scripts]
    as_ids = [[ids[f"<|{script}|>"], ids["<|assistant|>"]] for script in scripts]
    for prompt in (as_text, as_ids):
        for answer in server.client.both_complete(prompt):
            assert [answer.text(index) for index in range(3)] == [expected_text(script) for script in scripts]
            assert [answer.finish_reason(index) for index in range(3)] == ["stop"] * 3
            assert answer.usage["prompt_tokens"] == 6
            assert answer.usage["completion_tokens"] >= sum(len(expected_text(script)) > 0 for script in scripts)
    for bad in ([as_text[0], "", as_text[2]], [1.5], [99999999], [[1, 99999999]]):
        refused: Answer = server.client.complete(bad)
        assert refused.status == 400 and "prompt" in refused.message, bad
        server.client.check_control()
