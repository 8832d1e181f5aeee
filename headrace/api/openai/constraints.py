"""Where the form of an answer is demanded: ``response_format`` and its relatives, tool choices that force a call.

Every dialect turns its own spelling into these fields, so this is the one place that honours or refuses them:

    content_demand(fields)      (field, what content must be)         chat and completions
    forced_tools(fields)        tools of which one must be called     chat
    chat_grammar(…)             both, and the model's thinking, as one grammar that was found to compile
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from headrace.api.fields import shown
from headrace.api.grammar_check import refusal
from headrace.api.openai.schema import ChatFields, SamplingFields
from headrace.api.services import Services
from headrace.errors import GrammarError, InvalidRequest, NotReady
from headrace.params import Grammar
from headrace.text.grammars import content
from headrace.text.grammars.call_forms import MAX_CALLS
from headrace.text.grammars.compose import AnswerGrammar
from headrace.text.grammars.content import Entry
from headrace.text.tools import definitions

_KINDS = ("json", "regex", "choice", "grammar")
# Seconds after which no further tool is compiled to find the one that a refusal is about.
NAMING_S = 5.0

Demand = tuple[str, Entry]


def content_demand(fields: SamplingFields) -> Demand | None:
    """The field that demands a form of the content, and the form; None: content is free.

    Raises InvalidRequest for what is no demand, or is more than one.
    """
    found = [
        (f"guided_{kind}", kind, value)
        for kind in _KINDS
        if (value := getattr(fields, f"guided_{kind}")) is not None
    ]
    if fields.structured_outputs is not None:
        found += _structured_outputs(fields.structured_outputs)
    if fields.response_format is not None:
        found += _response_format(fields.response_format)
    if len(found) > 1:
        names = " and ".join(name for name, _, _ in found)
        raise InvalidRequest(f"{names} demand the form of one answer; leave all but one out", param=found[1][0])
    if not found:
        return None
    name, kind, value = found[0]
    try:
        return name, _entry(kind, value)
    except GrammarError as error:
        raise refusal(name, error) from None


def check_tool_choice(choice: str | dict[str, Any] | None, names: list[str]) -> None:
    """A choice must make sense with the declared tools."""
    if choice is None or choice in ("none", "auto"):
        return
    wanted = _forced_name(choice)
    if not names:
        raise InvalidRequest(f"tool_choice is {shown(choice)}, but tools declares none", param="tool_choice")
    if wanted is not None and wanted not in names:
        raise InvalidRequest(
            f"tool_choice names {shown(wanted)}, which tools does not declare", param="tool_choice"
        )


def forced_tools(fields: ChatFields) -> list[dict[str, Any]]:
    """The tools of which one must be called; empty: no call is forced. The choice was checked."""
    if fields.tool_choice is None or fields.tool_choice in ("none", "auto"):
        return []
    wanted = _forced_name(fields.tool_choice)
    return [tool for tool in fields.tools or () if wanted in (None, tool["function"]["name"])]


async def chat_grammar(
    services: Services, fields: ChatFields, tools: Sequence[Mapping[str, Any]], *, opened: bool
) -> Grammar | None:
    """The grammar of a chat's answer; None: it is free.

    Args:
        services: know the model's tokenizer and parsers.
        fields: checked.
        tools: that the template shows.
        opened: the prompt ends inside a thinking block.
    """
    demand, forced = content_demand(fields), forced_tools(fields)
    if demand is None and not forced:
        return None
    param = "tool_choice" if forced or demand is None else demand[0]
    if fields.continue_final_message:
        raise InvalidRequest(
            f"{param} is about a whole answer, and continue_final_message continues one: leave one out",
            param=param,
        )
    parsers = services.parsers
    callable_tools = forced or (tools if parsers.tools is not None else ())
    # A small model repeats a call until its length ends, so several calls must be asked for.
    several = fields.parallel_tool_calls is True and not isinstance(fields.tool_choice, dict)
    answer = AnswerGrammar(services.text.tokenizer, parsers.reasoning, parsers.tools)
    try:
        grammar = answer.build(
            None if forced or demand is None else demand[1],
            definitions(callable_tools),
            max_calls=MAX_CALLS if several else 1,
            opened=opened,
        )
    except GrammarError as error:
        raise refusal(param, error) from None
    try:
        await services.grammars.check(grammar, param)
    except InvalidRequest:
        with suppress(NotReady):  # the refusal stands without the tool's name
            await _name_the_tool(services, answer, callable_tools, param)
        raise
    return grammar


async def _name_the_tool(
    services: Services, answer: AnswerGrammar, tools: Sequence[Mapping[str, Any]], param: str
) -> None:
    """Raises InvalidRequest that names the first tool which cannot be kept to alone, if that is found in time."""
    end_s = time.monotonic() + NAMING_S
    for tool in tools:
        if time.monotonic() > end_s:
            return
        alone = answer.build(None, definitions([tool]))
        await services.grammars.check(alone, param, f"the tool {shown(tool['function']['name'])}")


async def completion_grammar(services: Services, fields: SamplingFields) -> Grammar | None:
    """The grammar of a raw completion; None: it is free."""
    demand = content_demand(fields)
    if demand is None:
        return None
    try:
        grammar = AnswerGrammar(services.text.tokenizer, None, None).build(demand[1])
    except GrammarError as error:
        raise refusal(demand[0], error) from None
    await services.grammars.check(grammar, demand[0])
    return grammar


# -- inside


def _structured_outputs(fields: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """vLLM's object: exactly one of its kinds."""
    asked = {name: value for name, value in fields.items() if value is not None and value is not False}
    unknown = [name for name in asked if name not in (*_KINDS, "json_object")]
    if unknown:
        raise InvalidRequest(f"structured_outputs.{unknown[0]} is not supported", param="structured_outputs")
    if not asked:
        raise InvalidRequest(
            f"structured_outputs must have one of {', '.join(_KINDS)}, json_object", param="structured_outputs"
        )
    if not isinstance(asked.get("json_object", True), bool):
        raise InvalidRequest(
            f"structured_outputs.json_object must be true or false, not {shown(asked['json_object'])}",
            param="structured_outputs",
        )
    if len(asked) > 1:
        raise InvalidRequest(
            f"structured_outputs has {' and '.join(asked)}; it must have one of them", param="structured_outputs"
        )
    return [("structured_outputs", name, value) for name, value in asked.items()]


