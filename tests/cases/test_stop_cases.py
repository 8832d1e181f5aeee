"""Stop strings across and inside tokens, odd stop values, the end token at the limit."""

from __future__ import annotations

from typing import Any

import pytest
from support.scripted import expected_text
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        ("s00", ["gamma"], "Alpha beta "),
        ("s00", ["ma del"], "Alpha beta gam"),
        ("s00", ["mm"], "Alpha beta ga"),
        ("s00", "beta", "Alpha "),
        ("s00", ["ta.", "zz"], "Alpha beta gamma del"),
        ("s02", ["é"], "ok 😀 caf"),
    ],
)
def test_stop_strings_across_and_inside_tokens(server: Server, script: str, stop: Any, text: str) -> None:
    full = server.client.chat(f"<|{script}|>").usage["completion_tokens"]
    answers = [
        *server.client.both(f"<|{script}|>", stop=stop),
        *server.client.both_complete(f"<|{script}|><|assistant|>", stop=stop),
    ]
    for answer in answers:
        assert (answer.text(), answer.finish_reason()) == (text, "stop")
        tokens = answer.usage["completion_tokens"]
        assert tokens <= full if stop == ["ta.", "zz"] else tokens < full


NO_STOP: list[Any] = [[], None, ["a1", "b1", "c1", "d1"], ["\u0000"], "q" * 1000]


@pytest.mark.parametrize("stop", NO_STOP, ids=["empty list", "null", "four", "nul", "long"])
def test_stops_that_do_not_occur_stop_nothing(server: Server, stop: Any) -> None:
    for answer in server.client.both("<|s00|>", stop=stop):
        assert answer.text() == expected_text("s00")


@pytest.mark.parametrize("stop", ["", [""], [None], 5, ["ok", ""], [["a"]]])
def test_stops_that_are_none_are_refused(server: Server, stop: Any) -> None:
    for answer in server.client.both("<|s00|>", stop=stop):
        assert answer.status == 400 and "stop" in answer.message
    server.client.check_control()


def test_many_or_long_stops_work_or_are_refused(server: Server) -> None:
    for stop in (["a1", "b1", "c1", "d1", "e1"], "q" * 5000):
        whole, streamed = server.client.both("<|s00|>", stop=stop)
        assert whole.status == streamed.status
        if whole.status == 200:
            assert whole.text() == streamed.text() == expected_text("s00")
        else:
            assert whole.status == 400 and "stop" in whole.message


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason"),
    [(7, "ABCDEFG", "length"), (8, "ABCDEFGH", "length"), (9, "ABCDEFGH", "stop"), (10, "ABCDEFGH", "stop")],
)
def test_the_end_token_and_the_limit(server: Server, max_tokens: int, text: str, reason: str) -> None:
    answers = [
        *server.client.both("<|s05|>", max_tokens=max_tokens, logprobs=True),
        *server.client.both_complete("<|s05|><|assistant|>", max_tokens=max_tokens),
    ]
    for answer in answers:
        assert (answer.text(), answer.finish_reason()) == (text, reason)
    for answer in answers[:2]:
        assert "".join(entry["token"] for entry in answer.logprobs()) == text
