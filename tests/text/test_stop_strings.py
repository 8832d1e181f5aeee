"""Stop strings: the result depends on the text, not on how it was cut (cases B46, B48)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import scripted

from headrace.errors import InvalidRequest
from headrace.text.stop_strings import MAX_STOP_CHARS, MAX_STOP_STRINGS, StopAutomaton, StopStrings, validate_stops

LETTERS = st.text("ab c", max_size=40)
STOPS = st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


def cut(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """Everything emitted, and the stop that matched; checks that nothing that could be a stop went out early."""
    matcher = StopStrings(stops, include)
    seen, sent = "", ""
    for piece in pieces:
        emitted, matched = matcher.push(piece)
        seen, sent = seen + piece, sent + emitted
        if matched is not None:
            assert matcher.matched == matched
            assert matcher.push("more") == ("", None)
            assert matcher.finish() == ""
            return sent, matched
        assert seen.startswith(sent)
        held = seen[len(sent) :]
        longest = max((n for s in stops for n in range(len(s)) if n and seen.endswith(s[:n])), default=0)
        assert len(held) == longest
    return sent + matcher.finish(), None


def reference(stops: list[str], text: str, include: bool = False) -> tuple[str, str | None]:
    """The stop that is complete first; of several complete at the same place the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


@given(STOPS, LETTERS, st.lists(st.integers(0, 40), max_size=8), st.booleans())
def test_any_cut_gives_what_find_gives(stops: list[str], text: str, borders: list[int], include: bool) -> None:
    assert run(stops, cut(text, borders), include) == reference(stops, text, include)


@given(st.text("ab", min_size=1, max_size=4), LETTERS)
def test_one_stop_is_str_find(stop: str, text: str) -> None:
    sent, matched = run([stop], list(text))
    assert matched == (stop if stop in text else None)
    assert sent == text[: text.find(stop)] if stop in text else sent == text


@pytest.mark.parametrize(
    ("script", "stop", "text"),
    [
        ("s00", "gamma", "Alpha beta "),
        ("s00", "ma del", "Alpha beta gam"),
        ("s00", "mm", "Alpha beta ga"),
        ("s00", "beta", "Alpha "),
        ("s00", ["ta.", "zz"], "Alpha beta gamma del"),
        ("s02", "é", "ok 😀 caf"),
    ],
)
def test_stop_over_and_inside_tokens(script: str, stop: str | list[str], text: str) -> None:
    full = scripted.expected_text(script)
    pieces = cut(full, list(range(0, len(full), 3)))
    sent, matched = run(list(validate_stops(stop)), pieces)
    assert sent == text
    assert matched is not None


def test_included_stop_is_sent_and_what_follows_is_not() -> None:
    assert run(["gamma"], ["Alpha beta gam", "ma delta."], include=True) == ("Alpha beta gamma", "gamma")


def test_sequences_share_an_automaton() -> None:
    automaton = StopAutomaton(["abc"])
    first, second = StopStrings(automaton), StopStrings(automaton)
    assert first.push("xab") == ("x", None)
    assert second.push("c") == ("c", None)
    assert first.push("c") == ("", "abc")


def test_held_text_is_released_at_the_end() -> None:
    matcher = StopStrings(["delta!"])
    assert matcher.push("gamma delta") == ("gamma ", None)
    assert matcher.finish() == "delta"


def test_accepted_stops() -> None:
    assert validate_stops(None) == ()
    assert validate_stops([]) == ()
    assert validate_stops("a") == ("a",)
    assert validate_stops(["a", "b", "a"]) == ("a", "b")
    assert validate_stops(["\0"]) == ("\0",)
    assert len(validate_stops(["x" * 5000])[0]) == 5000
    assert len(validate_stops(list("abcde"))) == 5


@pytest.mark.parametrize(
    "value",
    [
        "",
        [""],
        ["a", ""],
        [None],
        5,
        {"a": 1},
        "\ud83d",
        ["x \ude00 y"],
        "x" * (MAX_STOP_CHARS + 1),
        [str(number) for number in range(MAX_STOP_STRINGS + 1)],
    ],
)
def test_refused_stops_name_the_field(value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_stops(value, "stop_sequences")
    assert caught.value.param == "stop_sequences"
    assert "stop_sequences" in caught.value.message
