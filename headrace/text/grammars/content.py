"""What a request may demand of its content: each as one entry of llguidance's list of grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance

from headrace.errors import GrammarError
from headrace.text.grammars.numbers import exact_numbers

Entry = dict[str, Any]

# White space between JSON's tokens: a space, or a line end and an indentation. Without a bound a model may write
# nothing else until its length ends.
_WHITESPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,32}"
JSON_OBJECT: Entry = {"json_schema": {"type": "object", "x-guidance": {"whitespace_pattern": _WHITESPACE}}}


def json_schema(schema: object) -> Entry:
    """JSON text that satisfies ``schema``, an object or boolean. The schema's own ``x-guidance`` options count."""
    if schema is True:
        schema = {}
    if schema is False or not isinstance(schema, Mapping):
        raise GrammarError("a JSON schema must be an object that something can satisfy")
    options = schema.get("x-guidance", {})
    if not isinstance(options, Mapping):
        raise GrammarError("x-guidance must be an object")
    spaces = {} if "whitespace_flexible" in options else {"whitespace_pattern": _WHITESPACE}
    return {"json_schema": {**exact_numbers(schema), "x-guidance": {**spaces, **options}}}


def regex(pattern: str) -> Entry:
    """Text that ``pattern`` matches as a whole (Rust's syntax: no look-around, no back references)."""
    return {"lark_grammar": f"start: /{llguidance.regex_to_lark(pattern)}/"}


def choice(options: Sequence[str]) -> Entry:
    """One of several texts."""
    if not options or not all(isinstance(option, str) and option for option in options):
        raise GrammarError("a choice must be between texts that are not empty")
    return {"lark_grammar": "start: " + " | ".join(quoted(option) for option in options)}


def grammar(text: str) -> Entry:
    """Lark text with a rule named start, or GBNF text with one named root."""
    try:
        return {"lark_grammar": llguidance.grammar_from("grammar", text)}
    except (ValueError, RecursionError) as error:
        raise GrammarError(" ".join(str(error).split())) from None


def quoted(text: str) -> str:
    """A literal in Lark's spelling: JSON's, without a bare DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
