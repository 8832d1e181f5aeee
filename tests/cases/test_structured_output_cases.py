"""Structured output and forced calls through a real server: the form holds, the stream beside it goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.client import Answer, at_once
from support.scripted import expected_text
from support.server import Serve, Server

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from json_schemas import is_valid, make_schema

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3, "minItems": 0},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROSE = (
    "Tell me a story about a fox.", "Why is the sky blue?", "Write a poem.", "Who are you?", "Say hello.",
    "List three fruits.", "What is love?", "Describe Paris in two sentences.", "Explain gravity.", "Good morning!",
)  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "parameters": {
        "type": "object", "properties": {"tz": {"type": "string", "maxLength": 20}}, "required": ["tz"]}}},
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}}},
]  # fmt: skip
HERMES = ("--tool-call-parser", "hermes")


def wanted(schema: object) -> dict[str, Any]:
    form = {"name": "x", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


@pytest.fixture
def demo(serve: Serve) -> Server:
    return serve("demo", *HERMES)


@pytest.fixture
def scripted(serve: Serve) -> Server:
    return serve("plain")


def parsed(answer: Answer) -> Any:
    assert answer.finish_reason() == "stop"
    return json.loads(answer.text())


def test_prompts_that_invite_prose_get_json(demo: Server) -> None:
    def ask(prompt: str) -> list[Answer]:
        any_object = {"response_format": {"type": "json_object"}}
        return [
            *demo.client.both(prompt, max_tokens=60, **any_object),
            *demo.client.both(prompt, max_tokens=120, **wanted(PERSON)),
        ]

    finished = 0
    for whole, streamed, schema_whole, schema_streamed in at_once(ask, PROSE, 5):
        assert whole.text() == streamed.text() and schema_whole.text() == schema_streamed.text()
        for answer in (whole, schema_whole):
            assert answer.text().startswith("{")
            if answer.finish_reason() == "stop":
                finished += 1
                value = parsed(answer)
                assert isinstance(value, dict)
        if schema_whole.finish_reason() == "stop":
            value = parsed(schema_whole)
            assert list(value) == ["name", "age", "tags"] and type(value["age"]) is int and len(value["tags"]) <= 3
    assert finished >= 10


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 'a"b\\c/é😀\n'},
        {"type": "object", "properties": {"what": {"enum": ["é only"]}}, "required": ["what"]},
        {"const": {"deep": [1, {"er": None}], "ü": -0.5}},
        {"enum": ["word " * 120]},
    ],
    ids=["string", "key", "nested", "long"],
)
@pytest.mark.parametrize("model", ["demo", "plain"])
def test_constants_come_out_as_they_are(serve: Serve, model: str, schema: dict[str, Any]) -> None:
    server = serve(model, *(HERMES if model == "demo" else ()))
    if "properties" in schema:
        schema = {**schema, "additionalProperties": False}
    answers = server.client.both("<|s01|>", max_tokens=900, **wanted(schema))
    hot = server.client.chat("x", max_tokens=900, temperature=1.5, seed=1, **wanted(schema))
    value = schema.get("const", (schema.get("enum") or [{"what": "é only"}])[0])
    assert [parsed(answer) for answer in (*answers, hot)] == [value] * 3


def test_generated_schemas_hold(demo: Server) -> None:
    rng = random.Random(1)
    schemas = [make_schema(rng) for _ in range(40)]

    def ask(number: int) -> Answer:
        form = wanted(schemas[number])
        return demo.client.chat("Describe it.", temperature=1, seed=number, max_tokens=80, **form)

    answers = at_once(ask, range(len(schemas)), 20)
    finished = [i for i, answer in enumerate(answers) if answer.finish_reason() == "stop"]
    assert len(finished) >= 30
    for i in finished:
        assert is_valid(parsed(answers[i]), schemas[i]), (schemas[i], answers[i].text())


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


BAD_SCHEMAS = [
    {"type": "nonsense"},
    {"type": "string", "pattern": "["},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "https://example.com/s.json"},
    {"not": {"type": "string"}},
    {"type": "string", "minLength": 3, "maxLength": 2},
    [],
    "x",
    nested(300),
    {"$ref": "#/$defs/a0", "$defs": {
        **{f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(20_000)}, "a20000": {},
    }},
]  # fmt: skip
HARD_SCHEMAS = [
    {"type": "string", "pattern": "(a|a)*{5000}"},
    {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
    {"enum": [f"{number}{'x' * 200}" for number in range(3000)]},
    {"type": "string", "pattern": "((a{1000}){1000}){1000}"},
]


def test_bad_schemas_are_refused_while_a_stream_goes_on(scripted: Server) -> None:
    worker = scripted.worker_pid
    with scripted.client.streaming("<|s01|>", max_tokens=4000) as chunks:
        said = [next(chunks) for _ in range(3)]
        for schema in BAD_SCHEMAS:
            answer = scripted.client.chat("<|s05|>", **wanted(schema))
            assert answer.status == 400, (str(schema)[:80], answer.body)
            assert 10 < len(answer.message) < 400 and "\n" not in answer.message
            said.append(next(chunks))
        incomplete = {"type": "json_schema", "json_schema": {"name": "x"}}
        missing = scripted.client.chat("<|s05|>", response_format=incomplete)
        assert missing.status == 400 and "schema" in missing.message
        for schema in HARD_SCHEMAS:
            answer = scripted.client.chat("<|s05|>", max_tokens=20, **wanted(schema))
            assert answer.status in (200, 400), answer.body
            said.append(next(chunks))
        assert parsed(scripted.client.chat("<|s05|>", **wanted({"const": "good"}))) == "good"
        said += [next(chunks) for _ in range(20)]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in said if chunk["choices"])
    assert text and expected_text("s01", 4000).startswith(text)
    assert scripted.worker_pid == worker
    scripted.client.check_control()


@pytest.mark.parametrize("stream", [False, True])
def test_what_nothing_satisfies_is_refused_before_a_stream_begins(scripted: Server, stream: bool) -> None:
    for fields, param in (
        (wanted({"$ref": "#"}), "response_format"),
        ({"guided_regex": "[^\\x00-\\U0010ffff]"}, "guided_regex"),
        ({"guided_grammar": "start: a\na: a"}, "guided_grammar"),
    ):
        answer = scripted.client.chat("<|s05|>", stream=stream, **fields)
        assert answer.status == 400 and answer.error is not None, answer.body
        assert answer.error["param"] == param and "no text satisfies it" in answer.message
    scripted.client.check_control()


def test_a_cut_answer_says_so(demo: Server) -> None:
    for answer in demo.client.both("Hi", max_tokens=8, **wanted(PERSON)):
        assert answer.finish_reason() == "length" and answer.text().startswith("{")
        with pytest.raises(ValueError):
            json.loads(answer.text())


def test_thinking_is_free_and_content_is_not(serve: Serve) -> None:
    server = serve("think_open", "--reasoning-parser", "qwen3")
    for answer in server.client.both("<|s11|>", max_tokens=60, **wanted({"enum": ["forty", 42]})):
        assert answer.finish_reason() == "stop" and json.loads(answer.text()) == 42
    compact = {"const": {"a": 1}, "x-guidance": {"whitespace_flexible": False}}
    whole = server.client.chat("<|s11|>", max_tokens=60, **wanted(compact))
    assert whole.body is not None
    message = whole.body["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1}
    assert "plan it" in (message.get("reasoning_content") or message.get("reasoning"))


def test_the_other_kinds(demo: Server) -> None:
    client = demo.client
    assert client.chat("Pick.", guided_choice=["red", 'gr"een']).text() in ("red", 'gr"een')
    zipped = client.chat("Zip?", guided_regex=r"[0-9]{5}").text()
    assert len(zipped) == 5 and zipped.isdecimal()
    assert client.chat("?", guided_grammar='root ::= "yes" | "no"').text() in ("yes", "no")
    assert isinstance(parsed(client.chat("?", guided_json=json.dumps({"type": "boolean"}))), bool)
    assert client.complete("x", structured_outputs={"choice": ["a b"]}).text() == "a b"
    assert client.complete("x", **wanted({"const": 3})).text() == "3"
    both = client.chat("?", guided_regex="a", **wanted({"const": 3}))
    assert both.status == 400 and "response_format" in both.message


def calls_of(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """Of both modes: a stream's pieces are put together."""
    found: list[list[str]] = []
    for choice in answer.choices():
        for call in choice.get("delta", choice.get("message", {})).get("tool_calls") or ():
            if call.get("id"):
                found.append([call["function"]["name"], ""])
            found[-1][1] += call["function"].get("arguments") or ""
    return [(name, json.loads(arguments)) for name, arguments in found]


