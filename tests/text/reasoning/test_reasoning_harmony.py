"""Harmony channels without tools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.reasoning import get_reasoning_parser
from headrace.text.reasoning.events import FoldedAnswer, parse_whole


def parse(pieces: list[str], opened: str = "") -> tuple[str, str]:
    parser = get_reasoning_parser("harmony", opened)
    folded = FoldedAnswer()
    for piece in pieces:
        folded.add(parser.feed(piece))
    folded.add(parser.finish())
    return folded.reasoning, folded.content


ANALYSIS = "<|channel|>analysis<|message|>We think.<|end|>"
NEXT = "<|start|>assistant"
CASES = [
    (ANALYSIS + "<|start|>assistant<|channel|>final<|message|>42", "We think.", "42"),
    (ANALYSIS + "<|start|>assistant<|channel|>final<|message|>42<|return|>", "We think.", "42"),
    (ANALYSIS + NEXT + "<|channel|>commentary<|message|>I look.<|end|>", "We think.", "I look."),
    (ANALYSIS + NEXT + ANALYSIS + NEXT + "<|channel|>final<|message|>42", "We think.We think.", "42"),
    ("<|channel|>analysis<|message|>cut", "cut", ""),
    ("<|channel|>analysis<|mess", "", ""),
    (ANALYSIS + "<|start|>assi", "We think.", ""),
    ("plain text", "", "plain text"),
    ("plain <|channel|>final<|message|>text", "", "plain text"),
    ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>', "", '{"a": 1}'),
    ("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", "{}", ""),
    ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reasoning", "content"), CASES)
def test_channels(text: str, reasoning: str, content: str) -> None:
    whole = parse([text])
    assert whole == parse(list(text))
    assert whole == (reasoning, content)
    assert "<|" not in "".join(whole)


def test_goes_on_where_the_prompt_stopped() -> None:
    assert parse(["42"], "<|channel|>final<|message|>") == ("", "42")


PARTS = [
    "<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary", " to=functions.add", "<|message|>",
    "<|end|>", "<|call|>", "<|return|>", "<|constrain|>json", "text", " ", "\n", "<|", "x" * 600,
]  # fmt: skip


@given(parts=st.lists(st.sampled_from(PARTS), max_size=14), data=st.data())
def test_result_does_not_depend_on_the_cuts(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    points = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    whole = parse_whole(get_reasoning_parser("harmony"), text)
    assert parse(pieces) == parse(list(text)) == (whole.reasoning, whole.content)
    assert (whole.reasoning + whole.content).count("text") <= text.count("text")
