"""One pipeline: what is asked for in different dialects reaches the engine as the same request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from http_harness import MODEL, Api

from headrace.request import EngineRequest

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "<|s05|>"}
PATHS = {"chat": "/v1/chat/completions", "anthropic": "/v1/messages", "responses": "/v1/responses"}
BASE: dict[str, dict[str, Any]] = {
    "chat": {"model": MODEL, "messages": [USER], "max_tokens": 20},
    "anthropic": {"model": MODEL, "messages": [USER], "max_tokens": 20},
    "responses": {"model": MODEL, "input": "<|s05|>", "max_output_tokens": 20},
}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"tools": [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]},
    "anthropic": {"tools": [{"name": "add", "input_schema": SCHEMA}]},
    "responses": {"tools": [{"type": "function", "name": "add", "parameters": SCHEMA}]},
}
FORMATS: dict[str, dict[str, Any]] = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
}
FORCED: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": "required"},
    "anthropic": {"tool_choice": {"type": "any"}},
    "responses": {"tool_choice": "required"},
}
NAMED: dict[str, dict[str, Any]] = {
    "chat": {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    "anthropic": {"tool_choice": {"type": "tool", "name": "add"}},
    "responses": {"tool_choice": {"type": "function", "name": "add"}},
}


@pytest.fixture
def parsing(make_api: Callable[..., Api]) -> Api:
    return make_api(tool_call_parser="hermes", reasoning_parser="qwen3")


def asked(api: Api, dialect: str, *changes: dict[str, dict[str, Any]], **fields: Any) -> EngineRequest:
    body = dict(BASE[dialect])
    for change in changes:
        body |= change[dialect]
    answer = api.post(PATHS[dialect], {**body, **fields})
    assert answer.status_code == 200, answer.text
    return api.engine.requests[-1]


@pytest.mark.parametrize("changes", [[], [TOOLS], [FORMATS], [TOOLS, FORCED], [TOOLS, NAMED]])
def test_prompts_and_grammars(parsing: Api, changes: list[dict[str, dict[str, Any]]]) -> None:
    requests = [asked(parsing, dialect, *changes) for dialect in PATHS]
    assert len({tuple(request.prompt_token_ids) for request in requests}) == 1
    grammars = [request.params.grammar for request in requests]
    assert grammars[0] == grammars[1] == grammars[2]
    assert (grammars[0] is not None) == (changes not in ([], [TOOLS]))


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.5, "top_p": 0.25, "top_k": 3}, {"temperature": 0}, {"stop": ["x"]}]
)
def test_sampling(parsing: Api, fields: dict[str, Any]) -> None:
    spelled = {"anthropic": {"stop_sequences" if name == "stop" else name: v for name, v in fields.items()}}
    params = [asked(parsing, dialect, **spelled.get(dialect, fields)).params for dialect in PATHS]
    shown = {(p.temperature, p.top_p, p.top_k, p.max_tokens, p.stop_token_ids) for p in params}
    assert len(shown) == 1