def _response_format(wanted: dict[str, Any]) -> list[tuple[str, str, Any]]:
    match wanted.get("type"):
        case "text":
            return []
        case "json_object":
            return [("response_format", "json_object", True)]
        case "json_schema":
            form = wanted.get("json_schema")
            if not isinstance(form, dict) or form.get("schema") is None:
                raise InvalidRequest(
                    "response_format.json_schema must be an object with a schema", param="response_format"
                )
            return [("response_format", "json", form["schema"])]
    raise InvalidRequest(
        f"response_format.type must be text, json_object or json_schema, not {shown(wanted.get('type'))}",
        param="response_format",
    )


def _entry(kind: str, value: Any) -> Entry:
    match kind:
        case "json_object":
            return content.JSON_OBJECT
        case "json":
            return content.json_schema(_parsed(value) if isinstance(value, str) else value)
        case "choice" if isinstance(value, list):
            return content.choice(value)
        case "regex" if isinstance(value, str):
            return content.regex(value)
        case "grammar" if isinstance(value, str):
            return content.grammar(value)
    raise GrammarError(f"{kind} must be {'a list of texts' if kind == 'choice' else 'a text'}")


def _parsed(text: str) -> object:
    try:
        schema: object = json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarError("it is a text that is no JSON") from None
    return schema


def _forced_name(choice: str | dict[str, Any]) -> str | None:
    """Name of the function that must be called; None for "required"."""
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}},'
            f" not {shown(choice)}",
            param="tool_choice",
        )
    return name