def test_required_and_named_calls_come(demo: Server) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}

    def ask(seed: int) -> tuple[Answer, ...]:
        sampling = {"temperature": 1, "seed": seed, "max_tokens": 150, "tools": TOOLS}
        return tuple(
            answer
            for choice in ("required", named)
            for answer in demo.client.both("Say hello.", tool_choice=choice, **sampling)
        )

    for whole, streamed, named_whole, named_streamed in at_once(ask, range(5), 5):
        for answer in (whole, streamed):
            calls = calls_of(answer)
            assert answer.finish_reason() == "tool_calls" and len(calls) == 1 and answer.text() == ""
            assert calls[0][0] in ("get_time", "get_weather")
            assert calls[0][0] == "get_weather" or isinstance(calls[0][1]["tz"], str)
        for answer in (named_whole, named_streamed):
            ((name, arguments),) = calls_of(answer)
            assert name == "get_weather" and arguments.keys() <= {"city"}
    many = {"tool_choice": "required", "parallel_tool_calls": True, "max_tokens": 1500, "tools": TOOLS}
    several = demo.client.chat("Say hello.", temperature=1, seed=3, **many)
    assert len(calls_of(several)) >= 1 and several.finish_reason() == "tool_calls"


def test_none_is_no_call(demo: Server) -> None:
    answer = demo.client.chat("Call get_time now!", tool_choice="none", tools=TOOLS, max_tokens=20)
    assert calls_of(answer) == [] and answer.finish_reason() in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {
                    "type": "object", "properties": {"a": {"type": "nonsense"}}}}}],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
    ],
)  # fmt: skip
def test_an_impossible_choice_is_refused(demo: Server, fields: dict[str, Any], param: str) -> None:
    answer = demo.client.chat("x", **fields)
    assert answer.status == 400 and answer.error is not None and answer.error["param"] == param


