"""Tools of a chat request: what a declaration must look like, and which choices can be honoured.

Declared tools are shown to the model through its template. Choices that force a call are refused until there is
something that enforces them.
"""

from __future__ import annotations

from typing import Any

from headrace.api.fields import shown
from headrace.api.openai.schema import ChatFields
from headrace.errors import InvalidRequest


def tools_for_template(fields: ChatFields) -> list[dict[str, Any]] | None:
    """The tools that the template shows: none of them under ``tool_choice`` "none"."""
    tools = fields.tools or []
    names = [_check_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise InvalidRequest(f"tools has two functions named {shown(name)}", param="tools")
    _check_choice(fields.tool_choice, names)
    if tools and fields.parallel_tool_calls is False:
        raise InvalidRequest(
            "parallel_tool_calls false is not supported yet; leave it out", param="parallel_tool_calls"
        )
    return tools if tools and fields.tool_choice != "none" else None


def _check_tool(tool: dict[str, Any], where: str) -> str:
    if tool.get("type") != "function":
        raise InvalidRequest(f'{where}.type must be "function", not {shown(tool.get("type"))}', param="tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{where}.function must be an object, not {shown(function)}", param="tools")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name must be a string that is not empty", param="tools")
    for field, kind, words in (("description", str, "a string"), ("parameters", dict, "an object")):
        value = function.get(field)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{where}.function.{field} must be {words}, not {shown(value)}", param="tools")
    return name


def _check_choice(choice: str | dict[str, Any] | None, names: list[str]) -> None:
    if choice is None or choice in ("none", "auto"):
        return
    wanted = _forced_name(choice)
    if not names:
        raise InvalidRequest(f"tool_choice is {shown(choice)}, but tools declares none", param="tool_choice")
    if wanted is not None and wanted not in names:
        raise InvalidRequest(
            f"tool_choice names {shown(wanted)}, which tools does not declare", param="tool_choice"
        )
    raise InvalidRequest(
        f'tool_choice {shown(choice)} is not supported yet; use "auto" or "none"', param="tool_choice"
    )


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
