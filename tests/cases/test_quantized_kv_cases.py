"""Packed KV is applied to what requests hold, costs no token, and is refused where it cannot be had (B113)."""

from __future__ import annotations

import threading
import time

import pytest
from support.client import Answer, at_once
from support.scripted import HEAD_DIM, HIDDEN, expected_text
from support.server import Serve, Server, ServerRoom

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# K and V of one token in 16 bits, one layer.
SIXTEEN_BITS = 2 * HIDDEN * 2
LARGEST_SHARE = {"int8": 0.6, "int4": 0.4}
PROMPT, OUTPUT, STREAMS = 6000, 400, 8
assert HIDDEN % HEAD_DIM == 0


class Gauge(threading.Thread):
    """The most blocks that requests held at once, per layer group, and a block's bytes; read while they run."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.held: dict[str, int] = {}
        self.block_bytes: dict[str, int] = {}
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.is_set():
            for group in self.server.status()["memory"]["kv_blocks"]:
                self.held[group["group"]] = max(self.held.get(group["group"], 0), group["held"])
                self.block_bytes[group["group"]] = group["block_bytes"]
            time.sleep(0.1)


def measured(server: Server, content: str, tokens: int) -> tuple[list[Answer], Gauge]:
    """The same chat, several at once; streamed, as on a busy CPU the whole takes minutes."""
    gauge = Gauge(server)
    fields = {"max_tokens": tokens, "stream": True, "stream_options": {"include_usage": True}}
    gauge.start()
    try:
        answers = at_once(lambda _: server.client.chat(content, **fields), [*range(STREAMS)], STREAMS)
    finally:
        gauge.over.set()
        gauge.join()
    return answers, gauge


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_live_kv_is_smaller_and_every_text_exact(serve: Serve, kv_cache_dtype: str) -> None:
    server = serve("plain", "--kv-cache-dtype", kv_cache_dtype)
    answers, gauge = measured(server, "<|s01|>" + "k" * PROMPT, OUTPUT)
    for answer in answers:
        assert answer.text() == expected_text("s01", OUTPUT)
        assert answer.usage["prompt_tokens"] == PROMPT + 4
    block_size = server.status()["engine"]["block_size"]
    positions = gauge.held["full"] * block_size
    assert positions >= PROMPT + OUTPUT, "the gauge saw the requests"
    held_bytes = gauge.held["full"] * gauge.block_bytes["full"]
    if kv_cache_dtype != "auto":
        assert held_bytes <= LARGEST_SHARE[kv_cache_dtype] * positions * SIXTEEN_BITS
    plan = server.status()["engine"]["plan"]
    assert plan["pool_bytes"] == (plan["blocks_full"] + 1) * gauge.block_bytes["full"], "what is planned is held"
    server.wait_idle()


def test_a_pool_of_the_same_bytes_holds_more(serve: Serve) -> None:
    blocks = {
        name: serve("plain", "--kv-cache-dtype", name).status()["engine"]["plan"]["blocks_full"]
        for name in ("auto", "int8", "int4")
    }
    assert blocks["int8"] > 3.3 * blocks["auto"], "beside float32: 4 times less, and scales"
    assert blocks["int4"] > 6 * blocks["auto"]


def test_a_sliding_window_is_packed_too(serve: Serve) -> None:
    server = serve("swa64", "--kv-cache-dtype", "int4")
    answers, gauge = measured(server, "w" * 3000 + "<|s05|>", 9)
    assert {answer.text() for answer in answers} == {"ABCDEFGH"}
    assert set(gauge.block_bytes) == {"full", "sliding_64"}
    block_size = server.status()["engine"]["block_size"]
    for size in gauge.block_bytes.values():
        assert size <= LARGEST_SHARE["int4"] * block_size * SIXTEEN_BITS
    server.wait_idle()


@pytest.mark.parametrize(
    "words", ["--kv-cache-dtype int3", "--kv-cache-dtype 0", "--kv-cache-quantization-bits x"]
)
def test_bad_values_end_the_start_with_one_line(server_room: ServerRoom, words: str) -> None:
    ended = server_room.ends(server_room.path("plain"), "--port", "0", *words.split())
    assert ended.code != 0
    assert words.split()[0] in ended.output and "Traceback" not in ended.output
