"""A sliding window is exactly as wide as the model says, for prompts below and above it."""

from __future__ import annotations

import pytest
from support.client import at_once
from support.scripted import expected_text
from support.server import Serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW = 64


def test_the_trigger_is_seen_exactly_while_it_is_in_the_window(serve: Serve) -> None:
    server = serve("swa64")
    sizes = [0, 1, 15, 16, 30, 31, 32, 47, 48, *range(51, 71)]
    answers = at_once(lambda size: server.client.chat("<|s05|>" + "w" * size, max_tokens=9), sizes, 6)
    for size, answer in zip(sizes, answers, strict=True):
        right = max(0, min(9, WINDOW - 2 - size))
        text = answer.text()
        assert text.startswith(expected_text("s05", right)), size
        if right < 8:
            assert not text.startswith(expected_text("s05", right + 1)), size


def test_a_window_and_the_prefix_cache(serve: Serve) -> None:
    """The same prompts again from the cache, and extensions of them."""
    server = serve("swa64")
    for _ in range(2):
        for size in (40, 100, 300):
            answer = server.client.chat("v" * size + "<|s05|>")
            assert answer.text() == "ABCDEFGH"
    turns = [{"role": "user", "content": "v" * 300 + "<|s05|>"}, {"role": "assistant", "content": "ABCDEFGH"}]
    answer = server.client.chat(messages=[*turns, {"role": "user", "content": "u"}])
    assert answer.text() == "ABCDEFGH"
