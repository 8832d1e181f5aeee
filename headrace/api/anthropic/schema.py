"""Schemas of ``/v1/messages`` and ``/v1/messages/count_tokens``.

Fields are honoured (typed here), hints, refused or unknown, as ``headrace.api.openai.schema`` explains;
docs/anthropic-api.md lists them. null means absent.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.api.openai import schema
from headrace.errors import InvalidRequest

Share = Annotated[float, Meta(ge=0, le=1)]


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """What makes the prompt; all of ``count_tokens``."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesFields(PromptFields, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None


HINTS = frozenset({
    "metadata", "service_tier", "cache_control", "context_management", "betas", "anthropic_beta",
    "anthropic_version", "inference_geo", "speed", "diagnostics", "user_profile_id", "workspace_id",
})  # fmt: skip
REFUSED = frozenset({"container", "mcp_servers", "output_format", "fallbacks"})
_KNOWN = frozenset({*MessagesFields.__struct_fields__, *HINTS, *REFUSED})


def refuse_unsupported(body: dict[str, Any]) -> None:
    """400 for a known field that asks for what is not built."""
    for name in sorted(REFUSED):
        if body.get(name) not in (None, [], ""):
            raise InvalidRequest(f"{name} is not supported yet; leave it out", param=name)
    schema.refuse_unsupported(body, _KNOWN)


def count_unknown(body: dict[str, Any]) -> int:
    """Fields that no documented API has; ``count_tokens`` accepts those of a message, too."""
    return schema.count_unknown(body, _KNOWN)
