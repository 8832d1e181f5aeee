"""Keys, routes, methods, headers, probes, admin routes and the OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from http_harness import Api, chat_body
from starlette.routing import Route

from headrace.api.auth import RateLimiter
from headrace.api.dashboard.pages import read_files
from headrace.api.errors import RateLimited
from headrace.config import ApiKey

KEYS = (ApiKey("ada", "secret-a"), ApiKey("bob", "secret-b"))
PROBES = ("/health", "/ready")
OPEN = (*PROBES, *read_files())


def routes(api: Api) -> list[tuple[str, str]]:
    found = []
    for route in api.app.routes:
        assert isinstance(route, Route)
        path = (
            route.path.replace("{request_id}", "x")
            .replace("{model_id:path}", "scripted")
            .replace("{response_id}", "x")
        )
        found += [(method, path) for method in route.methods or ()]
    return found


def spellings(path: str) -> list[str]:
    return [path, path + "/", "/" + path, path.upper(), path.removeprefix("/v1"), "/v1" + path]


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "Basic x"}]
)
def test_every_route_wants_the_key(make_api: Any, headers: dict[str, str]) -> None:
    api = make_api(api_keys=KEYS)
    asked = 0
    for method, path in routes(api):
        for spelled in spellings(path):
            for verb in {method, "GET", "POST"}:
                if spelled in OPEN:
                    continue
                response = api.send(verb, httpx.URL(f"http://test{spelled}"), headers=headers, json={})
                assert response.status_code == 401, (verb, spelled)
                if verb != "HEAD":
                    answer, anthropic = response.json(), spelled.startswith("/v1/messages")
                    assert answer["error"]["type"] == "authentication_error"
                    assert answer.get("type") == ("error" if anthropic else None)
                    assert anthropic or answer["error"]["code"] == "invalid_api_key"
                asked += 1
    assert asked > 100
    assert api.engine.requests == []
    assert [api.send("GET", path).status_code for path in PROBES] == [200, 200]


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer secret-b"}, {"authorization": "bearer  secret-b"}, {"x-api-key": "secret-b"}],
)
def test_a_known_key_names_its_requests(make_api: Any, headers: dict[str, str]) -> None:
    api = make_api(api_keys=KEYS)
    assert api.post("/v1/chat/completions", chat_body("<|s05|>"), headers=headers).status_code == 200
    assert api.engine.requests[-1].key == "bob"
    assert api.metrics.ends[-1]["key"] == "bob"


def test_a_key_cancels_only_its_own_requests(make_api: Any) -> None:
    api = make_api(api_keys=KEYS)
    api.engine.paused = True

    async def scene() -> list[int]:
        import asyncio

        ada, bob = ({"x-api-key": f"secret-{letter}"} for letter in "ab")
        task = asyncio.create_task(api.client.post("/v1/chat/completions", json=chat_body("<|s05|>"), headers=ada))
        while not api.engine.running:
            await asyncio.sleep(0.002)
        path = f"/v1/requests/{api.engine.requests[0].id}/cancel"
        answers = [await api.client.post(path, headers=headers) for headers in (bob, ada)]
        await task
        return [answer.status_code for answer in answers]

    assert api.run(scene()) == [404, 200]


def test_rate_limit_per_key(make_api: Any) -> None:
    api = make_api(api_keys=KEYS, rate_limit_per_min=2)
    ada, bob = ({"x-api-key": f"secret-{letter}"} for letter in "ab")
    path = "/v1/chat/completions"
    codes = [api.post(path, chat_body("<|s05|>"), headers=ada).status_code for _ in range(3)]
    assert codes == [200, 200, 429]
    refused = api.post(path, chat_body("<|s05|>"), headers=ada)
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert api.metrics.rejections == ["rate_limit", "rate_limit"]
    assert api.post(path, chat_body("<|s05|>"), headers=bob).status_code == 200
    assert api.send("GET", "/v1/models", headers=ada).status_code == 200


def test_rate_limiter_refills() -> None:
    now = 0.0
    limiter = RateLimiter(60, lambda: now)
    for _ in range(60):
        limiter.take("a")
    with pytest.raises(RateLimited) as caught:
        limiter.take("a")
    assert caught.value.retry_after_s == pytest.approx(1.0)
    now = 1.0
    limiter.take("a")
    with pytest.raises(RateLimited):
        limiter.take("a")


def test_unknown_paths_and_methods(api: Api) -> None:
    for path in (
        "/nope",
        "/v1/chat",
        "/docs",
        "/V1/models",
        "//v1/models",
        "/v1/models//",
    ):
        response = api.send("GET", httpx.URL(f"http://test{path}"))
        assert response.status_code == 404, path
        assert response.json()["error"]["code"] in ("not_found", "model_not_found")
        assert response.headers["x-request-id"]
    response = api.send("GET", "/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert api.post("/v1/models", {}).status_code == 405


def test_head_and_options(api: Api) -> None:
    for path in ("/health", "/v1/models"):
        response = api.send("HEAD", path)
        assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    response = api.send("OPTIONS", "/v1/chat/completions")
    assert (response.status_code, response.headers["allow"], response.content) == (204, "POST", b"")


@pytest.mark.parametrize(
    ("path", "methods"),
    [("/v1/models/scripted", "GET, HEAD"), ("/v1/responses/resp_1", "DELETE, GET, HEAD"), ("/v1/cache", "DELETE")],
)
def test_allow_names_every_method_of_a_path(api: Api, path: str, methods: str) -> None:
    for method, status in (("OPTIONS", 204), ("PUT", 405)):
        response = api.send(method, path)
        assert (response.status_code, response.headers["allow"]) == (status, methods)


def test_request_ids(api: Api) -> None:
    assert api.send("GET", "/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("x" * 200, "a b", "é".encode()):
        given = api.send("GET", "/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert len(given) == 32
    answers = [api.chat(), api.chat(n=0), api.send("GET", "/nope"), api.chat(stream=True)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4
    assert answers[0].json()["id"] == f"chatcmpl-{ids[0]}"


def test_request_id_is_in_the_log(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="headrace.api"):
        api.post("/v1/chat/completions", {}, headers={"x-request-id": "mine-2"})
        api.send("GET", "/x%0aINFO forged")
    assert caplog.records[0].__dict__["request_id"] == "mine-2"
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_cors(make_api: Any) -> None:
    api = make_api(api_keys=KEYS, cors_origins=("https://app.example",))
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = api.send("OPTIONS", "/v1/chat/completions", headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    refused = api.send("GET", "/v1/models", headers={"origin": "https://app.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    other = api.send("GET", "/v1/models", headers={"origin": "https://evil.example", "x-api-key": "secret-a"})
    assert "access-control-allow-origin" not in other.headers
    plain = make_api().send("GET", "/health", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in plain.headers


@pytest.mark.parametrize(
    ("status", "health", "ready"),
    [
        ("starting", 503, 503),
        ("ready", 200, 200),
        ("restarting", 200, 503),
        ("draining", 200, 503),
        ("failed", 503, 503),
    ],
)
def test_probes(api: Api, status: str, health: int, ready: int) -> None:
    api.engine.set_status(status)
    assert api.send("GET", "/health").status_code == health
    answer = api.send("GET", "/ready")
    assert (answer.status_code, answer.json()["status"]) == (ready, status)


def test_models(api: Api) -> None:
    listed = api.send("GET", "/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["scripted", "alias"]
    card = api.send("GET", "/v1/models/alias").json()
    assert (card["object"], card["max_model_len"]) == ("model", 512)
    missing = api.send("GET", "/v1/models/org/none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert api.send("GET", "/version").json()["version"]


def test_tokenize_and_detokenize(api: Api) -> None:
    tokens = api.post("/tokenize", {"prompt": "ab<|s05|>", "return_token_strs": True}).json()
    assert (tokens["count"], tokens["max_model_len"]) == (3, 512)
    assert tokens["token_strs"] == ["a", "b", "<|s05|>"]
    assert api.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "ab<|s05|>"}
    chat = api.post("/tokenize", {"messages": [{"role": "user", "content": "<|s05|>"}]}).json()
    assert chat["count"] == api.chat().json()["usage"]["prompt_tokens"] == 4
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    for choice in ("auto", "none"):
        fields = {"messages": [{"role": "user", "content": "<|s05|>"}], "tools": tools, "tool_choice": choice}
        used = api.post("/v1/chat/completions", fields).json()["usage"]["prompt_tokens"]
        assert api.post("/tokenize", fields).json()["count"] == used
    assert api.post("/tokenize", {"prompt": ""}).json()["tokens"] == []
    messages = [{"role": "user", "content": "x"}]
    for odd in ({"tool_choice": "sometimes"}, {"reasoning_effort": "huge"}, {"reasoning_effort": "high"}):
        refusal = api.post("/tokenize", {"messages": messages, **odd}).json()["error"]
        assert refusal["param"] == next(iter(odd))
    for bad in ({}, {"prompt": "a", "messages": []}, {"prompt": 5}, {"prompt": "a", "model": "none"}):
        assert api.post("/tokenize", bad).status_code in (400, 404)
    for bad in ({}, {"tokens": [99999999]}, {"tokens": [-1]}, {"tokens": "x"}):
        assert api.post("/detokenize", bad).status_code == 400


def test_status_metrics_and_cache(api: Api) -> None:
    status = api.send("GET", "/v1/status").json()
    assert (status["status"], status["requests_in_flight"], status["engine"]["max_model_len"]) == ("ready", 0, 512)
    assert status["side_engines"] == []
    metrics = api.send("GET", "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert metrics.content == b"# HELP x y\n"
    assert api.send("GET", "/v1/cache/stats").json()["blocks"]["free"] == 0
    assert api.send("DELETE", "/v1/cache").json()["cleared"] is True
    assert api.send("DELETE", "/v1/cache/prefix").status_code == 200
    assert api.engine.cleared == 2
    api.engine.set_status("restarting")
    assert api.send("DELETE", "/v1/cache").status_code == 503


def test_openapi_document_describes_the_bodies(api: Api) -> None:
    document = api.send("GET", "/openapi.json").json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"] == "#/components/schemas/ChatFields"
    properties = document["components"]["schemas"]["ChatFields"]["properties"]
    assert {"messages", "temperature", "top_k"} <= set(properties)
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]


@pytest.mark.parametrize("prefix", ["", "/deep/prefix"])
def test_a_proxy_may_strip_the_root_path_or_not(make_api: Any, prefix: str) -> None:
    api = make_api(api_keys=KEYS, root_path="/deep/prefix")
    ours = {"authorization": "Bearer secret-a"}
    assert api.send("GET", f"{prefix}/health").status_code == 200
    assert api.send("GET", f"{prefix}/v1/models").status_code == 401
    assert api.send("GET", f"{prefix}/v1/models", headers=ours).json()["data"][0]["id"] == "scripted"
    assert api.send("GET", f"{prefix}/v1/models/scripted", headers=ours).status_code == 200
    refused = api.send("POST", f"{prefix}/v1/messages", headers=ours, json={})
    assert refused.status_code == 400 and refused.json()["type"] == "error"
    document = api.send("GET", f"{prefix}/openapi.json", headers=ours).json()
    assert document["servers"] == [{"url": "/deep/prefix"}]
    assert api.send("GET", f"{prefix}/deep/prefix/nothing", headers=ours).status_code == 404
