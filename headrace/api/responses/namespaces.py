"""Tools in groups: ``{"type": "namespace", "name": …, "description": …, "tools": [function …]}``.

A chat template knows one flat list of functions, so the model sees those of a group under joined names:

    namespace "agents", function "close"   <->   agents__close

Calls leave with both names apart, and calls of the history come back that way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.api.fields import shown
from headrace.errors import InvalidRequest


def joined_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a function."""
    return f"{namespace}__{name}" if namespace else name


def flat_tools(tools: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """(place in the request, namespace, tool) of every tool; those of a group have its description before theirs.

    Raises InvalidRequest for a group that is none; the tools themselves are not looked at.
    """
    for position, tool in enumerate(tools):
        where = f"tools[{position}]"
        if tool.get("type") != "namespace":
            yield where, None, tool
            continue
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not namespace:
            raise InvalidRequest(f"{where}.name must be a string that is not empty", param="tools")
        if not isinstance(inner, list) or not all(isinstance(function, dict) for function in inner):
            raise InvalidRequest(f"{where}.tools must be a list of objects, not {shown(inner)}", param="tools")
        for number, function in enumerate(inner):
            given = [text for text in (tool.get("description"), function.get("description")) if text is not None]
            if not all(isinstance(text, str) for text in given):
                raise InvalidRequest(f"{where}: a description must be a string", param="tools")
            words = [text for text in given if text]
            described = {**function, "description": "\n".join(words)} if words else function
            yield f"{where}.tools[{number}]", namespace, described


def namespaces(tools: Sequence[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Joined name -> (namespace, name) of the functions in groups. ``tools`` have passed all checks."""
    return {
        joined_name(namespace, tool["name"]): (namespace, tool["name"])
        for _, namespace, tool in flat_tools(tools)
        if namespace
    }
