"""Tools of a chat request: what a declaration must look like.

Declared tools are shown to the model through its template; ``constraints`` judges the choice among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.api.fields import shown
from headrace.api.openai.constraints import check_tool_choice
from headrace.api.openai.schema import ChatFields
from headrace.errors import InvalidRequest


def tools_for_template(fields: ChatFields) -> list[dict[str, Any]] | None:
    """The tools that the template shows: none of them under ``tool_choice`` "none"."""
    tools = fields.tools or []
    names = [_check_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)]
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequest(f"tools has two functions named {shown(name)}", param="tools")
        seen.add(name)
    check_tool_choice(fields.tool_choice, names)
    return tools if tools and fields.tool_choice != "none" else None


def _check_tool(tool: dict[str, Any], where: str) -> str:
    if tool.get("type") != "function":
        raise InvalidRequest(f'{where}.type must be "function", not {shown(tool.get("type"))}', param="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object, not {shown(function)}", param="tools")
    return check_function(function, f"{where}.function")


def check_function(function: Mapping[str, Any], where: str, schema: str = "parameters") -> str:
    """The name of a declared function, whatever the dialect.

    ``where`` it stands in the request; ``schema`` is the field that describes its arguments.
    """
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.name must be a string that is not empty", param="tools")
    for field, kind, words in (("description", str, "a string"), (schema, dict, "an object")):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{where}.{field} must be {words}, not {shown(value)}", param="tools")
    callers = function.get("allowed_callers")
    if callers is not None and not (isinstance(callers, list) and "direct" in callers):
        raise InvalidRequest(
            f'{where}.allowed_callers must have "direct", not {shown(callers)}: here only the model calls tools',
            param="tools",
        )
    kind_of_arguments = (function.get(schema) or {}).get("type", "object")
    if kind_of_arguments != "object":
        raise InvalidRequest(
            f'{where}.{schema}.type must be "object", not {shown(kind_of_arguments)}', param="tools"
        )
    return name
