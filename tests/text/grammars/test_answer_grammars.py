"""Grammars of answers: what they accept is what the parsers read, in every call format, behind thinking."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import llguidance
import pytest

from headrace.errors import GrammarError
from headrace.params import Grammar
from headrace.text.grammars import content
from headrace.text.grammars.call_forms import form_of
from headrace.text.grammars.compiler import GrammarCompiler
from headrace.text.grammars.compose import AnswerGrammar
from headrace.text.model_text import ModelText, load
from headrace.text.reasoning.events import Content, Reasoning, ToolCallArguments, ToolCallEnd, ToolCallStart
from headrace.text.tools import definitions, names
from headrace.text.tools.answer import answer_parser

UNFORCED = ("gemma4",)  # an object notation of its own
HARMONY = ("harmony", "gpt_oss", "openai")
FORCED = sorted(set(names()) - set(UNFORCED))
ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["km", "mi"]},
        "on": {"$ref": "#/$defs/switch"},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["a", "unit"],
    "$defs": {"switch": {"type": "boolean"}},
}
TOOLS = definitions([
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "ping"}},
])  # fmt: skip


@pytest.fixture(scope="module")
def text(scripted_folder: Callable[[str], Path]) -> ModelText:
    return load(scripted_folder("plain"))


@pytest.fixture(scope="module")
def compiler(text: ModelText) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: text)
    yield made
    made.close()


def matcher_of(compiler: GrammarCompiler, grammar: Grammar) -> llguidance.LLMatcher:
    return compiler.compile(grammar).result(30).deep_copy()


def accepts(compiler: GrammarCompiler, text: ModelText, grammar: Grammar, answer: str) -> bool:
    """Whether ``answer`` is a whole answer of the grammar."""
    matcher = matcher_of(compiler, grammar)
    return matcher.consume_tokens(text.tokenizer.encode(answer, parse_special=True)) and matcher.is_accepting()


def written(
    compiler: GrammarCompiler, text: ModelText, grammar: Grammar, rng: random.Random, begin: str = ""
) -> str:
    """An answer of random tokens that the grammar allows; it ends as soon as it may, half of the time."""
    matcher = matcher_of(compiler, grammar)
    tokens = text.tokenizer.encode(begin, parse_special=True)
    assert matcher.consume_tokens(tokens)
    for _ in range(2000):
        mask = matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [i for i in range(text.tokenizer.vocab_size) if mask[i // 8] >> (i % 8) & 1]
        assert allowed
        if matcher.is_accepting() and (rng.random() < 0.5 or text.end_token_ids.issuperset(allowed)):
            return text.tokenizer.decode(tokens)
        visible = [i for i in allowed if i not in text.end_token_ids and text.tokenizer.token_bytes(i).strip()]
        token = rng.choice(visible or allowed)
        assert matcher.consume_token(token), matcher.get_error()
        tokens.append(token)
    raise AssertionError(f"no end: {text.tokenizer.decode(tokens)[:200]}")


def calls_of(answer: str, tools: str, reasoning: str | None = None, opened: str = "") -> tuple[list, str, str]:
    """(complete calls as (name, arguments), content, reasoning)."""
    parser = answer_parser(reasoning=reasoning, tools=tools, definitions=TOOLS, opened=opened)
    calls: list[list] = []
    said, thought = "", ""
    for event in [*parser.feed(answer), *parser.finish()]:
        match event:
            case ToolCallStart(_, _, name):
                calls.append([name, ""])
            case ToolCallArguments(_, delta):
                calls[-1][1] += delta
            case ToolCallEnd(_, complete):
                assert complete, answer
            case Content(piece):
                said += piece
            case Reasoning(piece):
                thought += piece
    return [(name, json.loads(arguments)) for name, arguments in calls], said, thought


def is_valid(name: str, arguments: dict) -> bool:
    if name == "ping":
        return arguments == {}
    return (
        {"a", "unit"} <= arguments.keys() <= {"a", "unit", "on", "tags"}
        and type(arguments["a"]) is int
        and 0 <= arguments["a"] <= 99
        and arguments["unit"] in ("km", "mi")
        and type(arguments.get("on", True)) is bool
        and len(arguments.get("tags", [])) <= 2
        and set(arguments.get("tags", [])) <= {"x", "y"}
    )


@pytest.mark.parametrize("name", FORCED)
def test_what_a_grammar_of_calls_allows_its_parser_reads(
    name: str, text: ModelText, compiler: GrammarCompiler
) -> None:
    rng = random.Random(name)
    seen: set[str] = set()
    for max_calls in (1, 4):
        grammar = AnswerGrammar(text.tokenizer, None, name).build(None, TOOLS, max_calls=max_calls)
        for _ in range(6):
            answer = written(compiler, text, grammar, rng, "<|channel|>comm" if name in HARMONY else "")
            calls, said, _ = calls_of(answer, name)
            assert 1 <= len(calls) <= max_calls and said.strip() == "", answer
            assert all(is_valid(*call) for call in calls), answer
            seen.update(called for called, _ in calls)
    assert seen == {"add", "ping"}


def test_every_format_is_forced_or_known_not_to_be() -> None:
    unforced = [name for name in names() if form_of(name, lambda _: True) is None]
    assert unforced == list(UNFORCED)


def test_a_format_that_cannot_be_forced_is_named(text: ModelText) -> None:
    with pytest.raises(GrammarError, match="gemma4"):
        AnswerGrammar(text.tokenizer, None, "gemma4").build(None, TOOLS)
    with pytest.raises(GrammarError, match="--tool-call-parser"):
        AnswerGrammar(text.tokenizer, None, None).build(None, TOOLS)


def test_bare_strings_with_further_demands_are_refused(text: ModelText) -> None:
    def build(schema: dict) -> None:
        parameters = {"type": "object", "properties": {"s": schema}}
        AnswerGrammar(text.tokenizer, None, "qwen3_coder").build(
            None, definitions([{"name": "f", "parameters": parameters}])
        )

    build({"type": "string", "description": "free"})
    build({"anyOf": [{"type": "string"}, {"type": "null"}]})
    for demand in ({"pattern": "^a"}, {"maxLength": 3}, {"format": "date"}):
        with pytest.raises(GrammarError, match='"s"'):
            build({"type": "string", **demand})


@pytest.mark.parametrize("opened", [False, True])
def test_the_constraint_begins_behind_thinking(opened: bool, text: ModelText, compiler: GrammarCompiler) -> None:
    grammar = AnswerGrammar(text.tokenizer, "qwen3", "hermes").build(
        content.json_schema({"const": 42}), opened=opened
    )
    thinking = "I {think} so\n</think>\n\n"
    assert accepts(compiler, text, grammar, ("" if opened else "<think>") + thinking + "42")
    assert accepts(compiler, text, grammar, "42") is not opened
    assert not accepts(compiler, text, grammar, ("" if opened else "<think>") + thinking + "43")
    assert not accepts(compiler, text, grammar, ("" if opened else "<think>") + "I think")


def test_content_or_calls(text: ModelText, compiler: GrammarCompiler) -> None:
    grammar = AnswerGrammar(text.tokenizer, None, "hermes").build(content.JSON_OBJECT, TOOLS)
    assert accepts(compiler, text, grammar, '{"any": ["thing"]}')
    assert accepts(compiler, text, grammar, '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>')
    assert not accepts(compiler, text, grammar, "Hello")


def test_harmony_heads_its_messages(text: ModelText, compiler: GrammarCompiler) -> None:
    grammar = AnswerGrammar(text.tokenizer, "harmony", "harmony").build(content.json_schema({"const": 1}), TOOLS)
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>1"
    call = "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}"
    for answer in (final, analysis + final, analysis + call, call):
        assert accepts(compiler, text, grammar, answer), answer
    assert not accepts(compiler, text, grammar, analysis)
    assert not accepts(compiler, text, grammar, "1")
    assert calls_of(analysis + call, "harmony", "harmony")[0] == [("ping", {})]


@pytest.mark.parametrize(
    ("entry", "good", "bad"),
    [
        (content.choice(["a/b", 'q"\\', "\n\t\x00\x7f", "é😀", "<|x|>"]), 'q"\\', "a"),
        (content.choice(["a/b", 'q"\\', "\n\t\x00\x7f", "é😀"]), "\n\t\x00\x7f", "é"),
        (content.regex('a/b[0-9]+"\n'), 'a/b12"\n', "a/b"),
        (content.grammar('root ::= "a" | "b" x\nx ::= [0-9]+'), "b12", "c"),
        (content.grammar('start: "a" | /x+/'), "xxx", "y"),
        (content.json_schema({"const": 'a"b\\c/é😀\n\x01'}), '"a\\"b\\\\c/é😀\\n\\u0001"', '"a"'),
        (content.json_schema(True), "[1, null]", "no"),
        (content.JSON_OBJECT, '{ "a" : [1, {}] }', "[]"),
        (content.JSON_OBJECT, '{\n        "a": 1\r\n}', '{"a":\n\n1}'),
        (content.JSON_OBJECT, "{ }", "{  }"),
        (content.json_schema({"x-guidance": {"whitespace_flexible": False}}), '{"a":[1,2]}', '{"a": 1}'),
        (content.json_schema({"type": "string"}), '"\\n\\u0001"', '"\\ud83d"'),
    ],
)
def test_content(entry: dict, good: str, bad: str, text: ModelText, compiler: GrammarCompiler) -> None:
    grammar = AnswerGrammar(text.tokenizer, None, None).build(entry)
    assert accepts(compiler, text, grammar, good)
    assert not accepts(compiler, text, grammar, bad)


def chain(count: int, link: Callable[[str], dict]) -> dict:
    """Definitions that refer to each other, one behind the other."""
    steps = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**steps, f"d{count}": {}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"type": "string", "pattern": "["},
        {"type": "string", "pattern": "(?=a)b"},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": "https://example.com/schema"},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"not": {}},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        chain(20_000, lambda reference: {"type": "object", "properties": {"x": {"$ref": reference}}}),
        chain(20_000, lambda reference: {"allOf": [{"$ref": reference}]}),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_schema_that_cannot_be_kept_to_is_an_error_of_one_line(
    schema: dict, text: ModelText, compiler: GrammarCompiler
) -> None:
    grammar = AnswerGrammar(text.tokenizer, None, None).build(content.json_schema(schema))
    with pytest.raises(GrammarError) as error:
        compiler.compile(grammar).result(60)
    assert 3 < len(str(error.value)) <= 300 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "lark", ["start: " + "(" * 20_000, "start: nothing", "hello", "start: <|nope|>", "start: a\na: a"]
)
def test_broken_grammars(lark: str, text: ModelText, compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(AnswerGrammar(text.tokenizer, None, None).build(content.grammar(lark))).result(60)


@pytest.mark.parametrize("schema", [False, [], 5, "x", {"x-guidance": 1}])
def test_what_is_no_schema(schema: object) -> None:
    with pytest.raises(GrammarError):
        content.json_schema(schema)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            "-4611686018427387904",
            "4611686018427387905",
        ),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3}, "9007199254740994", "9007199254740992"),
        ({"type": ["integer", "null"], "minimum": -(2**63) + 1}, "null", "-9223372036854775808"),
        (
            {"properties": {"const": {"const": 1}, "minimum": {"enum": [0.1]}}},
            '{"const":1,"minimum":0.1}',
            '{"const":2}',
        ),
        ({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1}, "0.25", "0.255"),
    ],
)
def test_numbers_are_kept_to(
    schema: dict, good: str, bad: str, text: ModelText, compiler: GrammarCompiler
) -> None:
    grammar = AnswerGrammar(text.tokenizer, None, None).build(content.json_schema(schema))
    assert accepts(compiler, text, grammar, good) and not accepts(compiler, text, grammar, bad)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": -(2**63)},
        {"enum": [1, {"a": [2**53 + 1]}]},
        {"const": 123456789.123456789},
        {"items": {"anyOf": [{"multipleOf": 123456000}]}},
        {"multipleOf": 0.0000123456},
        {"$defs": {"x": {"type": "integer", "minimum": 2**63}}},
        {"maximum": -1e30},
    ],
)
def test_numbers_that_cannot_be_kept_to_are_refused(schema: dict) -> None:
    with pytest.raises(GrammarError):
        content.json_schema(schema)


def test_a_schema_nested_beyond_measure() -> None:
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="deep"):
        content.json_schema(schema)
