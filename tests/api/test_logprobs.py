"""Logprobs in both dialects and both modes; echo and prompt logprobs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from http_harness import Api
from support import scripted


def chat_entries(answer: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    return entries


@pytest.mark.parametrize("k", [0, 3, 20])
@pytest.mark.parametrize("script", ["s00", "s02", "s07"])
def test_chat_logprobs_are_the_same_in_both_modes(api: Api, k: int, script: str) -> None:
    answer = api.chat(f"<|{script}|>", logprobs=True, top_logprobs=k).json()
    entries = chat_entries(answer)
    content = answer["choices"][0]["message"]["content"]
    assert len(entries) == len(scripted.SCRIPTS[script].pieces)
    assert "".join(entry["token"] for entry in entries) == content
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == content
    for entry in entries:
        assert len(entry["top_logprobs"]) == k
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in [entry["logprob"], *values])
        if k:
            assert entry["top_logprobs"][0]["token"] == entry["token"]
    streamed = api.chat_stream(f"<|{script}|>", logprobs=True, top_logprobs=k)
    joined = [
        entry for choice in streamed.choices() if choice["logprobs"] for entry in choice["logprobs"]["content"]
    ]
    assert joined == entries
    assert streamed.text() == content


def test_logprobs_false_or_absent_is_null(api: Api) -> None:
    for fields in ({}, {"logprobs": False}):
        assert api.chat(**fields).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("script", "stop", "before"),
    [
        ("s00", "gamma", "Alpha beta "),
        ("s00", "mm", "Alpha beta ga"),
        ("s00", "ta.", "Alpha beta gamma del"),
        ("s00", "l", "A"),
        ("s00", "b", "Alpha "),
        ("s02", "😀", "ok "),
        ("s02", "a", "ok 😀 c"),
        ("s02", "é", "ok 😀 caf"),
        ("s02", "n", "ok 😀 café e"),
    ],
)
def test_logprobs_end_with_the_text(api: Api, script: str, stop: str, before: str, included: bool) -> None:
    fields = {"stop": [stop], "logprobs": True, "top_logprobs": 1, "include_stop_str_in_output": included}
    answer = api.chat(f"<|{script}|>", **fields).json()
    text = answer["choices"][0]["message"]["content"]
    assert text == before + (stop if included else "")
    assert "".join(entry["token"] for entry in chat_entries(answer)) == text
    assert bytes(byte for entry in chat_entries(answer) for byte in entry["bytes"]).decode() == text
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in chat_entries(answer))
    streamed = api.chat_stream(f"<|{script}|>", **fields)
    joined = [
        entry for choice in streamed.choices() if choice["logprobs"] for entry in choice["logprobs"]["content"]
    ]
    assert joined == chat_entries(answer)


def test_tokens_can_be_named_by_id(api: Api) -> None:
    answer = api.chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True).json()
    token = f"token_id:{scripted.vocabulary().ids[b'A']}"
    assert chat_entries(answer)[0]["token"] == chat_entries(answer)[0]["top_logprobs"][0]["token"] == token


def test_an_impossible_token_has_a_finite_logprob(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.request import TokenLogprobs

    monkeypatch.setattr(api.engine, "_scored", lambda token, k: TokenLogprobs(-math.inf, [(66, math.nan)]))
    entry = chat_entries(api.chat(logprobs=True, top_logprobs=1).json())[0]
    assert (entry["logprob"], entry["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("script", ["s05", "s02"])
def test_completion_logprobs(api: Api, echo: bool, script: str) -> None:
    prompt = f"a<|{script}|><|assistant|>"
    fields = {"logprobs": 2, "echo": echo, "max_tokens": 20}
    choice = api.complete(prompt, **fields).json()["choices"][0]
    logprobs = choice["logprobs"]
    expected = scripted.expected_text(script)
    assert choice["text"] == (prompt + expected if echo else expected)
    assert len({len(values) for values in logprobs.values()}) == 1
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert (logprobs["token_logprobs"][0] is None) == echo
    assert (logprobs["top_logprobs"][0] is None) == echo
    assert all(len(top) == 2 for top in logprobs["top_logprobs"] if top is not None)
    streamed = api.complete_stream(prompt, **fields)
    assert streamed.text() == choice["text"]
    for name, values in logprobs.items():
        assert [v for c in streamed.choices() if c["logprobs"] for v in c["logprobs"][name]] == values


def test_echo_without_logprobs(api: Api) -> None:
    prompts = ["<|s05|><|assistant|>", "<|s00|><|assistant|>"]
    texts = [prompts[0] + "ABCDEFGH"] * 2 + [prompts[1] + "Alpha beta gamma delta."] * 2
    answer = api.complete(prompts, echo=True, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == texts
    streamed = api.complete_stream(prompts, echo=True, n=2)
    assert [streamed.text(index) for index in range(4)] == texts


@pytest.mark.parametrize("logprobs", [None, 1])
def test_echo_of_the_prompt_alone(api: Api, logprobs: int | None) -> None:
    fields = {"echo": True, "max_tokens": 0, "logprobs": logprobs}
    answer = api.complete("ab<|s05|>", **fields).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab<|s05|>", "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert api.complete_stream("ab<|s05|>", **fields).text() == choice["text"]
    assert api.complete("ab<|s05|>", max_tokens=0).status_code == 400


def test_what_cannot_be_streamed_is_refused(api: Api) -> None:
    assert api.complete(echo=True, logprobs=1, n=2, stream=True).json()["error"]["param"] == "n"
    assert api.chat(prompt_logprobs=1, stream=True).json()["error"]["param"] == "prompt_logprobs"


def test_prompt_logprobs(api: Api) -> None:
    answer = api.chat(prompt_logprobs=2).json()
    entries = answer["prompt_logprobs"]
    assert len(entries) == answer["usage"]["prompt_tokens"]
    assert entries[0] is None
    trigger = str(scripted.vocabulary().added["<|s05|>"])
    assert entries[1][trigger] == {"logprob": -0.25, "rank": 1, "decoded_token": "<|s05|>"}
    choice = api.complete(prompt_logprobs=0).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == 2
    assert all(value["rank"] is None for value in choice["prompt_logprobs"][1].values())
