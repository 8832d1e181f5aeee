"""``--stream-interval`` cuts the stream of every dialect, and nothing else: what the engine is asked for stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from http_harness import MODEL, Api
from support.scripted import expected_text

TOKENS = 20
CHAT = {"messages": [{"role": "user", "content": "<|s01|>"}], "max_tokens": TOKENS}
# Path, body, and the text of an event that carries some.
DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], str | None]]] = {
    "chat": (
        "/v1/chat/completions",
        CHAT,
        lambda event: event["choices"][0]["delta"].get("content") if event.get("choices") else None,
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "<|user|><|s01|><|im_end|><|assistant|>", "max_tokens": TOKENS},
        lambda event: event["choices"][0]["text"] if event.get("choices") else None,
    ),
    "messages": (
        "/v1/messages",
        CHAT,
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else None,
    ),
    "responses": (
        "/v1/responses",
        {"input": "<|s01|>", "max_output_tokens": TOKENS},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else None,
    ),
}


def streamed(api: Api, dialect: str) -> list[str]:
    """Texts of the events that have some."""
    path, body, text_of = DIALECTS[dialect]
    answer = api.post(path, {"model": MODEL, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    return [text for event in events if (text := text_of(event))]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("interval", [1, 4, 100])
def test_every_dialect_is_cut_alike(make_api: Callable[..., Api], dialect: str, interval: int) -> None:
    texts = streamed(make_api(stream_interval=interval), dialect)
    assert "".join(texts) == expected_text("s01", TOKENS)
    assert texts[0] == " one"  # nobody waits longer for the first token
    assert len(texts) == 1 + -(-(TOKENS - 1) // interval)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_engine_is_asked_for_the_same(make_api: Callable[..., Api], dialect: str) -> None:
    asked = []
    for interval in (1, 100):
        api = make_api(stream_interval=interval)
        streamed(api, dialect)
        [request] = api.engine.requests
        params = msgspec.structs.replace(request.params, seed=0)  # drawn anew for each request
        asked.append(msgspec.structs.replace(request, id="", params=params))
    assert asked[0] == asked[1]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_thinking_and_calls_keep_the_interval(make_api: Callable[..., Api], dialect: str) -> None:
    """An answer parser stands between tokens and events here; the cut is the same."""
    api = make_api(stream_interval=4, reasoning_parser="qwen3", tool_call_parser="hermes")
    texts = streamed(api, dialect)
    assert "".join(texts) == expected_text("s01", TOKENS)
    assert len(texts) == 1 + -(-(TOKENS - 1) // 4)
