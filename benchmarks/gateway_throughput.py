"""What the gateway alone can stream: the real HTTP server in front of a worker that makes tokens at once.

    python benchmarks/gateway_throughput.py                          256 streams, 20,000 tokens/s offered
    python benchmarks/gateway_throughput.py --rate 40000 --seconds 20
    python benchmarks/gateway_throughput.py --profile gateway.prof   with cProfile in the gateway (much slower)

Three processes: the gateway (tokens to text, JSON, SSE, HTTP), ``null_worker.py``, and this one, a client that
only counts. Every stream is one request with so many tokens that it lasts for the measurement. Reported are: the
tokens and events per second over HTTP, the largest pause of any stream, and the CPU time that each process spent
per token, which other work on the machine does not change much. Tokens that wait for the gateway are merged into
one event: fewer events than tokens mean that it is behind.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvloop
from random_checkpoint import write_tokenizer
from server_process import Candidate, RunningServer, cpu_times, running, wait_until_listed

from headrace.bench.http_stream import Server, send
from headrace.bench.prometheus import Scrape, parse

WARM_UP_S = 1.0
PATHS = {
    "chat": ("/v1/chat/completions", b'"delta":{"content":'),
    "completions": ("/v1/completions", b'"text":'),
    "responses": ("/v1/responses", b'"type":"response.output_text.delta"'),
    "messages": ("/v1/messages", b'"type":"text_delta"'),
}


# -- the gateway's process -------------------------------------------------------------------------------


def serve(folder: str, port: int, step_s: float, profile: str | None) -> int:
    """The real server, but for its worker."""
    from headrace.cli.serve import make_app, read_config
    from headrace.gateway.server import run_server

    config = read_config([folder, "--port", str(port), "--served-model-name", "m", "--log-level", "warning",
                          "--max-queue", "4096"])  # fmt: skip
    command = [sys.executable, str(Path(__file__).parent / "null_worker.py"), str(step_s)]
    profiler = cProfile.Profile(time.thread_time) if profile else None
    if profiler:
        profiler.enable()
    code = run_server(config, make_app, worker_command=command)
    if profiler:
        profiler.disable()
        profiler.dump_stats(str(profile))
    return code


def write_model(folder: Path) -> None:
    """What the gateway reads of a model: no weights."""
    config = {"model_type": "llama", "vocab_size": 8192, "max_position_embeddings": 32768, "eos_token_id": 8191}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, 8192)


# -- the client ------------------------------------------------------------------------------------------


class Stream(asyncio.Protocol):
    """One request; counts events by the bytes that stand in each of them once."""

    def __init__(self, head: bytes, mark: bytes) -> None:
        self._head, self._mark = head, mark
        self._tail = b""
        self.ended = asyncio.get_running_loop().create_future()
        self.events = 0
        self.last_s: float | None = None
        self.largest_gap_s = 0.0
        self.first = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._head)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        joined = self._tail + data
        found = joined.count(self._mark)
        if found:
            # what follows the last mark cannot hold another one, but its beginning
            self._tail = joined[joined.rfind(self._mark) + len(self._mark) :][-len(self._mark) + 1 :]
            self.events += found
            if self.last_s is not None:
                self.largest_gap_s = max(self.largest_gap_s, now_s - self.last_s)
            self.last_s = now_s
        else:
            self._tail = joined[-len(self._mark) + 1 :]
        self.first = self.first or data

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(frozen=True, slots=True)
class Span:
    """What happened between two looks; ``worker_s`` and ``gateway_s`` are CPU time."""

    seconds: float
    tokens: int
    events: int
    gateway_s: float
    worker_s: float
    client_s: float
    largest_gap_s: float


def request_bytes(url: str, dialect: str, max_tokens: int, index: int) -> bytes:
    path, _ = PATHS[dialect]
    body: dict[str, object] = {"model": "m", "stream": True}
    prompt = f"{index}: a prompt of a few words"
    if dialect == "completions":
        body |= {"prompt": prompt, "max_tokens": max_tokens}
    elif dialect == "responses":
        body |= {"input": prompt, "max_output_tokens": max_tokens}
    else:
        body |= {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    encoded = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(encoded)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + encoded


async def measure(server: RunningServer, args: argparse.Namespace) -> Span:
    """All streams open and warm, then ``args.seconds`` of looking on."""
    parts = urlsplit(server.url)
    loop = asyncio.get_running_loop()
    max_tokens = min(32000, int((args.seconds + WARM_UP_S + 60) * args.rate / args.streams))
    streams: list[Stream] = []
    for index in range(args.streams):
        head = request_bytes(server.url, args.dialect, max_tokens, index)
        _, stream = await loop.create_connection(
            lambda head=head: Stream(head, PATHS[args.dialect][1]), parts.hostname, parts.port
        )
        streams.append(stream)
    deadline_s = time.monotonic() + 60
    while any(not stream.events for stream in streams) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    await asyncio.sleep(WARM_UP_S)
    for stream in streams:
        stream.largest_gap_s = 0.0
    before = await look(server, streams)
    await asyncio.sleep(args.seconds)
    after = await look(server, streams)
    if ended := [stream for stream in streams if stream.ended.done() or not stream.events]:
        print(f"{len(ended)} of {args.streams} streams failed or ended early", file=sys.stderr)
        print(f"one of them began: {ended[0].first[:1000]!r}", file=sys.stderr)
    seconds, tokens, events, gateway, worker, client = (new - old for new, old in zip(after, before, strict=True))
    gap = max(stream.largest_gap_s for stream in streams)
    return Span(seconds, int(tokens), int(events), gateway, worker, client, gap)


async def look(server: RunningServer, streams: list[Stream]) -> tuple[float, ...]:
    """Time, tokens that the gateway dispatched, events received, CPU time of gateway, worker and client."""
    tokens = await dispatched_tokens(server)
    times, family = cpu_times(server.process.pid), _cpu_s(server.process.pid)
    worker_s = 0.0 if times is None else times.server_s - family
    return (
        time.perf_counter(),
        tokens,
        sum(stream.events for stream in streams),
        family,
        worker_s,
        time.process_time(),
    )


async def wait_until_ready(server: RunningServer, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while True:
            async with send(Server.of(server.url), "GET", "/ready", {}) as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.1)


async def dispatched_tokens(server: RunningServer) -> int:
    async with send(Server.of(server.url), "GET", "/metrics", {}) as answer:
        return int(Scrape(parse((await answer.read()).decode()), "m")("vllm:generation_tokens_total") or 0)


def _cpu_s(pid: int) -> float:
    """CPU time of one process alone; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def report(span: Span, args: argparse.Namespace) -> dict[str, object]:
    return {
        "dialect": args.dialect,
        "streams": args.streams,
        "offered_tokens_per_s": args.rate,
        "tokens_per_s": round(span.tokens / span.seconds),
        "events_per_s": round(span.events / span.seconds),
        "largest_gap_ms": round(1e3 * span.largest_gap_s, 1),
        "gateway_us_per_token": round(1e6 * span.gateway_s / max(1, span.tokens), 1),
        "worker_us_per_token": round(1e6 * span.worker_s / max(1, span.tokens), 1),
        "client_us_per_event": round(1e6 * span.client_s / max(1, span.events), 1),
        "gateway_cores": round(span.gateway_s / span.seconds, 2),
    }


async def run(server: RunningServer, args: argparse.Namespace) -> Span:
    await wait_until_listed(server, 60)
    await wait_until_ready(server, 60)
    return await measure(server, args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=20_000, help="tokens per second that the worker offers")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--dialect", choices=PATHS, default="chat")
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        folder, port, step_s = args.serve
        return serve(folder, int(port), float(step_s), args.profile)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        step_s = args.streams / args.rate
        command = f"{{python}} {__file__} --serve {{model}} {{port}} {step_s}"
        command += f" --profile {args.profile}" if args.profile else ""
        with running(Candidate("gateway", command, folder, "m", {}), Path(folder)) as server:
            try:
                span = uvloop.run(run(server, args))
            finally:
                server.process.send_signal(signal.SIGINT)
                try:
                    server.process.send_signal(signal.SIGINT)
                    server.process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    pass
                if server.process.returncode:
                    print((Path(folder) / "gateway.log").read_text()[-2000:], file=sys.stderr)
    print(json.dumps(report(span, args), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
