"""Every call format: its meaning, that cuts do not matter, that nothing is lost, that broken calls end well."""

from __future__ import annotations

import json
import re

import pytest
from call_samples import SAMPLES, TOOLS, Sample
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import StartupError
from headrace.text.reasoning.events import (
    Content,
    Event,
    FoldedAnswer,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
    parse_whole,
)
from headrace.text.tools import definitions, get_tool_parser, names, needs_special

KIMI_BROKEN = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": '
    "<|tool_call_begin|>functions.mul:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
IDS = [f"{position}-{sample.name}" for position, sample in enumerate(SAMPLES)]


def events_of(name: str, pieces: list[str]) -> list[Event]:
    parser = get_tool_parser(name, TOOLS)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    check_order(events)
    return events


def check_order(events: list[Event]) -> None:
    """Starts and ends alternate, indices count up, ids differ, no empty text."""
    is_open, count, ids = False, 0, set()
    for event in events:
        match event:
            case ToolCallStart(index, call_id, name):
                assert not is_open and index == count and call_id and call_id not in ids and name
                is_open = True
                ids.add(call_id)
            case ToolCallArguments(index, delta):
                assert is_open and index == count and delta
            case ToolCallEnd(index):
                assert is_open and index == count
                is_open, count = False, count + 1
            case _:
                assert not is_open and event.text
    assert not is_open


def folded(events: list[Event]) -> FoldedAnswer:
    answer = FoldedAnswer()
    answer.add(events)
    for call in answer.calls:
        call.id = ""
    return answer


def cut(data: st.DataObject, text: str) -> list[str]:
    points = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_meaning(sample: Sample) -> None:
    answer = parse_whole(get_tool_parser(sample.name, TOOLS), sample.text)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == sample.calls
    assert all(call.complete for call in answer.calls)
    assert (answer.content, answer.reasoning) == (sample.content, sample.reasoning)


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_every_single_cut_and_all_cuts_at_once(sample: Sample) -> None:
    whole = folded(events_of(sample.name, [sample.text]))
    assert folded(events_of(sample.name, list(sample.text))) == whole
    for point in range(1, len(sample.text)):
        assert folded(events_of(sample.name, [sample.text[:point], sample.text[point:]])) == whole


@pytest.mark.parametrize("sample", SAMPLES, ids=IDS)
def test_cut_by_length_never_invents(sample: Sample) -> None:
    """Of every beginning of an answer: the calls so far are a beginning of the calls, arguments too."""
    whole = folded(events_of(sample.name, [sample.text]))
    for length in range(len(sample.text)):
        events = events_of(sample.name, [sample.text[:length]])
        answer = folded(events)
        assert answer == folded(events_of(sample.name, list(sample.text[:length])))
        assert len(answer.calls) <= len(whole.calls)
        for call, final in zip(answer.calls, whole.calls, strict=False):
            assert call.name == final.name
            assert not call.complete or call.arguments == final.arguments
            assert final.arguments.startswith(call.arguments)
        if not answer.calls and sample.name != "harmony":
            marks = ("all\n",) if sample.name == "functionary" else ()
            assert answer.content == sample.text[:length].removeprefix(*marks or ("\0",))


def fragments(name: str) -> list[str]:
    """Pieces of the format's samples: marks, words, single signs."""
    found: set[str] = {" ", "\n", "{", "}", '"', "wordy"}
    for sample in SAMPLES:
        if sample.name == name:
            found.update(re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\W", sample.text))
    return sorted(found)


NAMES = sorted({sample.name for sample in SAMPLES})


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_mixture_of_fragments(name: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(fragments(name)), max_size=25))
    check_any_text(name, "".join(parts), data)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    ["[]", "[ ]", "[\n]", "[]\n", "[] wordy", "x []", "{}", "[{}]", "[1]", "[[]]", "[,]", "[ ", "null", '""'],
)
def test_json_that_is_no_call_is_content(name: str, text: str) -> None:
    """The answer of a model that was asked for a list, and found nothing to list."""
    for pieces in ([text], list(text)):
        answer = folded(events_of(name, pieces))
        assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_damaged_samples(name: str, data: st.DataObject) -> None:
    """A sample with some stretches removed, doubled or replaced."""
    text = data.draw(st.sampled_from([sample.text for sample in SAMPLES if sample.name == name]))
    for _ in range(data.draw(st.integers(1, 3))):
        a, b = sorted((data.draw(st.integers(0, len(text))), data.draw(st.integers(0, len(text)))))
        text = text[:a] + data.draw(st.sampled_from(["", text[a:b] * 2, "wordy", "<", "\n"])) + text[b:]
    check_any_text(name, text, data)


def check_any_text(name: str, text: str, data: st.DataObject) -> None:
    events = events_of(name, [text])
    assert folded(events_of(name, cut(data, text))) == folded(events_of(name, list(text))) == folded(events)
    shown = "".join(
        event.text if isinstance(event, Content) else event.raw
        for event in events
        if isinstance(event, (Content, ToolCallEnd))
    )
    assert shown.count("wordy") >= (text.count("wordy") if name != "harmony" else 0)
    if name != "harmony" and not any(isinstance(event, ToolCallEnd) for event in events):
        assert shown.replace(">>>all\n", "") == text or name == "functionary"
    for call in folded(events).calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


def test_arguments_stream_as_they_come() -> None:
    parser = get_tool_parser("hermes", TOOLS)
    assert parser.feed('<tool_call>\n{"name": "add", "arguments"') == []
    start, first = parser.feed(': {"s": "a')
    assert isinstance(start, ToolCallStart) and start.name == "add"
    assert first == ToolCallArguments(0, '{"s": "a')
    assert parser.feed("bc") == [ToolCallArguments(0, "bc")]
    tagged = get_tool_parser("qwen3_coder", TOOLS)
    tagged.feed("<tool_call>\n<function=add>\n<parameter=s>\nlong")
    assert tagged.feed(' "text"') == [ToolCallArguments(0, ' \\"text\\"')]


