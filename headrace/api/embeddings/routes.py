"""``POST /v1/embeddings`` (OpenAI's shape) and ``POST /v1/rerank`` (Cohere's, Jina's and vLLM's)."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.answering import receive
from headrace.api.embeddings.model import Asked, TextModel, hidden_states
from headrace.api.embeddings.schema import (
    MAX_INPUTS,
    EmbeddingFields,
    RerankFields,
    count_unknown,
    refuse_unsupported,
)
from headrace.api.embeddings.vectors import as_base64, unit_vector
from headrace.api.fields import convert
from headrace.api.models import json_response
from headrace.api.openai.prompts import split_prompts
from headrace.api.request_scope import note_accepted
from headrace.api.services import Services
from headrace.api.sse import until_disconnect
from headrace.errors import InvalidRequest


async def create_embedding(request: Request) -> Response:
    """Vectors of one or several texts."""
    house, body, arrival = await receive(request)
    refuse_unsupported(body)
    fields = convert(body, EmbeddingFields)
    _note_unknown(house, body, EmbeddingFields)
    name, model = house.text_models.embedding(fields.model)
    asked = Asked(arrival, "embd-", fields.priority or 0, lambda: note_accepted(request))

    async def compute() -> tuple[list[bytes], int]:
        return await hidden_states(model, await arrival.call(lambda: _inputs(model, fields.input)), asked)

    states, used = await until_disconnect(request.receive, compute())

    def render() -> list[dict[str, Any]]:
        vectors = [unit_vector(state, fields.dimensions) for state in states]
        if fields.encoding_format == "base64":
            shown: list[Any] = [as_base64(vector) for vector in vectors]
        else:
            shown = [vector.tolist() for vector in vectors]
        return [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(shown)]

    usage = {"prompt_tokens": used, "total_tokens": used}
    data = await arrival.call(render)
    return json_response({"object": "list", "data": data, "model": name, "usage": usage})


async def create_rerank(request: Request) -> Response:
    """Documents by their relevance to a query, best first."""
    house, body, arrival = await receive(request)
    refuse_unsupported(body)
    fields = convert(body, RerankFields)
    _note_unknown(house, body, RerankFields)
    name, scorer = house.text_models.scorer(fields.model)
    documents = [_document_text(item, index) for index, item in enumerate(fields.documents)]
    asked = Asked(arrival, "rerank-", fields.priority or 0, lambda: note_accepted(request))
    scoring = scorer.scores(fields.query, documents, fields.instruction, asked)
    scores, used = await until_disconnect(request.receive, scoring)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if fields.return_documents is not False:
        for result in results:
            result["document"] = {"text": documents[result["index"]]}
    usage = {"prompt_tokens": used, "total_tokens": used}
    return json_response({"id": f"rerank-{arrival.id}", "model": name, "usage": usage, "results": results})


def _note_unknown(house: Services, body: dict[str, Any], schema: type) -> None:
    if unknown := count_unknown(body, schema):
        house.metrics.unknown_field(unknown)


def _inputs(model: TextModel, given: object) -> list[list[int]]:
    """Token ids of each input, within the limit."""
    items = split_prompts(given, model.limits(), "input")
    if len(items) > MAX_INPUTS:
        raise InvalidRequest(f"input has {len(items)} entries; at most {MAX_INPUTS} are taken", param="input")
    single = isinstance(given, str) or (isinstance(given, list) and isinstance(given[0], int))
    found = []
    for index, item in enumerate(items):
        where = "input" if single else f"input[{index}]"
        if isinstance(item, str):
            found.append(model.encode(item, where, "input"))
        else:
            found.append(model.fitted(item, where, "input"))
    return found


def _document_text(item: str | dict[str, Any], index: int) -> str:
    text = item if isinstance(item, str) else item.get("text")
    if not isinstance(text, str) or not text:
        raise InvalidRequest(
            f"documents[{index}] must be a text that is not empty, or an object with one in text",
            param="documents",
        )
    return text
