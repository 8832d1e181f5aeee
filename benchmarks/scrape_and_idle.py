"""What watching costs: CPU time of an idle server, and how long ``GET /metrics`` takes while many requests run.

    python benchmarks/scrape_and_idle.py [--model scripted|demo|PATH] [--streams 256] [--scrapes 200] [--idle-s 30]

Starts a server. Idle: CPU time of gateway and worker together over ``--idle-s`` seconds, nobody connected; limit
1 % of a core. Scrapes: a process of its own reads ``--streams`` endless streams, this one reads ``/metrics`` on
one connection, 20 times a second; only scrapes that say that all streams run count; limit 20 ms (median, and 95th
percentile). Prints the figures as JSON; exit code 1: a limit was missed, 2: nothing could be measured.

``ms`` is by the clock, so it is of the whole machine: ``load_average`` says how busy others kept it. ``own_ms`` is
that without the time in which gateway or reader, whichever waited longer, were ready to run and had no core
(Linux's schedstat): at most what a machine with cores to spare would show. It is judged.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from live_server import LiveServer, live_server, spread

IDLE_LIMIT = 0.01
SCRAPE_LIMIT_MS = 20.0
SETTLE_S = 5.0
PAUSE_S = 0.05
START_S = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--idle-s", type=float, default=30.0)
    parser.add_argument("--load", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        asyncio.run(read_streams(arguments.load, arguments.streams))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(arguments, Path(folder) / "server.log"))
    print(json.dumps(figures, indent=1))
    if not figures["scrape"]["counted"]:
        print("no scrape saw all streams running", file=sys.stderr)
        return 2
    return 0 if figures["idle"]["passes"] and figures["scrape"]["passes"] else 1


async def measure(arguments: argparse.Namespace, log_path: Path) -> dict[str, Any]:
    flags = ("--max-num-seqs", str(arguments.streams), "--max-queue", str(arguments.streams))
    async with live_server(arguments.model, log_path, (*flags, "--kv-memory-mb", "1024")) as server:
        await asyncio.sleep(SETTLE_S)
        idle = await asyncio.to_thread(idle_share, server, arguments.idle_s)
        cost_ms = await asyncio.to_thread(scrape_cost_ms, server, 100)
        loader = subprocess.Popen(
            [sys.executable, __file__, "--load", server.url, "--streams", str(arguments.streams)]
        )
        try:
            scrape = await asyncio.to_thread(scrapes, server, arguments.streams, arguments.scrapes)
        finally:
            loader.kill()
            loader.wait()
    return {
        "idle": {**idle, "limit": IDLE_LIMIT, "passes": idle["share"] < IDLE_LIMIT},
        "scrape": {
            **scrape,
            "cpu_ms_idle": cost_ms,
            "limit_ms": SCRAPE_LIMIT_MS,
            "passes": bool(scrape["counted"]) and scrape["own_ms"]["p95"] < SCRAPE_LIMIT_MS,
        },
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "cores": os.cpu_count(),
    }


# -- idle ----------------------------------------------------------------------------------------------


def cpu_s(server: LiveServer) -> dict[str, float]:
    gateway = psutil.Process(server.process.pid)
    worker = server.present_worker()
    assert worker is not None
    return {name: sum(p.cpu_times()[:2]) for name, p in (("gateway", gateway), ("worker", worker))}


def idle_share(server: LiveServer, duration_s: float) -> dict[str, Any]:
    """Shares of a core."""
    before, began_s = cpu_s(server), time.monotonic()
    time.sleep(duration_s)
    after, elapsed_s = cpu_s(server), time.monotonic() - began_s
    shares = {name: (after[name] - before[name]) / elapsed_s for name in after}
    return {"share": sum(shares.values()), **shares, "seconds": elapsed_s}


def scrape_cost_ms(server: LiveServer, count: int) -> float:
    """CPU time of the gateway per scrape, without streams."""
    connection = _connection(server)
    before = cpu_s(server)["gateway"]
    for _ in range(count):
        _scrape(connection)
    return 1000 * (cpu_s(server)["gateway"] - before) / count


# -- scrapes under load --------------------------------------------------------------------------------


def scrapes(server: LiveServer, streams: int, count: int) -> dict[str, Any]:
    connection = _connection(server)
    deadline_s = time.monotonic() + START_S
    while running(_scrape(connection)) < streams and time.monotonic() < deadline_s:
        time.sleep(0.25)
    times_ms, own_ms, sizes = [], [], []
    before, began_s, steps = cpu_s(server), time.monotonic(), total_steps(_scrape(connection))
    for _ in range(count):
        time.sleep(PAUSE_S)
        waits_ms, sent_s = waited_ms(server), time.perf_counter()
        text = _scrape(connection)
        elapsed_ms = 1000 * (time.perf_counter() - sent_s)
        longest_ms = max(map(float.__sub__, waited_ms(server), waits_ms))
        if running(text) == streams:
            times_ms.append(elapsed_ms)
            own_ms.append(max(0.0, elapsed_ms - longest_ms))
            sizes.append(len(text))
    elapsed_s, after = time.monotonic() - began_s, cpu_s(server)
    return {
        "ms": spread(times_ms),
        "own_ms": spread(own_ms),
        "counted": len(times_ms),
        "sent": count,
        "streams": streams,
        "bytes": max(sizes, default=None),
        "steps_per_s": (total_steps(_scrape(connection)) - steps) / elapsed_s,
        "gateway_share": (after["gateway"] - before["gateway"]) / elapsed_s,
        "worker_share": (after["worker"] - before["worker"]) / elapsed_s,
    }


def waited_ms(server: LiveServer) -> tuple[float, float]:
    """How long the gateway's main thread, and this thread, have waited for a core so far; 0 where unknown."""
    waits = []
    for path in (f"/proc/{server.process.pid}/schedstat", "/proc/thread-self/schedstat"):
        try:
            waits.append(int(Path(path).read_text().split()[1]) / 1e6)
        except OSError:
            waits.append(0.0)
    return waits[0], waits[1]


def _connection(server: LiveServer) -> http.client.HTTPConnection:
    parts = urlsplit(server.url)
    return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)


def _scrape(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def running(text: str) -> int:
    return int(_value(text, "vllm:num_requests_running"))


def total_steps(text: str) -> int:
    return int(_value(text, "headrace:steps_total"))


def _value(text: str, name: str) -> float:
    found = re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
    assert found
    return float(found[1])


async def read_streams(url: str, count: int) -> None:
    """The load: endless streams, read and thrown away."""
    parts = urlsplit(url)
    body = json.dumps({
        "model": "m", "messages": [{"role": "user", "content": "<|s01|>"}], "stream": True, "max_tokens": 8000,
        "ignore_eos": True,
    })  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close"

    async def stream() -> None:
        while True:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            while await reader.read(65536):
                pass
            writer.close()

    await asyncio.gather(*(stream() for _ in range(count)))


if __name__ == "__main__":
    sys.exit(main())
