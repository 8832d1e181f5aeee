"""mlx-lm's own one-sequence greedy output of the demo model, with the BLAS that servers use.

It is computed in a process of its own (``mlx_lm_greedy.py``), which keeps MLX out of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.server import Server, ServerRoom

CLOSE_CALL = 0.05
"""Logprobs of the best two tokens closer than this may come out in either order (float32)."""


@dataclass(frozen=True)
class Generated:
    """``top_logprobs``: per token, the best two."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    top_logprobs: list[list[float]]


GreedyReference = Callable[[Server, Sequence[str], int], list[Generated]]


def until_close_call(top_logprobs: Sequence[Sequence[float]]) -> int:
    """Number of leading tokens that no rounding decides."""
    for position, (best, second, *_) in enumerate(top_logprobs):
        if best - second < CLOSE_CALL:
            return position
    return len(top_logprobs)


@pytest.fixture(scope="session")
def greedy_reference(server_room: ServerRoom) -> GreedyReference:
    """``greedy_reference(server, prompts, max_tokens)``: chats of one user message each, on the demo model."""

    def generate(server: Server, prompts: Sequence[str], max_tokens: int) -> list[Generated]:
        chats = [
            server.client.post("/tokenize", {"messages": [{"role": "user", "content": prompt}]}).json()["tokens"]
            for prompt in prompts
        ]
        request = {"model": server_room.path("demo"), "prompts": chats, "max_tokens": max_tokens}
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("mlx_lm_greedy.py"))],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=300,
            env=server_room.environment,
        )
        assert done.returncode == 0, done.stderr
        return [Generated(chat, *found) for chat, found in zip(chats, json.loads(done.stdout), strict=True)]

    return generate
