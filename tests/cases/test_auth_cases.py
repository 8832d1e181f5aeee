"""With a key configured no route answers without it, however its path is spelled."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.client import Client
from support.server import Serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OPEN = {"/health", "/ready", "/"}  # the dashboard's page holds no data; it asks for the key itself
KNOWN = {
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/m", "/tokenize", "/detokenize",
    "/metrics", "/v1/status", "/v1/cache", "/v1/cache/stats", "/version", "/openapi.json", "/v1/messages",
    "/v1/responses", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank",
    "/v1/requests/x/cancel", "/", "/docs",
}  # fmt: skip


def test_every_route_wants_the_key(serve: Serve) -> None:
    server = serve("plain", "--api-key", "right", key="right")
    server.client.check_control()
    document = server.client.get("/openapi.json").json()
    paths = KNOWN | {path.replace("{", "").replace("}", "").replace(":path", "") for path in document["paths"]}
    spellings = set()
    for path in paths - OPEN:
        bare = path.removeprefix("/v1")
        spellings |= {path, bare or "/", f"{path}/", f"/{path}", path.upper(), f"/v1{bare}", f"/x/..{path}"}
    before = server.metrics()
    for key in (None, "wrong", ""):
        with closing(Client(server.url, "m", key)) as client:
            for path in sorted(spellings):
                for method in ("GET", "POST"):
                    answer = client.http.request(method, f"{server.url}{path}")
                    assert answer.status_code == 401, (method, path, answer.status_code)
                    check_body(answer.json())
            for path in OPEN:
                assert client.get(path).status_code == 200
    after = server.metrics()
    # not steps: the one ahead of the control request's last token may end at any time
    for name in ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
        assert after(name) == before(name)


def check_body(body: dict) -> None:
    """In the shape of the route's dialect."""
    error = body["error"]
    assert error["type"] == "authentication_error"
    assert error["code"] == "invalid_api_key" if "code" in error else body["type"] == "error"
    assert not any(word in error["message"] for word in ("right", "wrong", "/", "Error", "headrace"))
    assert len(error["message"]) < 120


def test_both_header_forms_carry_the_key(serve: Serve) -> None:
    server = serve("plain", "--api-key", "right", key="right")
    with closing(Client(server.url, "m")) as anonymous:
        for headers in ({"authorization": "Bearer right"}, {"x-api-key": "right"}):
            assert anonymous.get("/v1/models", headers=headers).status_code == 200
        for headers in ({"authorization": "right"}, {"authorization": "Basic right"}, {"x-api-key": "righ"}):
            assert anonymous.get("/v1/models", headers=headers).status_code == 401
