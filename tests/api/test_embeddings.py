"""``/v1/embeddings`` and ``/v1/rerank`` over an engine whose hidden states are a function of the tokens."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import math
import random
import re
import struct
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from http_harness import Api
from scripted_engine import ScriptedEngine
from sdk_clients import SyncASGITransport

from headrace.config import ApiKey
from headrace.errors import QueueFull
from headrace.gateway.streams import SlotStream
from headrace.request import EngineRequest, FinishReason, SequenceOutput

WIDTH = 16


def state_of(token_ids: list[int]) -> list[float]:
    digest = hashlib.sha512(repr(token_ids).encode()).digest()
    return [(byte - 128) / 8 for byte in digest[:WIDTH]]


def unit(values: list[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


class StateEngine(ScriptedEngine):
    """Requests finish in another order than they came; ``room`` bounds how many may be open."""

    room = 10**6

    def submit(self, request: EngineRequest) -> SlotStream:
        self.refusal = QueueFull("full", retry_after_s=0.1) if self.running >= self.room else None
        return super().submit(request)

    async def _run(self, request: EngineRequest, stream: SlotStream) -> None:
        assert request.params.embed and request.params.max_tokens == 1
        stream.put(SequenceOutput(request_id=request.id), time.monotonic())
        for _ in range(random.Random(request.id).randrange(20)):
            await asyncio.sleep(0)
        hidden = struct.pack(f"<{WIDTH}f", *state_of(request.prompt_token_ids))
        stream.put(
            SequenceOutput(request_id=request.id, finish_reason=FinishReason.LENGTH, hidden=hidden),
            time.monotonic(),
        )
        self._streams.pop(request.id, None)
        stream.end()


@pytest.fixture
def api(make_api: Callable[..., Api]) -> Api:
    return make_api(engine=StateEngine())


def embed(api: Api, given: Any, **fields: Any) -> Any:
    answer = api.post("/v1/embeddings", {"input": given, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts(count: int) -> list[str]:
    rng = random.Random(3)
    return ["".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 60))) for _ in range(count)]


def test_every_vector_belongs_to_its_input(api: Api) -> None:
    given = texts(40)
    tokenizer = api.app.state.services.text.tokenizer
    ids = [tokenizer.encode(text, parse_special=True) for text in given]
    answer = embed(api, given, model="alias", user="somebody")
    assert answer["object"] == "list" and answer["model"] == "alias"
    assert [item["index"] for item in answer["data"]] == list(range(40))
    for item, tokens in zip(answer["data"], ids, strict=True):
        assert item["object"] == "embedding"
        assert item["embedding"] == pytest.approx(unit(state_of(tokens)), abs=1e-6)
    count = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert embed(api, ids)["data"] == answer["data"]
    assert embed(api, ids[5])["data"][0]["embedding"] == answer["data"][5]["embedding"]
    assert embed(api, given[5])["data"][0]["embedding"] == answer["data"][5]["embedding"]
    assert api.metrics.first_tokens == 0 and len(api.metrics.ends) == 82 and api.engine.running == 0
    assert all(end["decode_s"] is None and end["e2e_s"] >= 0 for end in api.metrics.ends)


def test_base64_is_the_same_vector(api: Api) -> None:
    plain = embed(api, "abc", encoding_format="float")["data"][0]["embedding"]
    coded = base64.b64decode(embed(api, "abc", encoding_format="base64")["data"][0]["embedding"])
    assert list(struct.unpack(f"<{WIDTH}f", coded)) == plain == embed(api, "abc")["data"][0]["embedding"]


def test_dimensions_are_cut_and_scaled_anew(api: Api) -> None:
    whole = embed(api, "abc")["data"][0]["embedding"]
    assert embed(api, "abc", dimensions=8)["data"][0]["embedding"] == pytest.approx(unit(whole[:8]), abs=1e-6)
    for wrong in (0, -1, WIDTH + 1, 100000):
        answer = api.post("/v1/embeddings", {"input": "abc", "dimensions": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "dimensions"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "empty list"), ("", "empty"), ([""], r"input\[0\]"), (["a", ""], r"input\[1\]"),
        ([[]], r"input\[0\]"), ([[99999999]], "99999999"), ([1, -1], "-1"), ([1.5], "1.5"), ([True], "true"),
        (["a", 1], "input must be"),
        ([["a"]], "no token id"), (None, "input"), ({"a": 1}, "input"), (["a"] * 2049, "2048"),
    ],
)  # fmt: skip
def test_bad_inputs(api: Api, given: Any, words: str) -> None:
    answer = api.post("/v1/embeddings", {"input": given})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].partition("[")[0] == "input" and error["type"] == "invalid_request_error"
    assert re.search(words, error["message"]), error["message"]
    assert not api.engine.requests


def test_other_bad_fields(api: Api) -> None:
    for fields in ({"encoding_format": "int8"}, {"truncate_prompt_tokens": 3}, {"input_type": "query"}):
        answer = api.post("/v1/embeddings", {"input": "a", **fields})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(fields))
    message = api.post("/v1/embeddings", {"input": "a", "encoding_format": "int8"}).json()["error"]["message"]
    assert message == 'encoding_format must be "base64" or "float", not "int8"'
    assert api.post("/v1/embeddings", {"input": "a", "model": "other"}).status_code == 404
    assert api.post("/v1/embeddings", {}).json()["error"]["param"] == "input"
    embed(api, "a", surprise=1)
    assert api.metrics.unknown == 1


def test_too_long_names_the_limit(make_api: Callable[..., Api]) -> None:
    api = make_api(engine=StateEngine())
    answer = api.post("/v1/embeddings", {"input": ["a", "a" * 600]})
    assert answer.status_code == 400 and "at most 511" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "context_length_exceeded" and not api.engine.requests
    api = make_api(engine=StateEngine(), embedding_max_length=10)
    assert "at most 10" in api.post("/v1/embeddings", {"input": [65] * 11}).json()["error"]["message"]
    assert embed(api, [65] * 10)["usage"]["prompt_tokens"] == 10
    api = make_api(engine=StateEngine(), max_prompt_tokens=7)
    assert "at most 7" in api.post("/v1/embeddings", {"input": [65] * 8}).json()["error"]["message"]


def test_truncation_when_asked_for(make_api: Callable[..., Api]) -> None:
    api = make_api(engine=StateEngine(), embedding_max_length=10, embedding_truncates=True)
    cut, short = embed(api, [[65, 66, 67, 68, 69] * 4, [65, 66, 67, 68, 69] * 2])["data"]
    assert cut["embedding"] == short["embedding"]
    assert embed(api, [[65] * 20, [66] * 3])["usage"]["prompt_tokens"] == 13


def test_a_full_queue_delays_a_large_body_and_refuses_a_new_one(make_api: Callable[..., Api]) -> None:
    engine = StateEngine()
    engine.room = 16
    api = make_api(engine=engine)
    assert len(embed(api, texts(40))["data"]) == 40
    engine.room = 0
    answer = api.post("/v1/embeddings", {"input": "a"})
    assert answer.status_code == 429 and "retry-after" in answer.headers


def test_keys_and_request_ids(make_api: Callable[..., Api]) -> None:
    api = make_api(engine=StateEngine(), api_keys=(ApiKey("k", "secret"),))
    for path in ("/v1/embeddings", "/v1/rerank"):
        assert api.post(path, {}).status_code == 401
    headers = {"authorization": "Bearer secret", "x-request-id": "mine"}
    answer = api.post("/v1/embeddings", {"input": "a"}, headers=headers)
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
    assert api.engine.requests[0].key == "k"


def test_the_official_sdk(api: Api) -> None:
    http = openai.DefaultHttpxClient(transport=SyncASGITransport(api))
    with openai.OpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
        answer = client.embeddings.create(model="scripted", input=["ab", "cd"])  # asks for base64, decodes it
        plain = client.embeddings.create(model="scripted", input=["ab", "cd"], encoding_format="float")
    assert [item.embedding for item in answer.data] == [item.embedding for item in plain.data]
    assert len(answer.data[0].embedding) == WIDTH


# -- rerank ------------------------------------------------------------------------------------------------


def test_rerank_orders_by_the_cosine(api: Api) -> None:
    documents = texts(20)
    vectors = [item["embedding"] for item in embed(api, ["abc", *documents])["data"]]
    cosines = [sum(a * b for a, b in zip(vectors[0], vector, strict=True)) for vector in vectors[1:]]
    given = [{"text": text} if index % 2 else text for index, text in enumerate(documents)]
    answer = api.post("/v1/rerank", {"model": "scripted", "query": "abc", "documents": given})
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert [result["index"] for result in results] == sorted(range(20), key=lambda index: -cosines[index])
    for result in results:
        assert result["relevance_score"] == pytest.approx(cosines[result["index"]], abs=1e-6)
        assert result["document"] == {"text": documents[result["index"]]}
    fields = {"query": "abc", "documents": documents, "top_n": 3, "return_documents": False}
    top = api.post("/rerank", fields).json()["results"]
    assert top == [{name: result[name] for name in ("index", "relevance_score")} for result in results[:3]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["b", ""]}, "documents"),
        ({"query": "a", "documents": [{"title": "b"}]}, "documents"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        ({"query": "a", "documents": ["b"], "max_chunks_per_doc": 2}, "max_chunks_per_doc"),
    ],
)
def test_bad_rerank_requests(api: Api, fields: dict[str, Any], param: str) -> None:
    answer = api.post("/v1/rerank", fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
