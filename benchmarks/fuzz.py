"""Malformed and hostile requests beside a well-behaved stream: no 500, no restart, no wrong token.

    python benchmarks/fuzz.py --requests 10000

A request is made of a seed alone, so a failure can be repeated with ``--seed N --requests 1``: a body that was
right once and had values replaced, bytes flipped or its end cut; a head that is no HTTP; or a connection that is
left half open. Whatever it is, the answer is below 500 (503 and 504 apart), or the connection is closed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses",
    "/tokenize", "/detokenize", "/v1/models/%00", "/v1/requests/../../etc/cancel", "/v1/models/x", "/metrics/x",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**70, -(2**70), 1e308, 0.1, "", "x", "\x00", "\ud800", "<|s01|>" * 50,
    "🙂" * 40, [], {}, [[]], [None], [-1], [2**40], {"type": "json_schema"}, {"a": {"b": [1, {}]}}, "a" * 5000,
)  # fmt: skip
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "seed", "max_tokens", "logit_bias", "logprobs",
    "stream", "top_logprobs", "presence_penalty", "repetition_penalty", "response_format", "tools",
    "tool_choice", "priority", "stop_token_ids", "min_tokens", "echo", "suffix", "guided_regex",
    "guided_choice", "guided_grammar", "messages", "prompt", "model", "prompt_logprobs", "cache_salt", "user",
    "metadata", "stream_options", "bad_words", "input", "chat_template_kwargs", "allowed_token_ids",
    "truncate_prompt_tokens", "system", "thinking", "max_output_tokens",
)  # fmt: skip
LIMIT_S = 30.0
NO_REQUEST_LIMIT_S = 0.5
COMPLETE = b"Host: f\r\n"  # in the heads of requests that must be answered


@dataclass
class Found:
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def right_body(rng: random.Random) -> dict[str, Any]:
    return {
        "model": "m", "max_tokens": rng.choice((1, 2, 5)), "messages": [{"role": "user", "content": "<|s05|>"}],
        "prompt": "<|s05|><|assistant|>", "input": "<|s05|>", "temperature": 0,
    }  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def fuzzed_body(rng: random.Random) -> bytes:
    body = right_body(rng)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.6:
            body[rng.choice(FIELDS)] = deepcopy(rng.choice(VALUES))
        else:
            container, key = rng.choice(list(places(body)))
            container[key] = deepcopy(rng.choice(VALUES))
    if "max_tokens" not in body or not isinstance(body["max_tokens"], int):
        body["max_output_tokens"] = 5
    raw = json.dumps(body).encode()
    dice = rng.random()
    if dice < 0.15:
        raw = raw[: rng.randrange(len(raw))]
    elif dice < 0.3:
        flipped = bytearray(raw)
        for _ in range(rng.randint(1, 8)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        raw = bytes(flipped)
    elif dice < 0.33:
        raw = b"[" * rng.choice((200, 20_000)) + raw
    return raw


def fuzzed_head(rng: random.Random) -> bytes:
    return rng.choice(
        (
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(80),
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n{}",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\nContent-Length: 20\r\n\r\n{}",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nfoo\r\n",
            b"GET /" + b"a" * rng.choice((100, 70_000)) + b" HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * rng.choice((5, 20_000)) + b"\r\n",
            b"GET /health HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer " + rng.randbytes(50) + b"\r\n\r\n",
            b"OPTIONS * HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
            rng.randbytes(rng.randint(1, 400)),
        )
    )


def payload(seed: int) -> tuple[bytes, str]:
    """Bytes to send and how to go on: "read" an answer, "close" at once, or "linger" half open."""
    rng = random.Random(seed)
    dice = rng.random()
    if dice < 0.12:
        return fuzzed_head(rng), rng.choice(("read", "close"))
    body = fuzzed_body(rng)
    path = rng.choice(PATHS)
    length = len(body) + rng.choice((0, 0, 0, 0, 0, 0, 0, 5, 10**15))
    kind = rng.choice(("application/json",) * 6 + ("text/plain", "multipart/form-data", ""))
    head = f"{rng.choice(('POST',) * 9 + ('GET', 'PUT'))} {path} HTTP/1.1\r\nHost: f\r\nConnection: close\r\n"
    head += f"Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    if length != len(body):
        return head.encode() + body, rng.choice(("close", "linger"))
    return head.encode() + body, "read" if rng.random() < 0.9 else "close"


async def send(port: int, seed: int, found: Found) -> None:
    raw, then = payload(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with suppress(ConnectionError):
            writer.write(raw)
            await writer.drain()
        if then == "close":
            found.statuses["left"] += 1
            return
        if then == "linger":
            await asyncio.sleep(0.2)
            found.statuses["left half open"] += 1
            return
        answer = b""
        with suppress(ConnectionError):
            limit_s = LIMIT_S if COMPLETE in raw else NO_REQUEST_LIMIT_S
            answer = await asyncio.wait_for(first_of_answer(reader), limit_s)
        note(seed, answer, found)
    except TimeoutError:
        # bytes that are no complete request: the server waits for more, up to its own limits
        if COMPLETE in raw:
            found.faults.append(f"seed {seed}: no answer within {LIMIT_S:.0f} s")
        found.statuses["no answer"] += 1
    finally:
        writer.close()


async def first_of_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.read(4096)
    while chunk := await reader.read(65536):
        head = (head + chunk)[:4096]
    return head


def note(seed: int, answer: bytes, found: Found) -> None:
    words = answer.split(b" ", 2)
    status = words[1].decode(errors="replace") if answer.startswith(b"HTTP/1.1 ") and len(words) > 2 else "closed"
    found.statuses[status] += 1
    if status.startswith("5") and status not in ("503", "504"):
        found.faults.append(f"seed {seed}: {answer[:600]!r}")
    if b"Traceback" in answer or b"/headrace/" in answer:
        found.faults.append(f"seed {seed}: an answer that shows the inside: {answer[:600]!r}")


async def fuzz(port: int, seeds: range, width: int) -> Found:
    """Send the requests of ``seeds``, ``width`` at a time."""
    found, waiting = Found(), iter(seeds)

    async def sender() -> None:
        for seed in waiting:
            await send(port, seed, found)

    await asyncio.gather(*(sender() for _ in range(width)))
    return found


async def bystander(server: Any, request: Any, tally: Any, stop: asyncio.Event) -> None:
    from chaos import one_stream

    while not stop.is_set():
        await one_stream(server, request, tally)


async def main(args: argparse.Namespace) -> int:
    from chaos import Tally, learn, requests
    from live_server import live_server

    async with live_server("scripted", Path(args.log), ["--kv-memory-mb", "256"]) as server:
        known, tally, stop = requests("scripted", 3, 400), Tally(), asyncio.Event()
        for request in known:
            await learn(server, request)
        streams = [asyncio.create_task(bystander(server, request, tally, stop)) for request in known]
        began = time.monotonic()
        port = int(server.url.rpartition(":")[2])
        try:
            found = await fuzz(port, range(args.seed, args.seed + args.requests), args.width)
        finally:
            stop.set()
        await asyncio.gather(*streams)
        idle = await asyncio.wait_for(server.until_idle(), 60)
        restarts = (await server.get("/v1/status"))["worker_restarts"]
    report = {
        "requests": args.requests, "statuses": dict(found.statuses.most_common()), "faults": found.faults[:20],
        "worker_restarts": restarts, "blocks_held_when_idle": idle["blocks_held"],
        "bystanders": {"streams": tally.streams, "lost": tally.lost[:5], "altered": tally.altered[:5]},
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    return 1 if found.faults or restarts or tally.lost or tally.altered else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--log", default="/tmp/headrace-fuzz.log")
    sys.exit(asyncio.run(main(parser.parse_args())))
