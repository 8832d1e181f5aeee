"""Where the form of an answer is demanded: ``response_format``, and tool choices that force a call.

Every dialect turns its own spelling into these chat fields, so this is the one place that honours or refuses them.
"""

from __future__ import annotations

from typing import Any

from headrace.api.fields import shown
from headrace.api.openai.schema import ChatFields
from headrace.errors import InvalidRequest

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def check_constraints(fields: ChatFields) -> None:
    """Raises InvalidRequest for what cannot be enforced."""
    kind = None if fields.response_format is None else fields.response_format.get("type")
    if fields.response_format is not None and kind not in _FORMATS:
        raise InvalidRequest(
            "response_format must be an object whose type is text, json_object or json_schema",
            param="response_format",
        )
    if kind not in (None, "text"):
        raise InvalidRequest(
            f"response_format of type {shown(kind)} is not supported yet; leave it out", param="response_format"
        )


def check_tool_choice(choice: str | dict[str, Any] | None, names: list[str]) -> None:
    """A choice must make sense with the declared tools, and must be one that can be enforced."""
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
