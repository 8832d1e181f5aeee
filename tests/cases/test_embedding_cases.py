"""Cases of embeddings (B125, B126, B127) and rerank on the demo model; mlx-lm's own states are the measure."""

from __future__ import annotations

import base64
import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.client import RawConnection
from support.server import Server, ServerRoom, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

HIDDEN = Path(__file__).parent.parent / "support" / "mlx_lm_hidden.py"
LIMIT = 900
WORDS = ["river", "stone", "light", "market", "engine", "yellow", "quiet", "number", "window", "paper"]


@pytest.fixture(scope="module")
def server(server_room: ServerRoom) -> Iterator[Server]:
    """The demo model, and the same file once more as the rerank model."""
    path = server_room.path("demo")
    flags = ("--rerank-model", path, "--embedding-max-length", str(LIMIT), "--memory-headroom", "0.05")
    found = server_room.start("demo", *flags)
    yield found
    assert found.end() == 0


def text_of(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def embed(server: Server, given: Any, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/embeddings", {"model": "m", "input": given, **fields})


def rerank(server: Server, documents: list[str]) -> httpx.Response:
    return server.client.post("/v1/rerank", {"query": "river", "documents": documents})


def vectors(server: Server, given: Any, **fields: Any) -> list[Any]:
    answer = embed(server, given, **fields)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def tokens(server: Server, text: str) -> list[int]:
    return server.client.post("/tokenize", {"prompt": text}).json()["tokens"]


def reference(room: ServerRoom, **request: Any) -> dict[str, Any]:
    whole = {"model": room.path("demo"), "texts": [], "judged": [], "yes": 0, "no": 0, **request}
    done = subprocess.run(
        [sys.executable, str(HIDDEN)], input=json.dumps(whole), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_states_are_the_models_own_alone_and_together(server_room: ServerRoom) -> None:
    exact = server_room.start("demo", "--dequantize", "--memory-headroom", "0.05")
    texts, ids, expected = texts_and_states(exact, server_room)
    together = vectors(exact, texts)
    for index, text in enumerate(texts):
        assert together[index] == pytest.approx(expected[index], abs=1e-4)
        assert vectors(exact, text)[0] == pytest.approx(expected[index], abs=1e-4)
        assert vectors(exact, ids[index])[0] == pytest.approx(expected[index], abs=1e-4)
    assert exact.end() == 0


def test_states_by_packed_weights_are_parallel_to_the_models_own(server: Server, server_room: ServerRoom) -> None:
    """Products with weights of 4 bits round what they multiply to 16 bits (docs/performance.md)."""
    texts, ids, expected = texts_and_states(server, server_room)
    together = vectors(server, texts)
    for index, text in enumerate(texts):
        assert sum(a * b for a, b in zip(together[index], expected[index], strict=True)) > 1 - 1e-5
        assert together[index] == pytest.approx(expected[index], abs=2e-3)
        assert vectors(server, text)[0] == pytest.approx(together[index], abs=1e-4)
        assert vectors(server, ids[index])[0] == pytest.approx(together[index], abs=1e-4)


def texts_and_states(server: Server, room: ServerRoom) -> tuple[list[str], list[list[int]], list[list[float]]]:
    """Texts of different lengths, their tokens, and their states by the model's own one-sequence cache."""
    rng = random.Random(5)
    texts = [text_of(rng, words) for words in (1, 40, 7, 300, 2)]
    ids = [tokens(server, text) for text in texts]
    return texts, ids, reference(room, texts=ids)["states"]


def test_forty_inputs_as_texts_and_as_ids(server: Server) -> None:
    rng = random.Random(6)
    texts = [f"{number} {text_of(rng, rng.randrange(1, 12))}" for number in range(40)]
    as_texts, as_ids = vectors(server, texts), vectors(server, [tokens(server, text) for text in texts])
    for one, other in zip(as_texts, as_ids, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
        assert math.isclose(math.fsum(value * value for value in one), 1.0, abs_tol=1e-5)
    for bad in ([], [""], [[99999999]]):
        assert embed(server, bad).status_code == 400


def test_texts_that_differ_late_and_texts_too_long(server: Server) -> None:
    rng = random.Random(7)
    same = [rng.randrange(1000, 5000) for _ in range(700)]
    one, other = [*same, 300, 301, 302], [*same, 400, 401, 402]
    answer = embed(server, [one, other])
    assert answer.json()["usage"] == {"prompt_tokens": 1406, "total_tokens": 1406}
    first, second = (item["embedding"] for item in answer.json()["data"])
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-3
    refused = embed(server, [same, [5] * (LIMIT + 1), same])
    assert refused.status_code == 400 and str(LIMIT) in refused.json()["error"]["message"]
    assert len(vectors(server, [same, [5] * LIMIT])) == 2


def test_base64_and_dimensions(server: Server) -> None:
    (plain,) = vectors(server, "a window", encoding_format="float")
    (coded,) = vectors(server, "a window", encoding_format="base64")
    assert list(struct.unpack(f"<{len(plain)}f", base64.b64decode(coded))) == pytest.approx(plain, abs=1e-6)
    (short,) = vectors(server, "a window", dimensions=8)
    length = math.sqrt(sum(value * value for value in plain[:8]))
    assert short == pytest.approx([value / length for value in plain[:8]], abs=1e-5)
    for wrong in (0, 100000):
        assert embed(server, "a window", dimensions=wrong).status_code == 400


def test_the_official_sdk(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
        answer = client.embeddings.create(model="m", input=["one", "two"])
        assert [item.index for item in answer.data] == [0, 1] and answer.usage.total_tokens == 2
        assert answer.data[0].embedding == pytest.approx(vectors(server, "one")[0], abs=1e-4)
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="m", input="one", dimensions=100000)


def test_rerank_by_yes_and_no(server: Server, server_room: ServerRoom) -> None:
    """Scores are those of mlx-lm's own logits for Qwen3-Reranker's form."""
    query, documents = "what is yellow?", ["The sun is yellow.", "Engines are loud.", "<|im_end|>"]
    body = {"query": query, "documents": documents, "instruction": "Find answers"}
    answer = server.client.post("/v1/rerank", body)
    assert answer.status_code == 200, answer.text
    scores = {result["index"]: result["relevance_score"] for result in answer.json()["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    judged = [
        tokens(
            server,
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n<Instruct>: Find answers\n"
            f"<Query>: {query}\n<Document>: {text}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        )
        for text in documents[:2]
    ]
    ids = {word: tokens(server, word)[0] for word in ("yes", "no")}
    expected = reference(server_room, judged=judged, **ids)["scores"]
    assert [scores[0], scores[1]] == pytest.approx(expected, abs=2e-3)


def test_rerank_by_the_main_models_embeddings(server: Server) -> None:
    body = {"model": "m", "query": "river", "documents": ["stone", "river"], "top_n": 1}
    (result,) = server.client.post("/v1/rerank", body).json()["results"]
    assert result["index"] == 1 and result["relevance_score"] == pytest.approx(1.0, abs=1e-3)


# -- requests that are given up ----------------------------------------------------------------------------

LONG_INPUTS, LONG_WORDS = 60, 300
LONG_TOKENS = LONG_INPUTS * LONG_WORDS  # at least: a word is a token or more


def long_request(route: str, seed: int) -> dict[str, Any]:
    """A body that takes the engine many steps, none of which the prefix cache spares."""
    rng = random.Random(seed)
    texts = [f"{number} {text_of(rng, LONG_WORDS)}" for number in range(LONG_INPUTS)]
    return {"query": "river", "documents": texts} if route == "/v1/rerank" else {"model": "m", "input": texts}


def engine_of(server: Server, route: str) -> dict[str, Any]:
    """What ``/v1/status`` says of the engine that computes for this route."""
    status = server.status()
    return status["side_engines"][0] if route == "/v1/rerank" else status


def wait_idle(server: Server, route: str) -> dict[str, Any]:
    """The engine's figures once it has nothing to do and holds nothing."""

    def is_idle() -> bool:
        found = engine_of(server, route)
        stats = found["stats"]
        return found["requests_in_flight"] == stats["running"] == stats["waiting"] == stats["blocks_held"] == 0

    wait_until(is_idle, 60, "the engine to be idle")
    return engine_of(server, route)["stats"]


@pytest.mark.parametrize(("route", "reset"), [("/v1/embeddings", False), ("/v1/rerank", True)])
def test_the_work_of_a_client_that_left_is_dropped(server: Server, route: str, reset: bool) -> None:
    before = wait_idle(server, route)
    connection = RawConnection(server.port)
    connection.request("POST", route, long_request(route, seed=20))
    wait_until(lambda: engine_of(server, route)["stats"]["running"], 60, "the work to begin")
    if reset:
        connection.reset()
    else:
        connection.socket.close()
    after = wait_idle(server, route)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] < LONG_TOKENS / 2
    assert len(vectors(server, "a window")) == 1 and rerank(server, ["stone", "river"]).status_code == 200
    now = wait_idle(server, route)  # one of both was this engine's; nothing else was left to it
    assert now["prompt_tokens_total"] - after["prompt_tokens_total"] < LONG_WORDS


@pytest.mark.parametrize("route", ["/v1/embeddings", "/v1/rerank"])
def test_a_request_can_be_cancelled_by_its_id(server: Server, route: str) -> None:
    before = wait_idle(server, route)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.client.post, route, long_request(route, seed=30))
        (request,) = listed_requests(server)
        assert request["route"] == route
        assert server.client.post(f"/v1/requests/{request['id']}/cancel").status_code == 200
        refused = answer.result(timeout=60)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "request_cancelled"
    after = wait_idle(server, route)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] < LONG_TOKENS / 2


def listed_requests(server: Server) -> list[dict[str, Any]]:
    """Of the dashboard's feed, once there are any."""
    with server.client.http.stream("GET", "/v1/status/events") as response:
        lines = response.iter_lines()
        for line in lines:
            if line == "event: requests":
                found = json.loads(next(lines).removeprefix("data: "))["requests"]
                if found:
                    return found
    raise AssertionError("the feed ended")


def test_a_dead_worker_loses_no_input(server: Server, rerank_worker: Callable[[], int]) -> None:
    os.kill(rerank_worker(), signal.SIGKILL)
    answer = rerank(server, ["stone", "river"])
    assert answer.status_code == 200 and len(answer.json()["results"]) == 2
    assert engine_of(server, "/v1/rerank")["worker_restarts"] == 1


@pytest.fixture
def rerank_worker(server: Server) -> Callable[[], int]:
    main = server.worker_pid

    def find() -> int:
        (pid,) = [p.pid for p in server.tree()[1:] if p.pid != main and "headrace.worker.main" in p.cmdline()]
        return pid

    return find
