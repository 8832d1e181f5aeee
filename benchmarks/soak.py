"""Mixed traffic for an hour, with clients that leave, bad input and kills; what the server holds must stay flat.

    python benchmarks/soak.py --minutes 60

Every ``--every`` seconds traffic pauses until the server is idle, and the resident memory, descriptors and threads
of gateway and worker and the KV blocks held are noted. The report has the means of the first and of the last third
of the samples; the exit code is 1 when something grew by more than a tenth (and 30 MB, or 3 descriptors or
threads), when blocks were held, or when an answer was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
from chaos import Request, Tally, learn, one_stream, requests
from live_server import LiveServer, live_server

BAD = (
    b"{",
    b'{"messages": 5}',
    b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}',
    b"[" * 5000,
    b'{"model": "m", "messages": [], "max_tokens": 1e99}',
)


async def leave_early(server: LiveServer, request: Request, rng: random.Random) -> None:
    body = {**request.body, "stream": True, "max_tokens": 5000, "ignore_eos": True}
    url = server.url + "/v1/chat/completions"
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as http,
        http.stream("POST", url, json=body) as response,
    ):
        lines = response.aiter_lines()
        for _ in range(rng.randint(1, 60)):
            if await anext(lines, None) is None:
                return


async def client(
    server: LiveServer, known: list[Request], seed: int, tally: Tally, pause: asyncio.Event, stop: asyncio.Event
) -> None:
    rng = random.Random(seed)
    while not stop.is_set():
        await pause.wait()
        dice = rng.random()
        if dice < 0.7:
            await one_stream(server, rng.choice(known), tally)
        elif dice < 0.85:
            try:
                await leave_early(server, rng.choice(known), rng)
            except httpx.HTTPError as error:
                tally.lost.append(repr(error))
        else:
            headers = {"content-type": "application/json"}
            answer = await server.http.post(
                server.url + "/v1/chat/completions", content=rng.choice(BAD), headers=headers
            )
            if not 400 <= answer.status_code < 500:
                tally.lost.append(f"status {answer.status_code} for bad input")


async def soak(server: LiveServer, args: argparse.Namespace) -> dict[str, Any]:
    known = requests(args.model, 24, args.max_tokens)
    for request in known:
        await learn(server, request)
    tally, pause, stop = Tally(), asyncio.Event(), asyncio.Event()
    rng = random.Random(args.seed)
    clients = [asyncio.create_task(client(server, known, i, tally, pause, stop)) for i in range(args.streams)]
    samples: list[dict[str, int]] = []
    ends_at = time.monotonic() + args.minutes * 60
    while time.monotonic() < ends_at:
        pause.set()
        await asyncio.sleep(args.every / 2)
        if len(samples) % 3 == 1 and (worker := server.present_worker()) is not None:
            restarts = (await server.get("/v1/status"))["worker_restarts"]
            tally.kill_times.append(time.monotonic())
            worker.kill()
            await server.until_restarted(restarts)
        await asyncio.sleep(args.every / 2 * rng.uniform(0.5, 1))
        pause.clear()
        stats = await server.until_idle()
        sample = {**server.resources(), "blocks_held": stats["blocks_held"]}
        samples.append(sample)
        print(json.dumps(sample), file=sys.stderr, flush=True)
    stop.set()
    pause.set()
    await asyncio.gather(*clients)
    await server.until_idle()
    return report(samples, tally, args)


def report(samples: list[dict[str, int]], tally: Tally, args: argparse.Namespace) -> dict[str, Any]:
    settled = samples[1:]  # the first has seen a part of the traffic's kinds only
    third = max(1, len(settled) // 3)
    first, last = settled[:third], settled[-third:]
    found: dict[str, Any] = {"minutes": args.minutes, "samples": len(samples), "streams": tally.streams}
    found |= {"lost": tally.lost[:5], "altered": tally.altered[:5], "kills": len(tally.kill_times)}
    grown = []
    for name in samples[0]:
        before, after = (mean(sample.get(name, 0) for sample in part) for part in (first, last))
        slack = 30 * 2**20 if name.endswith("_rss") else 3
        if name != "blocks_held" and after > before * 1.1 and after > before + slack:
            grown.append(name)
        found[name] = [round(before), round(after)]
    if any(sample["blocks_held"] for sample in samples):
        grown.append("blocks_held")
    return {**found, "grown": grown}


async def main(args: argparse.Namespace) -> int:
    flags = ["--kv-memory-mb", str(args.kv_memory_mb), "--memory-headroom", "0.05"]
    async with live_server(args.model, Path(args.log), flags) as server:
        found = await soak(server, args)
    print(json.dumps(found, indent=1))
    return 1 if found["grown"] or found["lost"] or found["altered"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="scripted", help="scripted, demo, or a path")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=20, help="seconds between two looks")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--kv-memory-mb", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default="/tmp/headrace-soak.log")
    sys.exit(asyncio.run(main(parser.parse_args())))
