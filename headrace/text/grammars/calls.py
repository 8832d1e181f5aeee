"""A grammar of tool calls, from the declared tools and the form in which the model writes calls.

Arguments are the tool's JSON schema, each a grammar of its own (so "#/$defs/…" points where the author meant).
Formats that tag their arguments write strings bare; a string whose schema says more than its values or its type
cannot be held to that there, and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from headrace.errors import GrammarError
from headrace.text.grammars.call_forms import Arguments, CallForm
from headrace.text.grammars.content import Entry, json_schema, quoted
from headrace.text.reasoning.events import ToolDefinition
from headrace.text.tools.schema import property_types

_PLAIN_NAME = re.compile(r"[\w.\-]{1,256}")
_PLAIN_WORDS = frozenset({"type", "description", "title", "default", "examples", "anyOf", "oneOf"})
_ROOT_WORDS = ("$defs", "definitions", "$schema")
# JSON strings that are Python strings too.
_PYTHON = {"json_allowed_escapes": 'nrbtf\\"'}

Literal = Callable[[str], str]


class CallGrammar:
    """Rules and entries of calls; ``rule`` is the name of the rule for a whole answer of calls.

    Args:
        form: of the model.
        tools: that may be called, at least one.
        literal: a text in Lark's spelling, special tokens as tokens.
        max_calls: in the answer, at most.
    """

    def __init__(self, form: CallForm, tools: Sequence[ToolDefinition], literal: Literal, max_calls: int) -> None:
        self._form = form
        self._literal = literal
        self.rule = "calls"
        self.rules: list[str] = []
        self.entries: list[Entry] = []
        names = [self._named(number, tool) for number, tool in enumerate(tools)]
        self.rules.append(f"one_call: {' | '.join(names)}")
        further = min(max_calls, form.max_calls) - 1
        repeated = f"({literal(form.between)} one_call){{0,{further}}}" if further else ""
        self.rules.append(f"calls: {literal(form.begin)} one_call {repeated} {literal(form.end)}")

    def _named(self, number: int, tool: ToolDefinition) -> str:
        """The rule of a tool's call; what is wrong with the tool is said with its name."""
        try:
            return self._add_tool(number, tool)
        except GrammarError as error:
            raise GrammarError(f"the tool {quoted(tool.name)}: {error}") from None

    def _add_tool(self, number: int, tool: ToolDefinition) -> str:
        form, literal = self._form, self._literal
        if not form.quotes_name and not _PLAIN_NAME.fullmatch(tool.name):
            raise GrammarError("this model's call format cannot write its name")
        head = form.before + (quoted(tool.name) if form.quotes_name else tool.name) + form.middle
        match form.arguments:
            case Arguments.OBJECT:
                inside = self._entry(f"arguments_{number}", argument_schema(tool.parameters))
            case Arguments.KEYWORDS:
                inside = self._keywords(number, tool.parameters)
            case Arguments.TAGS:
                inside = self._tags(number, tool.parameters)
        self.rules.append(f"call_{number}: {literal(head)} {inside} {literal(form.after)}")
        return f"call_{number}"

    def _entry(self, name: str, schema: Mapping[str, object]) -> str:
        self.entries.append({"name": name, **json_schema(schema)})
        return f"@{name}"

    # -- key by key

    def _keywords(self, number: int, parameters: Mapping[str, object]) -> str:
        parts: list[tuple[str, bool]] = []
        for position, (key, schema, required) in enumerate(_properties(parameters)):
            if not key.isidentifier():
                raise GrammarError(f"this model's call format cannot name a parameter {quoted(key)}")
            options = {"x-guidance": _PYTHON}
            value = self._entry(f"value_{number}_{position}", {**_rooted(schema, parameters), **options})
            parts.append((f"{self._literal(key + '=')} {value}", required))
        return self._listed(f"keywords_{number}", parts)

    def _listed(self, name: str, parts: Sequence[tuple[str, bool]]) -> str:
        """Parts in order with commas between those that are there: one rule for each place in the list."""
        comma = self._literal(", ")
        for position in range(len(parts), -1, -1):
            first, later = f"{name}_{position}", f"{name}_rest_{position}"
            if position == len(parts):
                self.rules += [f'{first}: ""', f'{later}: ""']
                continue
            part, required = parts[position]
            skip_first, skip_later = (
                ("", "") if required else (f" | {name}_{position + 1}", f" | {name}_rest_{position + 1}")
            )
            self.rules.append(f"{first}: {part} {name}_rest_{position + 1}{skip_first}")
            self.rules.append(f"{later}: {comma} {part} {name}_rest_{position + 1}{skip_later}")
        return f"{name}_0"

    def _tags(self, number: int, parameters: Mapping[str, object]) -> str:
        parts: list[str] = []
        for position, (key, schema, required) in enumerate(_properties(parameters)):
            if not _PLAIN_NAME.fullmatch(key):
                raise GrammarError(f"this model's call format cannot name a parameter {quoted(key)}")
            types = property_types(parameters, key)
            is_text = "string" in types or not types
            opening = self._form.opening.replace("{key}", key)
            opening = opening.replace("{is_text}", "true" if is_text else "false")
            name = f"value_{number}_{position}"
            if is_text:
                value = self._bare_text(name, key, schema)
            else:
                value = f"{self._entry(name, _rooted(schema, parameters))} {self._literal(self._form.closing)}"
            self.rules.append(f"tag_{number}_{position}: {self._literal(opening)} {value}")
            parts.append(f"tag_{number}_{position}" + ("" if required else "?"))
        return " ".join(parts)

    def _bare_text(self, name: str, key: str, schema: object) -> str:
        """A string without quotes, up to its closing tag."""
        closing = self._form.closing
        values = _values(schema)
        if values is not None:
            return f"({' | '.join(map(quoted, values))}) {self._literal(closing)}"
        if not _is_plain(schema):
            raise GrammarError(
                f"this model's call format cannot hold the parameter {quoted(key)} to its schema; use a plain"
                " string or an enum"
            )
        self.rules.append(f"{name}[suffix={quoted(closing)}]: /(?s:.*)/")
        return name


