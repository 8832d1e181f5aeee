"""Error bodies of all routes: one envelope, a sentence for people, nothing of the inside, an id from the log."""

from __future__ import annotations

import re
from typing import Any

import pytest
from support.client import chat_body, completion_body
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INSIDE = re.compile(
    r'Traceback|File "|site-packages|/Users/|/home/|/root/|/tmp/|object at 0x|\b[A-Z]\w+Error\b|msgspec'
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

BAD: list[tuple[str, Any]] = [
    (CHAT, chat_body("m", "x", stop=5)),
    (CHAT, chat_body("m", "x", temperature="hot")),
    (CHAT, chat_body("m", "x", logit_bias={"99999999": 5})),
    (CHAT, chat_body("m", "x", n=0)),
    (CHAT, chat_body("nope", "x")),
    (CHAT, chat_body("m", "x" * 9000)),
    (CHAT, chat_body("m", "x", messages=[])),
    (CHAT, chat_body("m", "x", messages=[{"role": 3}])),
    (CHAT, chat_body("m", "x", messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
    (CHAT, chat_body("m", "x", response_format={"type": "yaml"})),
    (CHAT, chat_body("m", "x", tools="x")),
    (CHAT, chat_body("m", "x", tools=[{"type": "function"}])),
    (CHAT, chat_body("m", "x", stream_options=5)),
    (CHAT, [1, 2]),
    (CHAT, b"{"),
    (CHAT, b""),
    (CHAT, b'{"messages": "\xff"}'),
    (CHAT, b"[" * 20_000),
    (COMPLETIONS, completion_body("m", "")),
    (COMPLETIONS, completion_body("m", [])),
    (COMPLETIONS, completion_body("m", [99999999])),
    (COMPLETIONS, completion_body("m", {"a": 1})),
    (COMPLETIONS, completion_body("m", "x", logprobs=True)),
    (COMPLETIONS, completion_body("m", "x", suffix="y")),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
    ("/nowhere", {}),
    ("/v1/models", {}),
    ("/v1/requests/x/cancel", {}),
]


def test_every_refusal_is_a_sentence_in_the_envelope(serve: Serve) -> None:
    server: Server = serve("plain")
    ids = []
    for path, body in BAD:
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = server.client.http.post(path, **content, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500, (path, body, answer.status_code)
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and 5 < len(error["message"]) < 500
        assert not INSIDE.search(answer.text), answer.text
        assert error["param"] is None or isinstance(error["param"], str)
        ids.append(answer.headers["x-request-id"])
    assert len(set(ids)) == len(ids)
    log = server.log()
    assert all(request_id in log for request_id in ids)
    assert "Traceback" not in log


def test_the_clients_own_request_id_is_kept(serve: Serve) -> None:
    server = serve("plain")
    answer = server.client.post(CHAT, chat_body("m", "<|s05|>"), headers={"x-request-id": "my-own.id:1"})
    assert answer.headers["x-request-id"] == "my-own.id:1"
    answer = server.client.post(CHAT, chat_body("m", "<|s05|>"), headers={"x-request-id": "not an id;" * 50})
    assert "not" not in answer.headers["x-request-id"]
    assert "my-own.id:1" in server.log()
