"""Reasoning parsers by the names people pass; the table is in docs/parsers.md.

``get_reasoning_parser`` makes a parser of one answer. ``opening_of`` says what a rendered prompt has already
written of the answer: a template that opens the block itself makes the answer start inside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import StartupError
from headrace.text.reasoning.events import Parser
from headrace.text.reasoning.harmony import FINAL, MARKS, HarmonyParser
from headrace.text.reasoning.tags import TagReasoning

__all__ = ["ending_of", "get_reasoning_parser", "is_harmony", "names", "needs_special", "opening_of", "tags_of"]


@dataclass(frozen=True, slots=True)
class _Format:
    """One way to mark reasoning. ``marks`` may be special tokens, whose text the parser must see.

    ``opening`` is what a template writes to open a block, "" when templates do not; ``ending`` is what a model
    writes to end one and begin its answer.
    """

    make: Callable[[str], Parser]
    marks: frozenset[str]
    opening: str
    ending: str


def _tags(opening: str, closing: str) -> _Format:
    return _Format(
        lambda opened: TagReasoning(opening, closing, opened),
        frozenset({opening, closing}),
        opening,
        f"\n{closing}\n\n",
    )


_THINK = _tags("<think>", "</think>")
_HARMONY = _Format(lambda opened: HarmonyParser(opened=opened), MARKS, "", FINAL)
# gemma4 names the channel behind the mark; only "thought" is reasoning.
_GEMMA4 = _Format(
    lambda opened: TagReasoning("<|channel>thought", "<channel|>", opened),
    frozenset({"<|channel>", "<channel|>"}),
    "<|channel>thought",
    "<channel|>",
)
_FORMATS = {
    **dict.fromkeys(
        (
            "think", "qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "glm4", "glm45", "step3p5",
            "poolside_v1", "kimi_k2", "minimax_m2", "nemotron",
        ),
        _THINK,
    ),
    "mistral": _tags("[THINK]", "[/THINK]"),
    "gemma4": _GEMMA4,
    "gpt_oss": _HARMONY,
    "harmony": _HARMONY,
}  # fmt: skip


def names() -> tuple[str, ...]:
    return tuple(sorted(_FORMATS))


def _format(name: str) -> _Format:
    found = _FORMATS.get(name.lower().replace("-", "_"))
    if found is None:
        raise StartupError(f"reasoning parser {name!r} is not known; choose one of {', '.join(names())}")
    return found


def get_reasoning_parser(name: str, opened: str = "") -> Parser:
    """A parser of one answer.

    Args:
        name: as ``names`` lists it ("-" counts as "_"); raises StartupError for others.
        opened: what the prompt already holds of the answer: ``opening_of``, or the text of a message that is
            continued. It yields no events.
    """
    return _format(name).make(opened)


def needs_special(name: str) -> frozenset[str]:
    """Texts that the parser must see even where they are special tokens."""
    return _format(name).marks


def opening_of(name: str, prompt: str) -> str:
    """The opening tag when ``prompt`` (a rendered chat prompt, or its end) ends in it, else ""."""
    opening = _format(name).opening
    return opening if opening and prompt.rstrip().endswith(opening) else ""


def ending_of(name: str) -> str:
    """What ends a block and begins the answer, special tokens by their text: for who cuts thinking short."""
    return _format(name).ending


def tags_of(name: str) -> tuple[str, str]:
    """What opens and what closes a block; not for harmony."""
    form = _format(name)
    return form.opening, form.ending.strip()


def is_harmony(name: str) -> bool:
    return _format(name) is _HARMONY