def argument_schema(parameters: Mapping[str, object]) -> dict[str, object]:
    """A tool's parameters as the schema of one object; what a tool does not list it does not take."""
    schema = {"type": "object", **parameters}
    combines = any(word in schema for word in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties"))
    if "additionalProperties" not in schema and not combines:
        schema.setdefault("properties", {})
        schema["additionalProperties"] = False
    return schema


def _properties(parameters: Mapping[str, object]) -> list[tuple[str, object, bool]]:
    """(key, schema, whether it is required) of a tool whose arguments are written key by key."""
    properties = parameters.get("properties", {})
    required = parameters.get("required", [])
    odd = [word for word in ("$ref", "anyOf", "oneOf", "allOf", "patternProperties") if word in parameters]
    if odd or not isinstance(properties, Mapping) or not isinstance(required, list):
        what = odd[0] if odd else "properties or required"
        raise GrammarError(f"this model's call format cannot hold arguments to {what} of a tool's parameters")
    unknown = [key for key in required if key not in properties]
    if unknown:
        raise GrammarError(f"a tool requires {unknown[0]!r}, which its properties do not describe")
    return [(key, schema, key in required) for key, schema in properties.items()]


def _rooted(schema: object, root: Mapping[str, object]) -> dict[str, object]:
    """A property's schema with what local references point into."""
    own: Mapping[str, object] = {}
    if isinstance(schema, Mapping):
        own = schema
    elif schema is not True:
        raise GrammarError("a parameter's schema must be an object that something can satisfy")
    return {**{word: root[word] for word in _ROOT_WORDS if word in root}, **own}


def _values(schema: object) -> list[str] | None:
    """The texts that an enum or a constant allows; None: any."""
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    texts = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
    return texts if texts and texts == values else None


def _is_plain(schema: object) -> bool:
    """Whether a type is all that the schema demands."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping) or not _PLAIN_WORDS.issuperset(schema):
        return False
    options = [option for word in ("anyOf", "oneOf") for option in schema.get(word, ())]
    return all(map(_is_plain, options))
