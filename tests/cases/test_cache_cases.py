"""Reused prefixes: full hits, strict prefixes and extensions, hits under load, honest ``cached_tokens``."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from support.client import Answer, at_once
from support.scripted import expected_finish, expected_prompt_tokens, expected_text
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


@pytest.mark.parametrize("num_tokens", [4, 5, 17, 64, 65, 256, 1000, 4000])
def test_a_full_hit_recomputes_the_last_token_and_changes_nothing(server: Server, num_tokens: int) -> None:
    content = "<|s05|>" + "f" * (num_tokens - 4)
    answers = [server.client.chat(content)]
    for _ in range(2):
        answers += server.client.both(content)
    for answer in answers:
        assert answer.text() == "ABCDEFGH"
        assert answer.usage["prompt_tokens"] == num_tokens
        assert answer.cached_tokens <= num_tokens - 1
    assert answers[-1].cached_tokens >= num_tokens - 1 - 2 * block_size(server)


def block_size(server: Server) -> int:
    return int(server.status()["engine"]["block_size"])


@pytest.mark.parametrize("words", [3, 40, 200])
def test_logprobs_of_full_hits_stay(serve: Serve, words: int) -> None:
    server = serve("demo")
    content = "Tell me about " + ", ".join(["rivers and mills"] * words)
    fields = {"max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    answers = [server.client.chat(content, **fields) for _ in range(4)]
    assert answers[-1].cached_tokens > 0
    for answer in answers[1:]:
        assert answer.text() == answers[0].text()
        for entry, first in zip(answer.logprobs(), answers[0].logprobs(), strict=True):
            assert math.isclose(entry["logprob"], first["logprob"], abs_tol=1e-3)


def test_a_prefix_and_its_extension_do_not_disturb_each_other(server: Server) -> None:
    short = "<|s05|>" + "p" * 300
    long = short + "q" * 300
    for content in (short, long, short):
        assert server.client.chat(content).text() == "ABCDEFGH"
    answers = at_once(server.client.chat, [short, long] * 3, 6)
    assert {answer.text() for answer in answers} == {"ABCDEFGH"}
    turns = [
        {"role": "user", "content": short},
        {"role": "assistant", "content": "ABCDEFGH"},
        {"role": "user", "content": "zz"},
    ]
    answer = server.client.chat(messages=turns)
    assert answer.text() == "ABCDEFGH" and answer.cached_tokens >= 288
    assert server.client.chat(short).text() == "ABCDEFGH"


def test_nobody_gets_another_requests_content(server: Server) -> None:
    """40 prompts in random order, 16 at once, then the same again with a warm cache."""
    dice = random.Random(5)
    contents = [
        "b" * dice.choice((0, 7, 400)) + f"<|{script}|>" + "a" * dice.randrange(700)
        for script in dice.choices(("s00", "s02", "s04", "s05"), k=40)
    ]
    cached = 0
    for _ in range(2):
        answers = at_once(server.client.chat, contents, 16)
        for content, answer in zip(contents, answers, strict=True):
            check_scripted(content, answer)
        cached = sum(answer.cached_tokens > 0 for answer in answers)
    assert cached > 30


def test_sixty_four_mixed_requests_in_both_modes(server: Server) -> None:
    dice = random.Random(6)
    scripts = dice.choices(("s00", "s01", "s02", "s04", "s05", "s07", "s12"), k=64)
    contents = [f"<|{script}|>" + "m" * dice.randrange(400) for script in scripts]

    def ask(item: tuple[int, str]) -> Answer:
        number, content = item
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return server.client.chat(content, **(streamed if number % 2 else {}))

    for content, answer in zip(contents, at_once(ask, list(enumerate(contents)), 16), strict=True):
        check_scripted(content, answer)


def check_scripted(content: str, answer: Answer) -> None:
    """Text, reason and usage are exactly the script's."""
    script = content[content.index("<|") + 2 : content.index("|>")]
    assert answer.text() == expected_text(script), content
    assert answer.finish_reason() == expected_finish(script)
    assert answer.usage["prompt_tokens"] == expected_prompt_tokens(content)
    assert not answer.streamed or answer.done


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_cached_tokens_tell_the_truth_in_both_modes(server: Server, route: str) -> None:
    content = f"{route}<|s05|>" + "c" * 2000
    usage = {"include_usage": True}
    if route == "chat":
        cold = server.client.chat(content, stream=True, stream_options=usage)
        warm = server.client.both(content)
    else:
        prompt = content + "<|assistant|>"
        cold = server.client.complete(prompt, stream=True, stream_options=usage)
        warm = server.client.both_complete(prompt)
    assert cold.usage["prompt_tokens_details"]["cached_tokens"] <= 1  # what every chat begins with
    for answer in warm:
        assert answer.cached_tokens > 1900
        assert answer.usage["prompt_tokens"] == cold.usage["prompt_tokens"] >= 2000
        assert answer.text() == cold.text() == "ABCDEFGH"


def test_a_streamed_message_begins_with_the_cached_part(server: Server) -> None:
    """Of a prompt that is known in part, before its first token."""

    def usages(content: str) -> tuple[dict[str, Any], dict[str, Any]]:
        message = {"role": "user", "content": content}
        body = {"model": "m", "max_tokens": 20, "stream": True, "messages": [message]}
        answer = server.client.post("/v1/messages", body)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        (begin,) = [event["message"]["usage"] for event in events if event["type"] == "message_start"]
        (end,) = [event["usage"] for event in events if event["type"] == "message_delta"]
        return begin, end

    usages("<|s05|>" + "m" * 2000)
    begin, end = usages("<|s05|>" + "m" * 2000 + "n" * 300)
    names = ("input_tokens", "cache_read_input_tokens")
    assert [begin[name] for name in names] == [end[name] for name in names]
    assert begin["cache_read_input_tokens"] > 1900
