"""Finding and defusing special tokens' text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.text.special_text import SpecialText, unused_guards

SPECIALS = ["<|a|>", "<|ab|>", "|>", "[I]", "[/I]", "<s>", "</s>"]
IDS = {text: number for number, text in enumerate(SPECIALS)}
FINDER = SpecialText(IDS)
PIECES = st.lists(
    st.sampled_from([*SPECIALS, "<", "|", ">", "[", "]", "/", "s", "a", "b", "I", " ", "é"]), max_size=8
)
GUARD = unused_guards([])[0]


def test_leftmost_longest_occurrences() -> None:
    assert list(FINDER.find("x<|ab|><s>[/I]")) == [(1, 7, 1), (7, 10, 5), (10, 14, 4)]


@given(PIECES.map("".join))
def test_find_agrees_with_a_regular_expression(text: str) -> None:
    pattern = re.compile("|".join(re.escape(s) for s in sorted(SPECIALS, key=len, reverse=True)))
    assert list(FINDER.find(text)) == [(m.start(), m.end(), IDS[m.group()]) for m in pattern.finditer(text)]


@given(st.lists(PIECES.map("".join), min_size=1, max_size=4))
def test_guarded_strings_never_join_into_a_special(texts: list[str]) -> None:
    joined = "".join(FINDER.guarded(text, GUARD) for text in texts)
    assert not list(FINDER.find(joined))
    assert joined.replace(GUARD, "") == "".join(texts)


@given(PIECES.map("".join), st.sampled_from(SPECIALS), PIECES.map("".join))
def test_only_the_templates_own_specials_stay(before: str, own: str, after: str) -> None:
    rendered = FINDER.guarded(before, GUARD) + own + FINDER.guarded(after, GUARD)
    assert [found[2] for found in FINDER.find(rendered)] == [IDS[own]]


def test_ordinary_text_is_untouched() -> None:
    text = "Say hello to a lamp, twice."
    assert FINDER.guarded(text, GUARD) is text
    assert SpecialText({}).guarded("<s>", GUARD) == "<s>"


@given(PIECES.map("".join))
def test_split_joins_to_the_text(text: str) -> None:
    parts = FINDER.split(text)
    assert "".join(part if isinstance(part, str) else SPECIALS[part] for part in parts) == text


def test_guards_are_in_no_text() -> None:
    first, second = unused_guards([])
    third, fourth = unused_guards(["plain", f"x{first}y", f"é{second}"])
    assert len({first, second, third, fourth}) == 4
    with pytest.raises(ValueError):
        unused_guards([chr(code) for code in range(0xFDD0, 0xFDF0)])
