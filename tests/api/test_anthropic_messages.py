"""What ``/v1/messages`` takes in: system, blocks, tool loops, thinking, errors; and its stream's keep-alives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from http_harness import CONFIG, MODEL, Api
from sdk_clients import tool_names

from headrace.config import ApiKey
from headrace.errors import QueueFull
from headrace.gateway.prompt_run import PipelineLimits

TOOLS = tool_names()["anthropic"]
TEXT = {"type": "text", "text": "<|s05|>"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]}
MESSAGES = "/v1/messages"


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    given = list(messages) or [{"role": "user", "content": "<|s05|>"}]
    return {"model": MODEL, "max_tokens": 40, "messages": given, **fields}


def said(api: Api, *messages: Any, **fields: Any) -> str:
    answer = api.post(MESSAGES, body(*messages, **fields))
    assert answer.status_code == 200, answer.text
    return "".join(block["text"] for block in answer.json()["content"])


def prompt(api: Api) -> str:
    """The last prompt, as text."""
    return api.app.state.services.text.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize(
    "results",
    [
        [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}],
        [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}]}],
        [{"type": "tool_result", "tool_use_id": "t1"}],
        [{"type": "tool_result", "tool_use_id": "t1", "content": []}],
        [{"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}],
        [{"type": "tool_result", "tool_use_id": i, "content": "3"} for i in ("t1", "t2")],
        [{"type": "tool_result", "tool_use_id": "unknown", "content": "3"}],
    ],
)
def test_tool_loops(api: Api, results: list[dict[str, Any]]) -> None:
    user = {"role": "user", "content": "x"}
    assert said(api, user, USE, {"role": "user", "content": [*results, TEXT]}, tools=TOOLS) == "ABCDEFGH"
    if any(result.get("is_error") for result in results):
        assert "<|tool|>Error: no<|im_end|>" in prompt(api)


def test_thinking_blocks_of_the_history(api: Api) -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "anything"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "yes"},
    ]
    turn = {"role": "assistant", "content": blocks}
    assert said(api, {"role": "user", "content": "x"}, turn, {"role": "user", "content": [TEXT]}) == "ABCDEFGH"


def test_system_in_all_its_forms(api: Api) -> None:
    said(api, system="ab")
    whole = prompt(api)
    cached = {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}
    said(api, system=[{"type": "text", "text": "a"}, cached])
    assert prompt(api) == whole and whole.startswith("<|system|>ab<|im_end|>")
    middle = [{"role": "user", "content": "x"}, {"role": "system", "content": "be brief"}]
    said(api, *middle, {"role": "user", "content": "<|s05|>"})
    assert prompt(api).startswith("<|user|>x<|im_end|><|system|>be brief<|im_end|>")


def test_a_final_assistant_message_is_continued(api: Api) -> None:
    said(api, {"role": "user", "content": "<|s05|>"}, {"role": "assistant", "content": "AB"})
    assert prompt(api).endswith("<|assistant|>AB")


def test_hints_are_accepted(api: Api) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    said(
        api, thinking=thinking, metadata={"user_id": "u"}, context_management={}, service_tier="auto",
        betas=["x"], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, tools=TOOLS,
    )  # fmt: skip
    assert api.post(MESSAGES + "?beta=true", body(), headers={"anthropic-beta": "x-2025"}).status_code == 200
    assert api.metrics.unknown == 0
    said(api, thinking={"type": "adaptive"}, output_config={"effort": "high"}, frobnicate=1)
    assert api.metrics.unknown == 1


def test_thinking_that_is_off_is_left_out(make_api: Callable[..., Api]) -> None:
    api = make_api(reasoning_parser="qwen3")
    user = {"role": "user", "content": "<|s03|>"}
    assert said(api, user, thinking={"type": "disabled"}) == "42"
    streamed = api.post(MESSAGES, body(user, thinking={"type": "disabled"}, stream=True)).text
    assert "plan" not in streamed and '"thinking_tokens":4' in streamed


@pytest.mark.parametrize("kind", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 1024}])
def test_thinking_may_be_shown_without_its_text(make_api: Callable[..., Api], kind: dict[str, Any]) -> None:
    api = make_api(reasoning_parser="qwen3")
    asked = body({"role": "user", "content": "<|s03|>"}, thinking={**kind, "display": "omitted"})
    message = api.post(MESSAGES, asked).json()
    block, answer = message["content"]
    assert (block["type"], block["thinking"]) == ("thinking", "") and block["signature"]
    assert answer == {"type": "text", "text": "42"}
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == 4
    events = api.post(MESSAGES, {**asked, "stream": True}).text.split("\n\n")
    contents = [msgspec.json.decode(event.partition("data: ")[2]) for event in events if event]
    kinds = [content["delta"]["type"] for content in contents if content["type"] == "content_block_delta"]
    assert kinds[0] == "signature_delta" and set(kinds[1:]) == {"text_delta"}
    whole = api.post(MESSAGES, {**asked, "thinking": {**kind, "display": "summarized"}}).json()
    assert whole["content"][0]["thinking"] == "plan it"


RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "3"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
BAD: list[tuple[str, Any]] = [
    ("max_tokens", None),
    ("max_tokens", 0),
    ("model", None),
    ("messages", None),
    ("messages", []),
    ("messages", [{"role": "wizard", "content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [IMAGE]}]),
    ("messages", [{"role": "user", "content": "x"}, USE]),
    ("messages", [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": "x"}]}]),
    ("messages", [{"role": "user", "content": [{**RESULT, "content": False}]}]),
    ("messages", [{"role": "user", "content": [{**RESULT, "content": {}}]}]),
    ("messages", [{"role": "user", "content": [{**RESULT, "is_error": "no"}]}]),
    ("system", [{"type": "image"}]),
    ("temperature", 1.5),
    ("top_k", -1),
    ("stop_sequences", [""]),
    ("tools", [{"name": "f"}]),
    ("tools", [{"type": "bash_20250124", "name": "bash"}]),
    ("tools", [{"name": "f", "input_schema": {}}] * 2),
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "tool", "name": "f"}),
    ("tool_choice", {"type": "sometimes"}),
    ("thinking", {"type": "enabled"}),
    ("thinking", {"type": "sometimes"}),
    ("thinking", {"type": "adaptive", "display": "small"}),
    ("output_config", {"format": {"type": "yaml"}}),
    ("mcp_servers", [{"name": "x"}]),
    ("container", "c"),
]


@pytest.mark.parametrize(("field", "value"), BAD)
def test_refusals_have_the_dialects_shape(api: Api, field: str, value: Any) -> None:
    for path in (MESSAGES, MESSAGES + "/count_tokens"):
        answer = api.post(path, body() | {field: value})
        sampling = field in ("max_tokens", "temperature", "top_k", "stop_sequences")
        if sampling and path != MESSAGES:
            assert answer.status_code == 200
            continue
        assert answer.status_code == 400, answer.text
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert field.partition("[")[0] in answer.json()["error"]["message"].replace("message ", "messages")
    assert api.engine.requests == []


def test_errors_of_all_layers(make_api: Callable[..., Api]) -> None:
    api = make_api(api_keys=(ApiKey("ada", "secret"),), max_body_bytes=2000)
    key = {"x-api-key": "secret"}

    def error(path: str = MESSAGES, headers: dict[str, str] = key, **kwargs: Any) -> tuple[int, str]:
        answer = api.send("POST", path, headers=headers, **kwargs)
        assert set(answer.json()) == {"type", "error", "request_id"}
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == answer.json()["request_id"]
        return answer.status_code, answer.json()["error"]["type"]

    assert error(headers={}, json=body()) == (401, "authentication_error")
    assert error(content=b"{") == (400, "invalid_request_error")
    assert error(content=b"x" * 3000) == (413, "request_too_large")
    assert error(path=MESSAGES + "/x", json={}) == (404, "not_found_error")
    assert error(json=body(model="none")) == (404, "not_found_error")
    assert error(json=body({"role": "user", "content": "x" * 600})) == (400, "invalid_request_error")
    api.engine.refusal = QueueFull("full", retry_after_s=2)
    assert error(json=body()) == (429, "rate_limit_error")
    api.engine.refusal = None
    api.engine.set_status("starting")
    assert error(json=body()) == (529, "overloaded_error")


def test_a_full_context_is_named_in_the_words_clients_know(api: Api) -> None:
    answer = api.post(MESSAGES, body({"role": "user", "content": "x" * 600}))
    message = answer.json()["error"]["message"]
    assert message.startswith("prompt is too long") and "603" in message and "512" in message


def test_pings_while_nothing_happens(text_side: Any) -> None:
    api = Api(text_side, msgspec.structs.replace(CONFIG, tool_call_parser="hermes"))
    shared = api.app.state.services.pipeline._shared
    object.__setattr__(shared, "limits", PipelineLimits(keep_alive_s=0.02))
    api.engine.paused = True

    async def scene() -> str:
        import asyncio

        task = asyncio.create_task(api.client.post(MESSAGES, json=body(stream=True)))
        await asyncio.sleep(0.1)
        api.engine.paused = False
        return (await task).text

    text = api.run(scene())
    assert text.startswith("event: message_start\n")
    assert text.count("event: ping\n") >= 2
    api.close()


def test_pings_while_a_call_is_held_back(text_side: Any) -> None:
    """A call is shown when it is complete; until then tokens come and nothing can be sent."""
    api = Api(text_side, msgspec.structs.replace(CONFIG, tool_call_parser="hermes"))
    shared = api.app.state.services.pipeline._shared
    object.__setattr__(shared, "limits", PipelineLimits(keep_alive_s=1e-9))
    user = {"role": "user", "content": "<|s09|>"}
    events = api.post(MESSAGES, body(user, tools=TOOLS, stream=True)).text.split("\n\n")
    first_call = next(i for i, event in enumerate(events) if '"tool_use"' in event)
    assert any(event.startswith("event: ping") for event in events[1:first_call])
    api.close()
