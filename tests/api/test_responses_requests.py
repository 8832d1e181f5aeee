"""What ``/v1/responses`` takes in, refuses, and lists."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_harness import Api
from sdk_clients import tool_names

from headrace.config import ApiKey

PATH = "/v1/responses"
TOOLS = tool_names()["responses"]
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "3"}


def prompt(api: Api) -> str:
    """The last prompt, as text."""
    return api.app.state.services.text.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


def test_items_become_the_chat(api: Api) -> None:
    thought = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "t"}],
    }
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}
    given = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        thought,
        said,
        CALL,
        {**OUTPUT, "output": [{"type": "input_text", "text": "3"}]},
        {"role": "developer", "content": "<|s05|>"},
    ]
    answer = api.post(PATH, {"input": given, "instructions": "be brief", "max_output_tokens": 20}).json()
    assert answer["output"][0]["content"][0]["text"] == "ABCDEFGH"
    text = prompt(api)
    assert text.startswith("<|system|>be brief<|im_end|><|user|>ab<|im_end|><|assistant|>yes[{")
    assert text.endswith("<|tool|>3<|im_end|><|system|><|s05|><|im_end|><|assistant|>")


BAD: list[tuple[str, Any, str]] = [
    ("input", None, "input"),
    ("input", [], "input"),
    ("input", 5, "input"),
    ("input", [{"type": "item_reference", "id": "x"}], "item_reference"),
    ("input", [{"type": [], "role": "user", "content": "x"}], "input[0].type []"),
    ("input", [{"type": {}, "role": "user", "content": "x"}], "input[0].type {}"),
    ("input", [{"type": "reasoning", "summary": [], "content": False}], "input[0].content"),
    ("input", [{"type": "reasoning", "summary": "so"}], "input[0].summary"),
    ("input", [{"role": "wizard", "content": "x"}], "wizard"),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input_image"),
    ("input", [{"type": "function_call", "call_id": "x"}], "name"),
    ("input", [{"type": "function_call_output", "call_id": "x"}], "output"),
    ("model", "none", "none"),
    ("max_output_tokens", 0, "0"),
    ("temperature", 3, "3"),
    ("tools", [{"type": "web_search"}], "web_search"),
    ("tools", [{"type": "function"}], "name"),
    ("tools", [{"type": "namespace", "name": "n", "description": [], "tools": TOOLS}], "description"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "name": "f"}, "tool_choice"),
    ("text", {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}, "text"),
    ("text", {"format": {"type": "yaml"}}, "text"),
    ("text", {"verbosity": "high"}, "verbosity"),
    ("reasoning", {"effort": "high"}, "reasoning"),
    ("reasoning", {"effort": "huge"}, "huge"),
    ("reasoning", {"mode": "pro"}, "reasoning.mode"),
    ("reasoning", {"context": "current_turn"}, "reasoning.context"),
    ("previous_response_id", "resp_x", "resp_x"),
    ("store", True, "store"),
    ("background", True, "background"),
    ("truncation", "maybe", "maybe"),
    ("include", ["message.output_text.logprobs"], "include"),
    ("include", ["x"], "include"),
    ("top_logprobs", 3, "top_logprobs"),
    ("conversation", "c", "conversation"),
    ("stream_options", {"include_obfuscation": False}, "stream"),
    ("metadata", {"a": 1}, "metadata"),
    ("thinking_token_budget", 4, "reasoning parser"),
]


@pytest.mark.parametrize(("field", "value", "word"), BAD)
def test_refusals_name_the_field(api: Api, field: str, value: Any, word: str) -> None:
    answer = api.post(PATH, {"input": "x"} | {field: value})
    assert answer.status_code == (404 if field == "model" else 400), answer.text
    error = answer.json()["error"]
    assert error["param"].startswith(field) and word in error["message"], error
    assert api.engine.requests == []


def test_an_item_whose_type_is_null_is_a_message(api: Api) -> None:
    assert api.post(PATH, {"input": [{"type": None, "role": "user", "content": "so"}]}).status_code == 200
    assert prompt(api) == "<|user|>so<|im_end|><|assistant|>"


def test_a_prompt_that_does_not_fit(api: Api) -> None:
    for truncation in ("disabled", "auto"):
        answer = api.post(PATH, {"input": "x" * 600, "truncation": truncation})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert answer.json()["error"]["param"] == "input"


def test_hints_are_accepted_and_unknown_fields_counted(api: Api) -> None:
    fields = {
        "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "prompt_cache_key": "k",
        "truncation": "auto",
        "include": ["reasoning.encrypted_content"], "store": False,
        "reasoning": {"summary": "auto", "context": "all_turns", "mode": "standard"},
        "tools": TOOLS,
        "parallel_tool_calls": True, "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }  # fmt: skip
    answer = api.post(PATH, {"input": "<|s05|>", "max_output_tokens": 20, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"] == {"a": "b"}
    assert api.metrics.unknown == 0
    api.post(PATH, {"input": "<|s05|>", "max_output_tokens": 20, "frobnicate": 1})
    assert api.metrics.unknown == 1


@pytest.fixture
def storing(make_api: Callable[..., Api], tmp_path: Path) -> Api:
    keys = (ApiKey("ada", "secret-a"), ApiKey("bob", "secret-b"))
    return make_api(api_keys=keys, response_store_mb=1, response_store_file=str(tmp_path / "store"))


def test_a_key_sees_only_its_own(storing: Api) -> None:
    ada, bob = ({"x-api-key": f"secret-{letter}"} for letter in "ab")
    body = {"input": "<|s05|>", "max_output_tokens": 20}
    mine = storing.post(PATH, body, headers=ada).json()["id"]
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert storing.send(method, f"{PATH}/{mine}{path}", headers=bob).status_code == 404
    answer = storing.post(PATH, {**body, "previous_response_id": mine}, headers=bob)
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert storing.send("GET", f"{PATH}/{mine}", headers=ada).status_code == 200


def test_input_items_in_pages(storing: Api) -> None:
    ada = {"x-api-key": "secret-a"}
    given = [{"role": "user", "content": text} for text in ("a", "b", "<|s05|>")]
    mine = storing.post(PATH, {"input": given, "max_output_tokens": 20}, headers=ada).json()["id"]

    def page(query: str) -> dict[str, Any]:
        return storing.send("GET", f"{PATH}/{mine}/input_items?{query}", headers=ada).json()

    first = page("order=asc&limit=2")
    assert [item["content"][0]["text"] for item in first["data"]] == ["a", "b"]
    assert first["has_more"] and first["last_id"] == first["data"][-1]["id"]
    rest = page(f"order=asc&after={first['last_id']}")
    assert [item["content"][0]["text"] for item in rest["data"]] == ["<|s05|>"]
    assert not rest["has_more"]
    for query in ("limit=0", "limit=x", "order=up", "after=nobody"):
        assert page(query)["error"]["type"] == "invalid_request_error"
    assert storing.send("GET", f"{PATH}/{mine}?stream=true", headers=ada).status_code == 400


def test_a_broken_store_costs_no_answer(
    make_api: Callable[..., Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path))
    tmp_path.chmod(0o777)  # a folder that others may write to is refused
    api = make_api(response_store_mb=1)
    answer = api.post(PATH, {"input": "<|s05|>", "max_output_tokens": 20}).json()
    assert answer["status"] == "completed"
    assert answer["store"] is False


def test_a_store_that_cannot_be_used_is_said(
    make_api: Callable[..., Api], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is given without its copy; whoever asks for a stored one hears why not, and no paths."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "file"))
    api = make_api(response_store_mb=1)
    answer = api.post(PATH, {"input": "<|s05|>", "max_output_tokens": 20})
    assert answer.status_code == 200 and answer.json()["store"] is False
    name = f"{PATH}/{answer.json()['id']}"
    for refused in (
        api.post(PATH, {"input": "x", "previous_response_id": answer.json()["id"]}),
        api.send("GET", name),
        api.send("GET", f"{name}/input_items"),
        api.send("DELETE", name),
        api.send("POST", f"{name}/cancel"),
    ):
        error = refused.json()["error"]
        assert refused.status_code == 500 and error["code"] == "internal_error"
        assert "stored responses cannot be used" in error["message"] and str(tmp_path) not in refused.text
