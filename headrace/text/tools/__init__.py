"""Tool-call parsers by the names people pass; the table is in docs/parsers.md.

``headrace.text.tools.answer`` puts a reasoning parser and a tool-call parser together;
``headrace.text.tools.detect`` chooses both by the model's chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.errors import StartupError
from headrace.text.reasoning.events import Parser, ToolDefinition
from headrace.text.reasoning.harmony import MARKS
from headrace.text.tools.calls import ToolCallParser
from headrace.text.tools.formats import FORMATS
from headrace.text.tools.harmony import HarmonyCalls

__all__ = ["definitions", "get_tool_parser", "is_harmony", "names", "needs_special"]

_HARMONY = ("harmony", "gpt_oss", "openai")


def names() -> tuple[str, ...]:
    return tuple(sorted((*FORMATS, *_HARMONY)))


def _known(name: str) -> str:
    plain = name.lower().replace("-", "_").replace(".", "_")
    if plain == "auto":
        raise StartupError("tool-call parser 'auto' is chosen by the model's chat template, not made by name")
    if plain not in FORMATS and plain not in _HARMONY:
        raise StartupError(f"tool-call parser {name!r} is not known; choose auto or one of {', '.join(names())}")
    return plain


def get_tool_parser(name: str, tools: Iterable[ToolDefinition]) -> Parser:
    """A parser of one answer's content.

    Args:
        name: as ``names`` lists it ("-" and "." count as "_"); raises StartupError for others.
        tools: those the request declared: their schemas type arguments that the model writes as plain text, and
            formats without marks recognise calls by their names.
    """
    plain = _known(name)
    if plain in _HARMONY:
        return HarmonyCalls(tools, reasoning=False)
    return ToolCallParser(FORMATS[plain], tools)


def needs_special(name: str) -> frozenset[str]:
    """Texts that the parser must see even where they are special tokens."""
    plain = _known(name)
    return MARKS if plain in _HARMONY else FORMATS[plain].needs_special


def is_harmony(name: str) -> bool:
    return _known(name) in _HARMONY


def definitions(tools: Sequence[Mapping[str, object]]) -> tuple[ToolDefinition, ...]:
    """Definitions from tools as requests declare them: ``{"type": "function", "function": {…}}``, or flat."""
    found: list[ToolDefinition] = []
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            parameters = function.get("parameters") or function.get("input_schema")
            found.append(ToolDefinition(name, parameters if isinstance(parameters, Mapping) else {}))
    return tuple(found)
