"""Every reason of ``headrace:requests_rejected`` is what some refusal is counted as, and none is counted twice."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_harness import Api, chat_body
from scripted_engine import ScriptedEngine

import headrace
from headrace.config import ApiKey
from headrace.errors import (
    ContextLengthExceeded,
    InternalFault,
    InvalidRequest,
    NotReady,
    QueueFull,
    RequestTimeout,
)
from headrace.gateway.metrics import REJECT_REASONS

JSON = {"content-type": "application/json"}
Act = Callable[[Api], Any]


def refused(error: Exception) -> Act:
    """The engine refuses a chat with this error."""

    def act(api: Api) -> None:
        api.engine.refusal = error  # type: ignore[assignment]
        api.chat()

    return act


def reload(api: Api) -> None:
    async def no() -> str:
        return "it does not fit"

    api.engine.reload = no  # type: ignore[method-assign, assignment]
    api.post("/v1/models/reload", {})


def in_strange_encoding(api: Api) -> None:
    api.send("POST", "/v1/chat/completions", content=b"{}", headers={**JSON, "content-encoding": "zstd"})


PROVOKED: dict[str, Act] = {
    "queue_full": refused(QueueFull("full")),
    "not_ready": refused(NotReady("not now")),
    "context_length_exceeded": refused(ContextLengthExceeded("too long")),
    "invalid_request_error": lambda api: api.chat(temperature="hot"),
    "invalid_prompt": refused(InvalidRequest("empty", code="invalid_prompt")),
    "invalid_grammar": refused(InvalidRequest("no form", code="invalid_grammar")),
    "model_not_found": lambda api: api.chat(model="other"),
    "not_found": lambda api: api.send("GET", "/nowhere"),
    "method_not_allowed": lambda api: api.send("GET", "/v1/chat/completions"),
    "unsupported_encoding": in_strange_encoding,
    "request_not_found": lambda api: api.post("/v1/requests/none/cancel", {}),
    "response_not_found": lambda api: api.send("GET", "/v1/responses/resp_none"),
    "previous_response_not_found": lambda api: api.post(
        "/v1/responses", {"model": "scripted", "input": "x", "previous_response_id": "resp_none"}
    ),
    "reload_failed": reload,
    "timeout": refused(RequestTimeout("late")),
    "queue_timeout": refused(RequestTimeout("late", code="queue_timeout")),
    "internal_error": refused(InternalFault("broken")),
}


@pytest.mark.parametrize("reason", PROVOKED)
def test_a_refusal_is_counted_once_under_its_reason(
    reason: str, make_api: Callable[..., Api], tmp_path: Path
) -> None:
    api = make_api(ScriptedEngine(), response_store_mb=1, response_store_file=str(tmp_path / "responses"))
    PROVOKED[reason](api)
    assert api.metrics.rejections == [reason]
    assert api.metrics.reasons == []


def test_keys_rates_and_sizes(make_api: Callable[..., Api]) -> None:
    api = make_api(api_keys=(ApiKey("a", "k"),), rate_limit_per_min=1, max_body_bytes=100)
    key = {"authorization": "Bearer k"}
    api.post("/tokenize", chat_body("x"))
    api.post("/tokenize", {"prompt": "x" * 200}, headers=key)
    api.post("/tokenize", {"prompt": "x"}, headers=key)
    assert api.metrics.rejections == ["invalid_api_key", "request_too_large", "rate_limit"]


def test_all_reasons_are_provoked_and_all_codes_are_reasons() -> None:
    elsewhere = {"invalid_api_key", "request_too_large", "rate_limit", "other"}
    assert {*PROVOKED, *elsewhere} == set(REJECT_REASONS)
    only_of_accepted = {"request_cancelled"}
    assert set(codes()) - {"rate_limit_exceeded"} - only_of_accepted <= set(REJECT_REASONS)


def codes() -> list[str]:
    """Every code that an error class or a raised error has in the source."""
    found: list[str] = []
    for path in Path(headrace.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword):
                name, value = node.arg, node.value
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, node.value
            else:
                continue
            if name == "code" and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.append(value.value)
    return found
