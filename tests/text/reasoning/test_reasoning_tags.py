"""Reasoning between tags: the scripted answers, the white space rule, and independence of how text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import StartupError
from headrace.text.reasoning import get_reasoning_parser, names, needs_special, opening_of
from headrace.text.reasoning.events import Content, FoldedAnswer, Reasoning, parse_whole


def parse(name: str, pieces: list[str], opened: str = "") -> tuple[str, str]:
    parser = get_reasoning_parser(name, opened)
    folded = FoldedAnswer()
    for piece in pieces:
        events = parser.feed(piece)
        assert all(event.text for event in events if isinstance(event, (Content, Reasoning)))
        folded.add(events)
    folded.add(parser.finish())
    assert not folded.calls
    return folded.reasoning, folded.content


SCRIPTS = [
    (["<thi", "nk>", "plan", " it", "</th", "ink>", "42"], "", "plan it", "42"),
    (["Use ", "<think>", " and ", "<tool_call>", " tags ", "</think>", " here", "."], "",
     " and <tool_call> tags ", "Use  here."),
    (["plan", " it", "</th", "ink>", "42"], "<think>", "plan it", "42"),
    (["<think>", "a", "</think>", " be", "fore ", "<thi", "nk>", "b", "</th", "ink>", " after"], "",
     "ab", " before  after"),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "opened", "reasoning", "content"), SCRIPTS)
def test_scripted_answers(pieces: list[str], opened: str, reasoning: str, content: str) -> None:
    assert parse("qwen3", pieces, opened) == (reasoning, content)
    assert parse("qwen3", ["".join(pieces)], opened) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nplan\n</think>\n\nanswer\n", "", "plan", "answer\n"),
        ("\n<think>\n\nplan</think>\nanswer", "", "plan", "answer"),
        ("\n\nanswer", "", "", "\n\nanswer"),
        ("plan\n\nmore\n</think>\nanswer", "<think>\n", "plan\n\nmore", "answer"),
        ("<think>\nplan</think>answer", "<think>\n", "plan", "answer"),  # the model repeats the tag
        ("<think></think>answer", "", "", "answer"),
        ("</think>\n\nanswer", "", "", "answer"),
        ("a </think> b", "", "", "a </think> b"),
        ("a <thin", "", "", "a <thin"),
        ("<think>cut\n", "", "cut\n", ""),
        ("<think>cut</thi", "", "cut</thi", ""),
        ("", "<think>", "", ""),
    ],
)
def test_white_space_and_cut_answers(text: str, opened: str, reasoning: str, content: str) -> None:
    assert parse("think", [text], opened) == (reasoning, content)
    assert parse("think", list(text), opened) == (reasoning, content)


def test_cut_by_length_stays_reasoning() -> None:
    pieces = ["plan", " it", "</th", "ink>", "42"]
    for length, expected in ((1, "plan"), (2, "plan it")):
        assert parse("deepseek_r1", pieces[:length], "<think>") == (expected, "")


def test_only_what_may_become_a_tag_is_held_back() -> None:
    parser = get_reasoning_parser("think")
    assert parser.feed("a < b <th") == [Content("a < b ")]
    assert parser.feed("e end") == [Content("<the end")]
    assert parser.feed("<think>x\n") == [Reasoning("x")]
    assert parser.feed("y") == [Reasoning("\ny")]


TAGS = {
    "qwen3": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma4": ("<|channel>thought", "<channel|>"),
}


@pytest.mark.parametrize("name", TAGS)
def test_each_form(name: str) -> None:
    opening, closing = TAGS[name]
    assert parse(name, [f"{opening}\nplan\n{closing}\nanswer"]) == ("plan", "answer")
    assert opening_of(name, f"… {opening}\n") == opening
    assert opening_of(name, f"… {opening}\n{closing}") == ""
    assert needs_special(name)


def fragments(name: str) -> list[str]:
    opening, closing = TAGS[name]
    whole = [opening, closing, "\n", " ", "plan", "ö", "<", "[", "|>"]
    return [*whole, opening[:4], opening[4:], closing[:5], closing[5:]]


def cut(data: st.DataObject, text: str) -> list[str]:
    points = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    return [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]


@pytest.mark.parametrize("name", TAGS)
@given(data=st.data())
def test_result_does_not_depend_on_the_cuts_and_loses_nothing(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(fragments(name)), max_size=12)))
    opened = data.draw(st.sampled_from(["", TAGS[name][0] + "\n"]))
    whole = parse_whole(get_reasoning_parser(name, opened), text)
    assert parse(name, cut(data, text), opened) == (whole.reasoning, whole.content)
    assert parse(name, list(text), opened) == (whole.reasoning, whole.content)
    # All that is dropped is tags and line ends.
    kept = sorted((whole.reasoning + whole.content).replace("\n", ""))
    rest = sorted(text.replace("\n", ""))
    dropped = len(rest) - len(kept)
    opening, closing = TAGS[name]
    assert any(
        a * len(opening) + b * len(closing) == dropped
        for a in range(text.count(opening) + 1)
        for b in range(text.count(closing) + 1)
    )
    assert opening not in whole.content


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(StartupError, match="qwen3"):
        get_reasoning_parser("nonsense")
    wanted = "qwen3 deepseek_r1 deepseek_v4 gpt_oss harmony gemma4 glm4 mistral poolside_v1 step3p5"
    assert set(wanted.split()) <= set(names())
    get_reasoning_parser("gpt-oss")
