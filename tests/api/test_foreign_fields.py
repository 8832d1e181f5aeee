"""Fields, messages and errors across the dialects: nothing is ignored here that another route honours, what older
clients call things is understood, and every route speaks of its own fields."""

from __future__ import annotations

from typing import Any

import pytest
from http_harness import MODEL, Api, chat_body, completion_body

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGE = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "<|s05|>"}]}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat_body("<|s05|>"),
    COMPLETIONS: completion_body("<|s05|><|assistant|>"),
    "/v1/responses": {"model": MODEL, "input": "<|s05|>"},
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": MESSAGE,
}


def test_what_history_may_say_in_older_words(api: Api) -> None:
    def asked(*middle: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": "add"}, *middle, {"role": "user", "content": "<|s05|>"}]
        return api.post(CHAT, chat_body("") | {"messages": messages}).json()

    def prompt(*middle: dict[str, Any]) -> int:
        return int(asked(*middle)["usage"]["prompt_tokens"])

    function = {"name": "add", "arguments": '{"a": 1}'}
    new = prompt(
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "5"},
    )
    old = prompt(
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "name": "add", "content": "5"},
    )
    assert old == new > prompt({"role": "assistant", "content": None}, {"role": "tool", "content": "5"})
    refusal = prompt({"role": "assistant", "content": None, "refusal": "I will not."})
    assert refusal == prompt({"role": "assistant", "content": "I will not."})
    spoken = asked({"role": "assistant", "content": None, "audio": {"id": "x"}})
    assert "audio" in spoken["error"]["message"] and spoken["error"]["param"] == "messages"


FOREIGN: list[tuple[str, str, object]] = [
    ("/v1/responses", "max_tokens", 5),
    ("/v1/responses", "messages", [{"role": "user", "content": "x"}]),
    ("/v1/responses", "logprobs", True),
    ("/v1/responses", "ignore_eos", True),
    ("/v1/responses", "reasoning_effort", "low"),
    ("/v1/responses", "n", 2),
    ("/v1/responses", "skip_special_tokens", False),
    (CHAT, "spaces_between_special_tokens", False),
    ("/v1/responses", "bad_words", ["x"]),
    ("/v1/messages", "stop", ["D"]),
    ("/v1/messages", "seed", 0),
    ("/v1/messages", "response_format", {"type": "json_object"}),
    ("/v1/messages", "max_completion_tokens", 5),
    ("/v1/messages/count_tokens", "prompt", "x"),
    (COMPLETIONS, "chat_template_kwargs", {"enable_thinking": False}),
    (COMPLETIONS, "continue_final_message", True),
    (CHAT, "prompt", "x"),
]


@pytest.mark.parametrize(("path", "field", "value"), FOREIGN)
def test_fields_of_other_routes_are_not_ignored(api: Api, path: str, field: str, value: object) -> None:
    body = BODIES[path] | {field: value}
    answer = api.post(path, body)
    assert answer.status_code == 400 and field in answer.json()["error"]["message"], answer.text
    assert api.metrics.unknown == 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", COMPLETIONS, CHAT])
def test_fields_of_other_routes_that_ask_for_nothing_pass(api: Api, path: str) -> None:
    nothing: dict[str, Any] = {
        "n": 1, "best_of": 1, "echo": False, "tools": [], "ignore_eos": False, "skip_special_tokens": True,
        "add_generation_prompt": True, "min_tokens": 0, "presence_penalty": 0, "repetition_penalty": 1.0,
        "response_format": {"type": "text"}, "logit_bias": {}, "top_logprobs": 0, "verbosity": "medium",
        "include_reasoning": True, "suffix": "", "guided_json": None,
    }  # fmt: skip
    answer = api.post(path, nothing | BODIES[path])
    assert answer.status_code == 200, answer.text
    assert api.metrics.unknown == 0


TOOL = {"name": "add", "input_schema": {"type": "object"}}
IN_OWN_WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/messages", {"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name must be a string"),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, 'tool_choice.type is "any", but tools declares none'),
    (
        "/v1/messages",
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": "x"}},
        "tool_choice.disable_parallel_tool_use must be true or false",
    ),
    ("/v1/messages", {"tools": [{**TOOL, "name": ""}]}, "tools[0].name must be"),
    ("/v1/messages", {"tools": [{**TOOL, "description": 5}]}, "tools[0].description must be"),
    (
        "/v1/messages",
        {"tools": [{**TOOL, "allowed_callers": ["code_execution"]}]},
        "tools[0].allowed_callers must",
    ),
    (
        "/v1/responses",
        {"tools": [{"type": "function", "name": "x", "allowed_callers": ["programmatic"]}]},
        "tools[0].allowed_callers must",
    ),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is"),
    ("/v1/messages", {"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type must"),
    ("/v1/responses", {"tools": [{"type": "function"}]}, "tools[0].name must be"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "x", "parameters": 5}]}, "tools[0].parameters must"),
    ("/v1/responses", {"tool_choice": {"type": "function"}}, '{"type": "function", "name": …}'),
    (
        "/v1/responses",
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        "text.format.schema is required",
    ),
]


@pytest.mark.parametrize(("path", "fields", "words"), IN_OWN_WORDS)
def test_each_dialect_refuses_in_its_own_words(api: Api, path: str, fields: dict[str, Any], words: str) -> None:
    answer = api.post(path, BODIES[path] | fields)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
