"""Thinking and tool calls in chat answers: the right field, in both modes, at every cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from http_harness import CONFIG, Api, StreamedAnswer, chat_body
from support import scripted

from headrace.api.grammar_check import GrammarCheck
from headrace.api.openai import constraints
from headrace.errors import InvalidRequest, NotReady
from headrace.params import Grammar
from headrace.text import model_text

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "mul")
]
SCRIPTS = ("s00", "s02", "s03", "s04", "s06", "s08", "s09", "s10", "s11", "s12")


@pytest.fixture
def parsing(make_api: Callable[..., Api]) -> Api:
    return make_api(tool_call_parser="hermes", reasoning_parser="qwen3")


def joined(streamed: StreamedAnswer) -> dict[str, Any]:
    """A stream's deltas put together as clients do it."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for choice in streamed.choices():
        delta = choice["delta"]
        for field in ("role", "content", "reasoning_content", "reasoning"):
            if delta.get(field) is not None:
                message[field] = message.get(field, "") + delta[field]
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """What must be equal in both modes: no ids, nothing that is empty or null."""
    plain = {name: value for name, value in message.items() if value}
    if "tool_calls" in plain:
        plain["tool_calls"] = [call["function"] for call in plain["tool_calls"]]
    return plain


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("chunk", [1, 5])
def test_streamed_equals_single_at_every_cut(parsing: Api, script: str, chunk: int) -> None:
    parsing.engine.chunk = chunk
    for max_tokens in range(1, len(scripted.SCRIPTS[script].pieces) + 2):
        fields: dict[str, Any] = {"tools": TOOLS, "max_tokens": max_tokens}
        answer = parsing.chat(f"<|{script}|>", **fields).json()
        streamed = parsing.chat_stream(f"<|{script}|>", stream_options={"include_usage": True}, **fields)
        choice = answer["choices"][0]
        assert without_ids(joined(streamed)) == without_ids(choice["message"])
        assert streamed.finish_reasons() == [choice["finish_reason"]]
        assert streamed.usage == answer["usage"]
        details = answer["usage"]["completion_tokens_details"]
        assert bool(details["reasoning_tokens"]) == bool(choice["message"]["reasoning_content"])
        assert details["reasoning_tokens"] <= answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic"])
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}])
@pytest.mark.parametrize("properties", [{"x": {"type": "nonsense"}}, 5])
def test_a_tool_that_cannot_be_kept_to_is_named(
    make_api: Callable[..., Api], parser: str, fields: dict[str, Any], properties: Any
) -> None:
    api = make_api(tool_call_parser=parser)
    odd = {"name": "odd", "parameters": {"type": "object", "properties": properties}}
    answer = api.chat(tools=[TOOLS[0], {"type": "function", "function": odd}, TOOLS[1]], **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == next(iter(fields))
    assert error["message"].startswith(f'{error["param"]} cannot be kept to: the tool "odd": '), error
    assert api.chat(tools=TOOLS, **fields).status_code == 200


@pytest.mark.parametrize("first", [constraints.NAMING_S + 1.0, NotReady("others come first", retry_after_s=1.0)])
def test_finding_the_tool_takes_bounded_time(
    parsing: Api, monkeypatch: pytest.MonkeyPatch, first: float | NotReady
) -> None:
    """Else one request of many tools that take long each would hold the compiler for minutes."""
    asked: list[str] = []
    now = [0.0]

    async def check(self: object, grammar: Grammar, param: str, part: str = "") -> None:
        asked.append(part)
        if not part:
            raise InvalidRequest(f"{param} cannot be kept to: it is too complex", param=param)
        if isinstance(first, NotReady):
            raise first
        now[0] += first

    monkeypatch.setattr(GrammarCheck, "check", check)
    monkeypatch.setattr(constraints, "time", SimpleNamespace(monotonic=lambda: now[0]))
    answer = parsing.chat(tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "tool_choice cannot be kept to: it is too complex"
    assert len(TOOLS) > 1 and len(asked) == 2  # the whole, and the first tool


def test_an_odd_form_is_not_blamed_on_a_tool(parsing: Api) -> None:
    answer = parsing.chat(tools=TOOLS, guided_json={"type": "nonsense"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("guided_json cannot be kept to: ")
    assert "the tool" not in answer.json()["error"]["message"]


def test_thinking_has_a_field_of_its_own(parsing: Api) -> None:
    message = parsing.chat("<|s03|>").json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("plan it", "plan it", "42")
    for choice in parsing.chat_stream("<|s03|>").choices():
        assert not any(mark in str(choice["delta"]) for mark in ("<", "thi", "nk>"))


def test_a_call_with_text_before_it(parsing: Api) -> None:
    choice = parsing.chat("<|s04|>", tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == "Sure. "
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1, "s": "é\\n"}',
    }
    assert choice["finish_reason"] == "tool_calls"
    streamed = parsing.chat_stream("<|s04|>", tools=TOOLS)
    assert "tool_call>" not in streamed.raw
    pieces = [call for c in streamed.choices() for call in c["delta"].get("tool_calls", ())]
    assert len(pieces) > 3, "arguments stream"


def test_two_calls_and_only_the_first(parsing: Api) -> None:
    choice = parsing.chat("<|s09|>", tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] is None
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    assert [first["function"], second["function"]] == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "mul", "arguments": '{"b": 2}'},
    ]
    choice = parsing.chat("<|s09|>", tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
    assert choice["finish_reason"] == "tool_calls"
    assert parsing.engine.aborted, "the engine does not go on for nobody"


def test_a_broken_call_is_what_the_model_wrote(parsing: Api) -> None:
    choice = parsing.chat("<|s08|>", tools=TOOLS).json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_text(parsing: Api, fields: dict[str, Any]) -> None:
    choice = parsing.chat("<|s04|>", **fields).json()["choices"][0]
    assert choice["message"]["content"] == scripted.expected_text("s04")
    assert choice["finish_reason"] == "stop"


def test_parsers_that_are_off_leave_the_text(make_api: Callable[..., Api]) -> None:
    api = make_api(tool_call_parser="none", reasoning_parser="none")
    for script in ("s03", "s04", "s10"):
        message = api.chat(f"<|{script}|>", tools=TOOLS).json()["choices"][0]["message"]
        assert message["content"] == scripted.expected_text(script)
        assert "reasoning_content" not in message


def test_reasoning_can_be_left_out(parsing: Api) -> None:
    message = parsing.chat("<|s03|>", include_reasoning=False).json()["choices"][0]["message"]
    assert message["content"] == "42" and "reasoning_content" not in message
    assert "plan" not in parsing.chat_stream("<|s03|>", include_reasoning=False).raw


def test_a_block_that_the_template_opens(scripted_folder: Any) -> None:
    api = Api(model_text.load(scripted_folder("think_open")), CONFIG)  # its template names the parser
    for max_tokens, thought, content in ((1, "plan", ""), (2, "plan it", ""), (40, "plan it", "42")):
        answer = api.chat("<|s11|>", max_tokens=max_tokens).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (thought, content)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == min(max_tokens, 2)
        assert joined(api.chat_stream("<|s11|>", max_tokens=max_tokens))["reasoning_content"] == thought
    api.close()


def test_switches_of_the_template(scripted_folder: Any) -> None:
    template = scripted.chat_template().replace(
        "{% if add_generation_prompt %}<|assistant|>",
        "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>\n{% endif %}",
    )
    file = scripted_folder("plain").parent / "switch.jinja"
    file.write_text(template)
    api = Api(model_text.load(scripted_folder("plain"), str(file)), CONFIG)

    def thought(script: str, **fields: Any) -> tuple[Any, Any]:
        message = api.chat(f"<|{script}|>", **fields).json()["choices"][0]["message"]
        return message["reasoning_content"], message["content"]

    on, off = {"enable_thinking": True}, {"enable_thinking": False}
    assert thought("s11", chat_template_kwargs=on) == ("plan it", "42")
    assert thought("s11", reasoning_effort="low") == ("plan it", "42")
    assert thought("s05", chat_template_kwargs=off) == (None, "ABCDEFGH")
    assert thought("s05", reasoning_effort="none") == (None, "ABCDEFGH")
    api.close()


def test_a_continued_message_may_stand_in_a_block(parsing: Api) -> None:
    body = chat_body("<|s05|>", continue_final_message=True)
    body["messages"].append({"role": "assistant", "content": "<think>\n"})
    message = parsing.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "ABCDEFGH")


@pytest.fixture
def thinking(scripted_folder: Any) -> Iterator[Api]:
    """Its template opens a block; a line break makes the scripts begin again."""
    api = Api(model_text.load(scripted_folder("think_open")), CONFIG)
    yield api
    api.close()


@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_a_thinking_budget_ends_the_block(thinking: Api, chunk: int) -> None:
    thinking.engine.chunk = chunk
    fields: dict[str, Any] = {"thinking_token_budget": 3, "max_tokens": 60}
    answer = thinking.chat("<|s05|>", **fields).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("ABC", "ABCDEFGH")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 3 + len("\n</think>\n\n") + 9
    first, second = thinking.engine.requests
    assert second.prompt_token_ids == first.prompt_token_ids
    assert bytes(second.emitted[0]) == b"ABC\n</think>\n\n"
    assert thinking.metrics.forced == len("\n</think>\n\n")
    assert thinking.engine.running == 0
    streamed = thinking.chat_stream("<|s05|>", stream_options={"include_usage": True}, **fields)
    assert without_ids(joined(streamed)) == without_ids(message)
    assert streamed.usage == answer["usage"]
    assert thinking.engine.running == 0


def test_a_budget_that_does_not_fit_cuts_nothing(thinking: Api) -> None:
    message = thinking.chat("<|s05|>", thinking_token_budget=3, max_tokens=10).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "ABCDEFGH"
    assert len(thinking.engine.requests) == 1


def test_budgets_of_the_other_dialects_and_of_the_server(scripted_folder: Any) -> None:
    text = model_text.load(scripted_folder("think_open"))
    api = Api(text, msgspec.structs.replace(CONFIG, thinking_token_budget=2))
    assert api.chat("<|s05|>", max_tokens=60).json()["choices"][0]["message"]["reasoning_content"] == "AB"
    user = {"role": "user", "content": "<|s05|>"}
    body = {"model": "scripted", "max_tokens": 60, "messages": [user]}
    answer = api.post("/v1/messages", {**body, "thinking": {"type": "enabled", "budget_tokens": 4}}).json()
    assert [block.get("thinking", block.get("text")) for block in answer["content"]] == ["ABCD", "ABCDEFGH"]
    answer = api.post("/v1/responses", {"input": "<|s05|>", "thinking_token_budget": 5}).json()
    assert answer["output"][0]["content"][0]["text"] == "ABCDE"
    api.close()


def test_a_cancelled_answer_behind_its_budget(thinking: Api) -> None:
    async def scene() -> dict[str, Any]:
        body = chat_body("<|s01|>", thinking_token_budget=2, max_tokens=400)
        task = asyncio.create_task(thinking.client.post("/v1/chat/completions", json=body))
        while len(thinking.engine.requests) < 2:
            await asyncio.sleep(0)
        path = f"/v1/requests/{thinking.engine.requests[0].id}/cancel"
        assert (await thinking.client.post(path)).status_code == 200
        return (await task).json()

    assert thinking.run(scene())["choices"][0]["finish_reason"] == "abort"
    assert thinking.engine.running == 0


def test_stop_strings_come_before_the_parser(parsing: Api) -> None:
    choice = parsing.chat("<|s03|>", stop=["it"]).json()["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["stop_reason"]) == ("plan ", "it")


def test_logprobs_are_of_all_tokens(parsing: Api) -> None:
    choice = parsing.chat("<|s03|>", logprobs=True).json()["choices"][0]
    text = "".join(token["token"] for token in choice["logprobs"]["content"])
    assert text == scripted.expected_text("s03")
    streamed = parsing.chat_stream("<|s03|>", logprobs=True)
    tokens = [t["token"] for c in streamed.choices() if c["logprobs"] for t in c["logprobs"]["content"]]
    assert "".join(tokens) == text


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused_at_start(make_api: Callable[..., Api], field: str) -> None:
    from headrace.errors import StartupError

    with pytest.raises(StartupError, match="frobnicate"):
        make_api(**{field: "frobnicate"})