def test_demands_that_contradict_each_other_are_no_fault_of_ours(scripted: Server) -> None:
    for answer in scripted.client.both("<|s05|>", guided_choice=["x"], allowed_token_ids=[65]):
        assert answer.status == (200 if answer.streamed else 400)
        assert answer.error is not None and answer.error["type"] == "invalid_request_error"
        assert "allowed_token_ids leaves no token" in answer.message
    scripted.client.check_control()


def test_anthropic_and_responses_force_calls_too(demo: Server) -> None:
    tools = [{"name": "get_time", "input_schema": TOOLS[0]["function"]["parameters"]}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_time"}):
        message = demo.client.post("/v1/messages", {
            "model": "m", "max_tokens": 150, "tools": tools, "tool_choice": choice,
            "messages": [{"role": "user", "content": "Say hello."}],
        }).json()  # fmt: skip
        assert message["stop_reason"] == "tool_use", message
        (call,) = [block for block in message["content"] if block["type"] == "tool_use"]
        assert call["name"] == "get_time" and isinstance(call["input"]["tz"], str)
    form = {"type": "json_schema", "name": "x", "schema": {"const": {"a": "é"}}, "strict": True}
    answer = demo.client.post("/v1/responses", {"model": "m", "input": "Hi", "text": {"format": form}}).json()
    (item,) = [item for item in answer["output"] if item["type"] == "message"]
    assert json.loads(item["content"][0]["text"]) == {"a": "é"}, answer


def test_a_worker_that_dies_takes_no_form_along(start_server: Serve) -> None:
    server = start_server("plain")
    schema = {"type": "array", "items": {"enum": ["one", "two"]}, "minItems": 150, "maxItems": 150}
    schema["x-guidance"] = {"whitespace_flexible": False}
    fields = {"temperature": 1, "seed": 4, "max_tokens": 3000, **wanted(schema)}
    undisturbed = server.client.chat("<|s01|>", **fields)
    pieces: list[str] = []
    with server.client.streaming("<|s01|>", **fields) as chunks:
        for number, chunk in enumerate(chunks):
            if number == 30:
                os.kill(server.worker_pid, signal.SIGKILL)
            pieces += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    assert len(json.loads("".join(pieces))) == 150
    assert "".join(pieces) == undisturbed.text()
