"""Streams: how they end, that they equal the other mode, their framing, what they send while they wait."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.client import Answer, RawConnection, at_once, chat_body
from support.scripted import SCRIPTS, expected_finish, expected_text, vocabulary
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
END = str(vocabulary().added["<|im_end|>"])

ENDINGS: list[tuple[str, dict[str, Any], str]] = [
    ("<|s00|>", {}, "stop"),
    ("<|s01|>", {"max_tokens": 7}, "length"),
    ("<|s00|>", {"stop": "gamma"}, "stop"),
    ("<|s00|>", {"stop": "Al"}, "stop"),
    ("<|s05|>", {"logit_bias": {END: 100}}, "stop"),
    ("<|s00|>", {"logprobs": True}, "stop"),
    ("<|s00|>", {"stream_options": {"include_usage": True}}, "stop"),
]


@pytest.mark.parametrize(("content", "fields", "reason"), ENDINGS)
def test_every_stream_ends_with_one_reason_and_done(
    server: Server, content: str, fields: dict[str, Any], reason: str
) -> None:
    for _ in range(3):
        answer = server.client.chat(content, stream=True, **fields)
        assert answer.done and answer.error is None
        assert answer.finish_reason() == reason
        choices = answer.choices()
        (last,) = [number for number, choice in enumerate(choices) if choice["finish_reason"]]
        assert not any(delta for delta in answer.deltas()[last + 1 :])


def test_the_connection_is_free_after_done(server: Server) -> None:
    with RawConnection(server.port) as connection:
        for _ in range(2):
            connection.received = b""
            connection.request("POST", "/v1/chat/completions", chat_body("m", "<|s00|>", stream=True))
            assert b"data: [DONE]" in connection.read_until(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_deltas_joined_are_the_other_mode(server: Server, script: str) -> None:
    whole, streamed = server.client.both_complete(f"<|{script}|><|assistant|>")
    assert whole.text() == streamed.text() == expected_text(script)
    assert whole.finish_reason() == streamed.finish_reason() == expected_finish(script)
    assert whole.usage["completion_tokens"] == streamed.usage["completion_tokens"]


def test_deltas_joined_are_the_other_mode_for_real_text(serve: Serve) -> None:
    demo = serve("demo")
    prompts = [
        "def fib(n):",
        "Write a list of three fruits.",
        "你好，请介绍一下你自己。",
        "Answer with an emoji: 🎉",
        "Écris en français.",
        "Print a JSON object.",
    ]
    for whole, streamed in at_once(lambda prompt: demo.client.both(prompt, max_tokens=16), prompts, 1):
        assert whole.text() == streamed.text()
        assert whole.finish_reason() == streamed.finish_reason()
        assert whole.usage["completion_tokens"] == streamed.usage["completion_tokens"]


def test_events_of_several_tokens_lose_nothing(serve: Serve) -> None:
    server = serve("plain", "--stream-interval", "100")
    for script in ("s01", "s02", "s06", "s07"):
        whole, streamed = server.client.both_complete(f"<|{script}|><|assistant|>", max_tokens=250)
        assert whole.text() == streamed.text() == expected_text(script, 250)
        assert sum(1 for delta in streamed.deltas() if delta) <= 5


def test_what_is_constant_in_a_stream(server: Server) -> None:
    chats = at_once(lambda _: server.client.chat("<|s02|>", stream=True), range(2), 2)
    completion = server.client.complete("<|s02|><|assistant|>", stream=True)
    for answer, kind in ((chats[0], "chat.completion.chunk"), (chats[1], "chat.completion.chunk")):
        check_frames(answer, kind)
        roles = [choice["delta"].get("role") for choice in answer.choices()]
        assert roles[0] == "assistant" and not any(roles[1:])
    check_frames(completion, "text_completion")
    assert len({answer.chunks[0]["id"] for answer in (*chats, completion)}) == 3


def check_frames(answer: Answer, kind: str) -> None:
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in answer.chunks}) == 1
    assert answer.chunks[0]["object"] == kind
    assert all("choices" in chunk for chunk in answer.chunks)


def test_usage_comes_once_and_last_when_asked_for(server: Server) -> None:
    content = "<|s02|>" + "u" * 500
    whole, streamed = server.client.both(content)
    assert streamed.chunks[-1]["choices"] == [] and streamed.done
    assert sum(1 for chunk in streamed.chunks if chunk.get("usage")) == 1
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed.usage[name] == whole.usage[name]
    assert streamed.usage["prompt_tokens"] == 504
    for fields in ({}, {"stream_options": {"include_usage": False}}):
        answer = server.client.chat(content, stream=True, **fields)
        assert not any(chunk.get("usage") for chunk in answer.chunks)
        assert all(chunk["choices"] for chunk in answer.chunks)


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}], ids=["plain", "tools"])
def test_text_is_sent_as_it_comes(server: Server, fields: dict[str, Any]) -> None:
    """The first text is here while the rest is still being computed."""
    with server.client.streaming("<|s01|>", max_tokens=7000, **fields) as chunks:
        for chunk in chunks:
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                break
        assert server.metrics().running == 1
    server.wait_idle()


def test_a_stream_answers_before_its_prompt_is_computed(server: Server) -> None:
    """Head at once; comments while it waits; the events are the same as ever."""
    contents = [f"{number}<|s05|>" + "k" * 7000 for number in range(2)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.client.chat, contents[0])
        with RawConnection(server.port) as connection:
            connection.request("POST", "/v1/chat/completions", chat_body("m", contents[1], stream=True))
            raw = connection.read_until(b"\r\n0\r\n\r\n")
        assert first.result().text() == "ABCDEFGH"
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    lines = [line for line in body.split(b"\n") if line.startswith((b"data: {", b":"))]
    texts = [
        json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines if line[:1] == b"d"
    ]
    assert "".join(texts) == "ABCDEFGH"


def test_a_connection_survives_every_kind_of_answer(server: Server) -> None:
    chat = "/v1/chat/completions"
    steps: list[tuple[str, str, dict[str, Any] | None, bytes, bytes]] = [
        ("POST", chat, chat_body("m", "<|s05|>"), b"200", b"ABCDEFGH"),
        ("POST", chat, chat_body("m", "<|s05|>", stream=True), b"200", b"data: [DONE]\n\n\r\n0\r\n\r\n"),
        ("POST", chat, chat_body("m", "<|s05|>", n=0), b"400", b'"param":"n"'),
        ("GET", "/v1/models", None, b"200", b'"data":['),
        ("OPTIONS", chat, None, b"204", b"\r\n\r\n"),
        ("HEAD", "/health", None, b"200", b"\r\n\r\n"),
        ("GET", "/nowhere", None, b"404", b'"error":'),
        ("POST", chat, chat_body("m", "<|s00|>", stream=True), b"200", b"data: [DONE]\n\n\r\n0\r\n\r\n"),
    ]
    with RawConnection(server.port) as connection:
        for method, path, body, status, mark in steps:
            connection.received = b""
            connection.request(method, path, body)
            raw = connection.read_until(mark)
            assert raw.startswith(b"HTTP/1.1 " + status), (method, path, raw[:100])
            read_rest(connection)


def read_rest(connection: RawConnection) -> None:
    """Up to the end of the answer that Content-Length declares."""
    head, _, body = connection.received.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length" and body:
            while len(connection.received.partition(b"\r\n\r\n")[2]) < int(value):
                assert connection.read_some()


def test_http_1_0_closes_behind_the_body(server: Server) -> None:
    for stream in (False, True):
        with RawConnection(server.port) as connection:
            body = chat_body("m", "<|s05|>", stream=stream)
            connection.request("POST", "/v1/chat/completions", body, version="HTTP/1.0")
            raw = connection.read_to_end()
        assert raw.split(b" ")[1] == b"200"
        assert b"transfer-encoding" not in raw.partition(b"\r\n\r\n")[0].lower()
        assert b"ABCDEFGH" in raw.replace(b'"},', b"") or raw.rstrip().endswith(b"data: [DONE]")


def test_two_requests_in_one_packet_are_answered_in_order(server: Server) -> None:
    with RawConnection(server.port) as connection:
        packet = b""
        for script in ("s05", "s00"):
            content = json.dumps(chat_body("m", f"<|{script}|>")).encode()
            packet += b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
            packet += b"Content-Length: %d\r\n\r\n" % len(content) + content
        connection.socket.sendall(packet)
        raw = connection.read_until(b"Alpha beta gamma delta.")
    assert raw.index(b"ABCDEFGH") < raw.index(b"Alpha")
