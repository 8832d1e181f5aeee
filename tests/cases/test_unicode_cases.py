"""Characters made of several tokens, leading spaces, text that is no text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.client import at_once, chat_body, completion_body
from support.server import Serve, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MARKS = ("Ġ", "Ċ", "▁", "Ã")


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve("plain")


def test_split_characters_arrive_whole(server: Server) -> None:
    answers = [*server.client.both("<|s02|>")]
    answers += at_once(lambda _: server.client.chat("<|s02|>", stream=True), range(8), 8)
    for answer in answers:
        assert answer.text() == "ok 😀 café end"
        assert not any("\ufffd" in delta for delta in answer.deltas())


def test_leading_spaces_stay_and_no_vocabulary_marks_show(server: Server) -> None:
    fields = {"max_tokens": 3}
    answers = [
        *server.client.both("<|s01|>", **fields),
        *server.client.both_complete("<|s01|><|assistant|>", **fields),
    ]
    assert [answer.text() for answer in answers] == [" one two three"] * 4
    for script in ("s01", "s02", "s05"):
        answer = server.client.chat(f"<|{script}|>", logprobs=True, top_logprobs=5)
        shown = [answer.text()]
        assert b"".join(bytes(entry["bytes"]) for entry in answer.logprobs()).decode() == answer.text()
        for entry in answer.logprobs():
            shown += [entry["token"], *(top["token"] for top in entry["top_logprobs"])]
        assert not any(mark in text for mark in MARKS for text in shown)


SURROGATES = ("\ud83d", "x \ude00 y")


@pytest.mark.parametrize("text", SURROGATES)
@pytest.mark.parametrize("stream", [False, True])
def test_unpaired_surrogates_are_refused_by_field(server: Server, text: str, stream: bool) -> None:
    user = {"role": "user", "content": "<|s05|>"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": text, "parameters": {"type": "object"}}}
    bodies: list[dict[str, Any]] = [
        chat_body("m", text),
        chat_body("m", "", messages=[{"role": "system", "content": text}, user]),
        chat_body(
            "m",
            "",
            messages=[
                user,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": text},
            ],
        ),
        chat_body("m", "<|s05|>", tools=[tool]),
        chat_body("m", "<|s05|>", stop=text),
        completion_body("m", text),
    ]
    for body in bodies:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        content = json.dumps({**body, "stream": stream})  # the surrogates as escapes
        answer = server.client.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        assert error["param"] and error["param"].split(".")[0].split("[")[0] in error["message"]
    server.client.check_control()


@pytest.mark.parametrize(
    "text", ["a\x00b", "\uffff", "\ufeffx", "e" + "\u0301" * 3000], ids=["nul", "ffff", "bom", "marks"]
)
def test_odd_text_costs_its_bytes(server: Server, text: str) -> None:
    for answer in server.client.both("<|s05|>" + text):
        assert answer.text() == "ABCDEFGH"
        assert answer.usage["prompt_tokens"] == len(text.encode()) + 4
