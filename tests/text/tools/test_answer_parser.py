"""Reasoning and tool calls of one answer together; whole calls; one call only."""

from __future__ import annotations

import pytest
from call_samples import SAMPLES, TOOLS, Sample
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.reasoning.events import Content, FoldedAnswer, parse_whole
from headrace.text.tools.answer import answer_parser, needs_special

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": </tool_call>'


def parse(pieces: list[str], **options: object) -> FoldedAnswer:
    parser = answer_parser(definitions=TOOLS, **options)  # type: ignore[arg-type]
    folded = FoldedAnswer()
    for piece in pieces:
        folded.add(parser.feed(piece))
    folded.add(parser.finish())
    for call in folded.calls:
        call.id = ""
    return folded


def test_reasoning_before_calls() -> None:
    answer = parse([f"<think>\nplan {CALL}\n</think>\n\n{CALL}"], reasoning="qwen3", tools="hermes")
    assert answer.reasoning == f"plan {CALL}"
    assert (answer.content, [call.arguments for call in answer.calls]) == ("", ['{"a": 1}'])


def test_off_is_verbatim() -> None:
    text = f"\n<think>\nplan</think>\n{CALL}\n"
    assert parse([text]).content == text
    with_tools = parse([text], tools="hermes")
    assert (with_tools.content, len(with_tools.calls)) == ("\n<think>\nplan</think>\n", 1)
    with_reasoning = parse([text], reasoning="think")
    assert (with_reasoning.reasoning, with_reasoning.content) == ("plan", f"{CALL}\n")


def test_prose_about_tags() -> None:
    text = "Use <think> and <tool_call> tags </think> here."
    assert parse([text], tools="hermes").content == text
    both = parse(list(text), tools="hermes", reasoning="think")
    assert (both.content, both.reasoning) == ("Use  here.", " and <tool_call> tags ")


def test_opened_block() -> None:
    answer = parse(["plan</th", f"ink>{CALL}"], reasoning="think", tools="hermes", opened="<think>")
    assert (answer.reasoning, answer.content, len(answer.calls)) == ("plan", "", 1)


def test_whole_calls_show_a_broken_call_as_its_text() -> None:
    assert parse([BROKEN], tools="hermes").calls[0].arguments == '{"a": '
    whole = parse([f"{BROKEN} {CALL}"], tools="hermes", whole_calls=True)
    assert (whole.content, [call.arguments for call in whole.calls]) == (BROKEN, ['{"a": 1}'])


def test_whole_calls_come_in_one_batch() -> None:
    parser = answer_parser(tools="hermes", definitions=TOOLS, whole_calls=True)
    assert parser.feed("Hm ") == [Content("Hm ")]
    assert parser.feed('<tool_call>{"name": "add", "arguments": {"a"') == []
    assert len(parser.feed(": 1}}</tool_call>")) == 3


def test_without_parallel_calls_the_first_is_the_last() -> None:
    parser = answer_parser(tools="hermes", definitions=TOOLS, parallel=False)
    answer = FoldedAnswer()
    for piece in (CALL, CALL, "more"):
        answer.add(parser.feed(piece))
    answer.add(parser.finish())
    assert parser.is_over
    assert (answer.content, len(answer.calls)) == ("", 1)


HARMONY = (
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1}<|call|><|start|>assistant<|channel|>final<|message|>Done'
)


def test_harmony_is_one_parser() -> None:
    answer = parse(list(HARMONY), reasoning="gpt_oss", tools="harmony")
    assert (answer.reasoning, answer.content, answer.calls[0].arguments) == ("hm", "Done", '{"a": 1}')
    without_tools = parse([HARMONY], reasoning="harmony")
    assert (without_tools.reasoning, without_tools.content) == ("hm", '{"a": 1}Done')
    without_reasoning = parse([HARMONY], tools="gpt-oss")
    assert (without_reasoning.reasoning, without_reasoning.content) == ("", "hmDone")


def test_harmony_call_with_broken_or_cut_arguments() -> None:
    head = "<|channel|>commentary to=functions.add<|message|>"
    cut = parse([head + '{"a": 1'], reasoning="harmony", tools="harmony")
    assert [(call.arguments, call.complete) for call in cut.calls] == [('{"a": 1', False)]
    broken = parse([head + '{"a": oh<|call|>'], reasoning="harmony", tools="harmony")
    assert [(call.arguments, call.complete) for call in broken.calls] == [('{"a": oh', False)]
    whole = parse([head + '{"a": oh<|call|>'], reasoning="harmony", tools="harmony", whole_calls=True)
    assert whole.calls == [] and '{"a": oh' in whole.content


@pytest.mark.parametrize("sample", SAMPLES, ids=[f"{n}-{s.name}" for n, s in enumerate(SAMPLES)])
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_composed_result_does_not_depend_on_the_cuts(sample: Sample, data: st.DataObject) -> None:
    reasoning = "harmony" if sample.name == "harmony" else "think"
    prefix = "" if reasoning == "harmony" else data.draw(st.sampled_from(["", "<think>\nplan\n</think>\n\n"]))
    whole_calls = data.draw(st.booleans())
    text = (prefix + sample.text)[: data.draw(st.integers(0, len(prefix + sample.text)))]
    points = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    options = {"reasoning": reasoning, "tools": sample.name, "whole_calls": whole_calls}
    assert parse(pieces, **options) == parse([text], **options)
    if text == prefix + sample.text:
        assert len(parse([text], **options).calls) == len(sample.calls)


def test_special_texts_of_both() -> None:
    assert needs_special(None, None) == frozenset()
    assert {"<think>", "<tool_call>"} <= needs_special("think", "hermes")


def test_parse_whole_is_one_piece() -> None:
    answer = parse_whole(answer_parser(tools="hermes", definitions=TOOLS), CALL)
    assert answer.calls[0].id.startswith("call_")
