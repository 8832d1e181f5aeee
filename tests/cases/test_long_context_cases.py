"""Prompts over the context are refused with the numbers; long outputs are whole."""

from __future__ import annotations

import pytest
from support.scripted import expected_text
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


@pytest.mark.parametrize("extra", [8190, 9000, 200_000])
def test_a_prompt_over_the_context_is_refused_with_both_numbers(server: Server, extra: int) -> None:
    content = "<|s05|>" + "o" * extra
    answers = [*server.client.both(content), *server.client.both_complete(content + "<|assistant|>" + "pp")]
    for answer in answers:
        assert answer.status == 400 and answer.error is not None
        assert answer.error["code"] == "context_length_exceeded"
        assert str(extra + 4) in answer.message and "8192" in answer.message
    server.client.check_control()


def test_the_longest_prompts_that_fit(server: Server) -> None:
    content = "<|s05|>" + "o" * (8192 - 4 - 8)
    for extra, text in (("", "ABCDEFGH"), ("oooo", "ABCD"), ("o" * 8, "")):
        answer = server.client.chat(content + extra, max_tokens=9)
        if text:
            assert (answer.text(), answer.finish_reason()) == (text, "length")
            assert answer.usage["total_tokens"] == 8192
        else:
            assert answer.status == 400


def test_a_lower_limit_is_kept(serve: Serve) -> None:
    low = serve("plain", "--max-model-len", "512")
    refused = low.client.chat("<|s05|>" + "o" * 600)
    assert refused.status == 400 and "604" in refused.message and "512" in refused.message
    low.client.check_control()


def test_a_length_beyond_the_model_is_said(start_server: Serve) -> None:
    server = start_server("plain", "--max-model-len", "9000")
    assert "9000" in server.log() and "8192" in server.log()
    content = "<|s05|>" + "o" * 8500
    assert server.client.chat(content).usage["prompt_tokens"] == 8504


def test_a_long_output_is_whole(server: Server) -> None:
    answer = server.client.chat("<|s01|>", max_tokens=4000, stop=["zzzz"], stream=True)
    assert answer.text() == expected_text("s01", 4000)