def test_only_what_may_become_a_mark_is_held_back() -> None:
    parser = get_tool_parser("hermes", TOOLS)
    assert parser.feed("a < b <tool") == [Content("a < b ")]
    assert parser.feed("box> c") == [Content("<toolbox> c")]
    assert parser.feed("\n") == [Content("\n")]


def test_undecided_text_is_bounded() -> None:
    parser = get_tool_parser("hermes", TOOLS)
    filler = "x" * 40_000
    events = parser.feed('<tool_call>{"other": "' + filler)
    assert folded(events).content == '<tool_call>{"other": "' + filler
    pieces = ['<tool_call>{"other": "', *[filler[at : at + 999] for at in range(0, 40_000, 999)]]
    assert folded(events_of("hermes", pieces)).content == "".join(pieces)


def test_broken_arguments_are_what_the_model_wrote() -> None:
    pieces = ["<tool", "_call>", '\n{"na', 'me": "add", "argu', 'ments": {"a": ', "</tool", "_cal", "l>"]
    events = events_of("hermes", pieces)
    assert folded(events) == folded(events_of("hermes", ["".join(pieces)]))
    (call,) = folded(events).calls
    assert (call.name, call.arguments, call.complete) == ("add", '{"a": ', False)
    end = events[-1]
    assert isinstance(end, ToolCallEnd) and end.raw == "".join(pieces)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"s": "a\nb"}}</tool_call>', '{"s": "a\\nb"}'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "{}"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": 7}', '{"a": 1}'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"s": "</tool_call>"}}', '{"s": "</tool_call>"}'),
    ],
)
def test_slips_of_models_that_leave_no_doubt(name: str, text: str, arguments: str) -> None:
    answer = folded(events_of(name, [text]))
    assert [(call.arguments, call.complete) for call in answer.calls] == [(arguments, True)]
    assert answer.content == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "Use <think> and <tool_call> tags </think> here."),
        ("hermes", '<tool_call>\n{"na'),
        ("llama3", '{"name": "John", "parameters": {}}'),
        ("xlam", "[1] A source"),
        ("pythonic", "[add(a=b)]"),
        ("pythonic", "[add(1)]"),
        ("functionary", ">>> x = 1\n"),
        ("mistral", "[TOOL_CALLS] and so on"),
        ("glm4", "<tool_call> is a tag"),
        ("gemma4", "<|tool_call>call me"),
        ("hermes", "  \n"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    answer = folded(events_of(name, [text]))
    assert (answer.content, answer.calls) == (text, [])


def test_text_behind_calls_stays() -> None:
    answer = folded(events_of("pythonic", ["[mul(), add(a=b)]"]))
    assert [call.name for call in answer.calls] == ["mul"]
    assert answer.content == ", add(a=b)]"


def test_model_ids_and_mistral_ids() -> None:
    kimi = next(sample for sample in SAMPLES if sample.name == "kimi_k2")
    answer = parse_whole(get_tool_parser("kimi", TOOLS), kimi.text)
    assert [call.id for call in answer.calls] == ["functions.add:0", "functions.mul:1"]
    mistral = parse_whole(get_tool_parser("mistral", TOOLS), "[TOOL_CALLS]mul[ARGS]{}")
    assert re.fullmatch("[A-Za-z0-9]{9}", mistral.calls[0].id)


def test_names_and_refusals() -> None:
    wanted = (
        "hermes nous qwen qwen3 qwen3_coder qwen3_xml qwen3.5 llama llama3 llama4 mistral deepseek deepseek_v3 "
        "deepseek_r1 deepseek_v4 glm4 glm47 granite gemma4 harmony gpt-oss kimi kimi_k2 minimax minimax_m2 "
        "nemotron functionary step3p5 xlam poolside_v1 pythonic"
    )
    for name in wanted.split():
        get_tool_parser(name, TOOLS)
    assert "hermes" in names()
    assert "<tool_call>" in needs_special("hermes") and "<|channel|>" in needs_special("gpt-oss")
    for name in ("auto", "nonsense"):
        with pytest.raises(StartupError):
            get_tool_parser(name, TOOLS)


def test_definitions_from_requests() -> None:
    nested = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    flat = {"name": "g", "input_schema": {"type": "object"}}
    assert [(tool.name, dict(tool.parameters)) for tool in definitions([nested, flat, {"type": "web"}])] == [
        ("f", {"type": "object"}),
        ("g", {"type": "object"}),
    ]


@pytest.mark.parametrize(
    ("name", "text", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": True}}</tool_call> b', '{"a": True}}', " b"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": x and more', '{"a": x and more', ""),
        ("llama3", '{"name": "add", "parameters": {"a": x} and more', '{"a": x} and more', ""),
        ("kimi_k2", KIMI_BROKEN, '{"a": ', ""),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter> so </function>", '{"a": 1so ', ""),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter><parameter=s>x</para", '{"a": 1, "s": "x', ""),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter><parameter=s", '{"a": 1', ""),
        ("gemma4", '<|tool_call>call:add{a:1,s:<|"|>x<tool_call|> b', '{"a": 1, "s": "x<tool_call|> b', ""),
    ],
)
def test_broken_calls_keep_their_text(name: str, text: str, arguments: str, content: str) -> None:
    answer = folded(events_of(name, [text]))
    assert [(call.arguments, call.complete) for call in answer.calls][:1] == [(arguments, False)]
    assert answer.content.strip() == content.strip()
