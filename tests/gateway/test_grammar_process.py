"""Grammars that nobody has vouched for: what they do to the compiler is not done to the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.errors import GrammarError
from headrace.gateway.grammar_process import GrammarProcess
from headrace.params import Grammar

pytestmark = pytest.mark.slow


@pytest.fixture
def process(scripted_folder: Callable[[str], Path]) -> Iterator[GrammarProcess]:
    yield (made := GrammarProcess(str(scripted_folder("plain")), None))
    made._child.end()


def lark(text: str) -> Grammar:
    return Grammar(json.dumps({"grammars": [{"lark_grammar": text}]}))


def schema(value: object) -> Grammar:
    """As a grammar may embed it: nobody has looked at its numbers."""
    return lark(f"start: %json {json.dumps(value)}")


GOOD = lark('start: "a" | "b"')
# Native code, fed with these, ended with a fault of memory access, and took 100 s and 7 GB.
CRASHES, LASTS = schema({"const": -(2**63)}), schema({"type": "number", "multipleOf": 123456000})


def test_verdicts(process: GrammarProcess) -> None:
    assert process.compile(GOOD).result() is None
    for _ in range(2):
        with pytest.raises(GrammarError, match="nothing"):
            process.compile(lark("start: nothing")).result()
    assert process.compile(GOOD).done()


def test_what_nothing_satisfies_is_found_behind_anything(process: GrammarProcess) -> None:
    """Thinking, or the head of a call, may come before it."""
    alive, dead = {"json_schema": {"type": "integer"}}, {"json_schema": {"$ref": "#"}}
    for start in ("start: @content", 'start: "thinking" @content', 'start: "a" @other | "b" @content'):
        for part in (alive, dead):
            parts = [{"name": "content", **part}, {"name": "other", **alive}]
            verdict = process.compile(Grammar(json.dumps({"grammars": [{"lark_grammar": start}, *parts]})))
            if part is alive:
                assert verdict.result() is None
            else:
                with pytest.raises(GrammarError, match="no text satisfies it"):
                    verdict.result()


def test_a_crash_is_a_verdict(process: GrammarProcess) -> None:
    with pytest.raises(GrammarError, match="failed on it"):
        process.compile(CRASHES).result()
    assert process.compile(GOOD).result() is None


def test_an_endless_one_is_ended(process: GrammarProcess) -> None:
    endless, next_one = process.compile(LASTS), process.compile(GOOD)
    with pytest.raises(GrammarError, match="takes more than 5 s"):
        endless.result()
    assert next_one.result() is None
    assert endless.exception() is process.compile(LASTS).exception()


def test_it_ends_with_the_one_who_asked(process: GrammarProcess) -> None:
    process.compile(GOOD).result()
    started = process._child._process
    assert started is not None and started.stdin is not None
    started.stdin.close()
    psutil.Process(started.pid).wait(20)
    assert process.compile(lark('start: "c"')).result() is None


def test_a_process_that_somebody_killed_is_no_verdict(process: GrammarProcess) -> None:
    process.compile(GOOD).result()
    started = process._child._process
    assert started is not None
    started.kill()
    assert process.compile(lark('start: "d"')).result() is None
    assert process._child._process is not started
