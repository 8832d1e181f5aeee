"""Kill the worker N times under load, at any moment, and count what clients lost.

    python benchmarks/chaos.py --kills 1000                  the scripted checkpoint
    python benchmarks/chaos.py --kills 100 --model demo      the demo model
    python benchmarks/chaos.py --kills 0 --replay 32         only: how long a replay of 32 open streams takes

Clients send different greedy requests one after the other, streamed; every answer is compared with an undisturbed
one, up to the first token that rounding may decide (the best two closer than ``CLOSE_CALL``). Kills (SIGKILL) come
at random moments, also while a worker loads. Goals: no stream lost or altered; on a quiet machine a restart takes
less than 3 s, and a replay no more than 1.2 times a cold prefill of the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from live_server import LiveServer, live_server, spread

CLOSE_CALL = 0.05
TOPICS = ("rivers", "a mill", "copper wire", "the moon", "bread", "a lighthouse", "snow", "glass", "tin", "bees")


@dataclass
class Request:
    """One request, and what it gives undisturbed."""

    body: dict[str, Any]
    text: str = ""
    safe: int = 0  # leading characters that no rounding decides
    completion_tokens: int | None = None  # None: rounding may decide the length


@dataclass
class Tally:
    streams: int = 0
    refused: int = 0
    lost: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    kill_times: list[float] = field(default_factory=list)


def requests(model: str, count: int, max_tokens: int) -> list[Request]:
    made = []
    for i in range(count):
        filler = "word " * (20 * (i % 8))
        if model == "scripted":
            content = f"{i:03d}{filler}<|s0{1 if i % 3 else 2}|>"
        else:
            content = f"{filler}Write a story about {TOPICS[i % len(TOPICS)]}, number {i}."
        body = {
            "model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": max_tokens // 2 + (i * 37) % max_tokens, "n": 2 if i % 7 == 3 else 1,
        }  # fmt: skip
        made.append(Request(body))
    return made


async def learn(server: LiveServer, request: Request) -> None:
    """Ask alone, with the probabilities that tell how sure each token is."""
    body = {**request.body, "n": 1, "logprobs": True, "top_logprobs": 2}
    answer = (await server.http.post(server.url + "/v1/chat/completions", json=body)).json()
    choice = answer["choices"][0]
    request.text = choice["message"]["content"]
    sure = b""
    for entry in choice["logprobs"]["content"]:
        best, second = (top["logprob"] for top in entry["top_logprobs"])
        if best - second < CLOSE_CALL:
            request.safe = len(sure.decode(errors="ignore"))
            return
        sure += bytes(entry["bytes"] or b"")
    request.safe = len(request.text)
    request.completion_tokens = answer["usage"]["completion_tokens"] * request.body["n"]


async def one_stream(server: LiveServer, request: Request, tally: Tally) -> None:
    body = {**request.body, "stream": True, "stream_options": {"include_usage": True}}
    texts = [""] * request.body["n"]
    arrivals: list[float] = []
    usage, done, error = None, False, ""
    try:
        async with server.http.stream("POST", server.url + "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                tally.refused += response.status_code in (429, 503)
                error = f"status {response.status_code}"
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    done = True
                    continue
                event = json.loads(line.removeprefix("data: "))
                error = error or str(event.get("error") or "")
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if content := choice["delta"].get("content"):
                        arrivals.append(time.monotonic())
                        texts[choice["index"]] += content
    except Exception as fault:
        error = error or f"{type(fault).__name__}: {fault}"
    tally.streams += 1
    note_pauses(tally, arrivals)
    if error or not done or usage is None:
        tally.lost.append(error or "cut")
        return
    compare(request, texts, usage, tally)


def note_pauses(tally: Tally, arrivals: list[float]) -> None:
    for kill in tally.kill_times[-8:]:
        before = [moment for moment in arrivals if moment <= kill]
        after = [moment for moment in arrivals if moment > kill]
        if before and after:
            tally.pauses_s.append(after[0] - before[-1])


def compare(request: Request, texts: list[str], usage: dict[str, Any], tally: Tally) -> None:
    for text in texts:
        length = request.safe if request.completion_tokens is None else None
        if text[:length] != request.text[:length]:
            tally.altered.append(f"{text!r} instead of {request.text!r}")
    if request.completion_tokens is not None and usage["completion_tokens"] != request.completion_tokens:
        tally.altered.append(f"{usage['completion_tokens']} tokens instead of {request.completion_tokens}")


async def client(server: LiveServer, known: list[Request], seed: int, tally: Tally, stop: asyncio.Event) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        await one_stream(server, rng.choice(known), tally)


async def killer(server: LiveServer, kills: int, seed: int, tally: Tally) -> None:
    """One kill in four comes whenever, often while a worker loads; the others within two seconds of readiness."""
    rng = random.Random(seed)
    for number in range(kills):
        if number % 4 != 3:
            await server.until_restarted(-1)
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        worker = server.present_worker()
        if worker is None:
            continue
        restarts = (await server.get("/v1/status"))["worker_restarts"]
        phase = "running" if await server.is_ready() else "loading"
        tally.kills[phase] = tally.kills.get(phase, 0) + 1
        tally.kill_times.append(time.monotonic())
        with contextlib.suppress(psutil.NoSuchProcess):  # an earlier kill may have been noticed meanwhile
            worker.kill()
        if number % 4 == 0:  # the others are killed whenever, also while they load
            await asyncio.to_thread(worker.wait, 60)
            await server.until_restarted(restarts)
            tally.restarts_s.append(time.monotonic() - tally.kill_times[-1])
        if (number + 1) % 50 == 0:
            counts = f"{tally.streams} streams, {len(tally.lost)} lost, {len(tally.altered)} altered"
            print(f"{number + 1} kills, {counts}", file=sys.stderr, flush=True)


async def chaos(server: LiveServer, args: argparse.Namespace) -> dict[str, Any]:
    known = requests(args.model, 24, args.max_tokens)
    for request in known:
        await learn(server, request)
    tally, stop = Tally(), asyncio.Event()
    began = time.monotonic()
    clients = [asyncio.create_task(client(server, known, i, tally, stop)) for i in range(args.streams)]
    try:
        await killer(server, args.kills, args.seed, tally)
    finally:
        stop.set()
        await asyncio.gather(*clients)
    stats = await server.until_idle()
    status = await server.get("/v1/status")
    return {
        "kills": tally.kills, "streams": tally.streams, "lost": len(tally.lost), "altered": len(tally.altered),
        "examples": (tally.lost + tally.altered)[:5], "refused": tally.refused,
        "compared_to_the_end": sum(request.completion_tokens is not None for request in known) / len(known),
        "pause_s": spread(tally.pauses_s), "restart_s": spread(tally.restarts_s),
        "worker_restarts": status["worker_restarts"], "blocks_held_when_idle": stats["blocks_held"],
        "minutes": round((time.monotonic() - began) / 60, 1), "resources": server.resources(),
    }  # fmt: skip


# -- how long a replay takes --------------------------------------------------------------------------


async def open_stream(server: LiveServer, prompt: list[int], tokens: list[int], marks: dict[str, Any]) -> None:
    body = {"model": "m", "prompt": prompt, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    async with server.http.stream("POST", server.url + "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: ")).get("choices", ()):
                if not (new := choice.get("token_ids")):
                    continue
                if marks["killed"] and id(tokens) not in marks["first"]:
                    marks["first"][id(tokens)] = time.monotonic()
                    marks["at_replay"][id(tokens)] = list(tokens)
                tokens += new
                if len(marks["first"]) == marks["count"]:
                    return


async def replay(server: LiveServer, count: int) -> dict[str, Any]:
    """From the new worker's readiness to the last stream's next token, and a cold prefill of the same tokens."""
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 20}
    base = (await server.http.post(server.url + "/tokenize", json=body)).json()["tokens"][:200]
    prompts = [[*base[i:], *base[:i]] for i in range(count)]
    emitted: list[list[int]] = [[] for _ in prompts]
    marks: dict[str, Any] = {"killed": False, "first": {}, "at_replay": {}, "count": count}
    tasks = [
        asyncio.create_task(open_stream(server, prompt, tokens, marks))
        for prompt, tokens in zip(prompts, emitted, strict=True)
    ]
    while min(map(len, emitted)) < 48:
        await asyncio.sleep(0.02)
    worker = server.present_worker()
    assert worker is not None
    restarts = (await server.get("/v1/status"))["worker_restarts"]
    killed_at = time.monotonic()
    worker.kill()
    worker.wait(5)
    marks["killed"] = True
    await server.until_restarted(restarts)
    ready_at = time.monotonic()
    while len(marks["first"]) < count:
        await asyncio.sleep(0.005)
    replay_s = max(marks["first"].values()) - ready_at
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await server.until_idle()
    cold = []
    known = [[*prompt, *marks["at_replay"][id(tokens)]] for prompt, tokens in zip(prompts, emitted, strict=True)]
    for _ in range(3):
        await server.http.delete(server.url + "/v1/cache")
        began = time.monotonic()
        ask = {"model": "m", "max_tokens": 1, "temperature": 0}
        sends = (server.http.post(server.url + "/v1/completions", json={**ask, "prompt": ids}) for ids in known)
        await asyncio.gather(*sends)
        cold.append(time.monotonic() - began)
    return {
        "streams": count, "tokens": sum(map(len, known)), "restart_s": round(ready_at - killed_at, 3),
        "replay_s": round(replay_s, 3), "cold_prefill_s": [round(value, 3) for value in cold],
        "ratio": round(replay_s / sorted(cold)[1], 2),
    }  # fmt: skip


async def main(args: argparse.Namespace) -> int:
    flags = ["--kv-memory-mb", str(args.kv_memory_mb), "--memory-headroom", "0.05", *args.flag]
    report: dict[str, Any] = {"model": args.model}
    async with live_server(args.model, Path(args.log), flags) as server:
        if args.replay:
            report["replay"] = await replay(server, args.replay)
        if args.kills:
            report["chaos"] = await chaos(server, args)
    print(json.dumps(report, indent=1))
    found = report.get("chaos", {})
    return 1 if found.get("lost") or found.get("altered") else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="scripted", help="scripted, demo, or a path")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--replay", type=int, default=0, metavar="STREAMS", help="measure a replay of that many streams"
    )
    parser.add_argument("--streams", type=int, default=8, help="clients at once")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--kv-memory-mb", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default="/tmp/headrace-chaos.log")
    parser.add_argument("--flag", action="append", default=[], help="further words for serve, one each")
    sys.exit(asyncio.run(main(parser.parse_args())))
