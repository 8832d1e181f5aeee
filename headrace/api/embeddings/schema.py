"""Schemas of ``/v1/embeddings`` and ``/v1/rerank``; docs/embeddings.md lists every field for users."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.api.fields import unknown_fields
from headrace.errors import InvalidRequest

Positive = Annotated[int, Meta(ge=1)]
MAX_INPUTS = 2048


class EmbeddingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The public API's fields."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class RerankFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that Cohere, Jina and vLLM share. Documents are texts, or objects with a ``text``."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | dict[str, Any]], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


# Known elsewhere, would change the result, and not built.
_REFUSED = (
    "messages", "truncate_prompt_tokens", "add_special_tokens", "normalize", "input_type", "task", "late_chunking",
    "embedding_types", "output_dtype", "embed_dtype", "truncate", "truncation", "rank_fields",
    "max_chunks_per_doc", "max_tokens_per_doc", "mm_processor_kwargs", "softmax", "activation",
)  # fmt: skip
_HINTS = ("metadata", "safety_identifier", "request_id")


def refuse_unsupported(body: dict[str, Any]) -> None:
    for name in _REFUSED:
        if body.get(name) is not None:
            raise InvalidRequest(f"{name} is not supported here; leave it out", param=name)


def count_unknown(body: dict[str, Any], schema: type[msgspec.Struct]) -> int:
    """Fields that no documented API has."""
    return sum(name not in _HINTS and name not in _REFUSED for name in unknown_fields(body, schema))
