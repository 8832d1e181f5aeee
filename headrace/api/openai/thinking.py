"""Thinking on, off or by effort, as variables of the model's chat template.

Templates know one of: ``reasoning_effort`` (a word), or a switch named ``enable_thinking`` or ``thinking``. What a
template does not mention it cannot honour.
"""

from __future__ import annotations

import re

from headrace.api.fields import shown
from headrace.errors import InvalidRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SWITCHES = ("enable_thinking", "thinking")


def switch_of(template: str) -> str | None:
    """Name of the template's variable that turns thinking on and off."""
    return next((name for name in _SWITCHES if _mentions(template, name)), None)


def effort_variables(template: str, effort: str, param: str = "reasoning_effort") -> dict[str, object]:
    """Variables for an effort; raises InvalidRequest where the template has none.

    A template that only switches thinking on and off takes every effort but "none" as on.
    """
    if effort not in EFFORTS:
        raise InvalidRequest(f"{param} must be one of {', '.join(EFFORTS)}, not {shown(effort)}", param=param)
    if _mentions(template, "reasoning_effort"):
        return {"reasoning_effort": effort}
    switch = switch_of(template)
    if switch is None and effort == "none" and "think" not in template.lower():
        return {}
    if switch is None:
        raise InvalidRequest(
            f"{param} is not supported by this model: its chat template knows no thinking effort; leave it out",
            param=param,
        )
    return {switch: effort != "none"}


def _mentions(template: str, variable: str) -> bool:
    return re.search(rf"(?<![\w.\"'<]){variable}(?![\w\"'>])", template) is not None
