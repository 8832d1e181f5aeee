"""What the load generator costs: events per second and CPU per event against a stub that only sends.

The stub runs in a process of its own and writes one event per write, without a model behind it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
from multiprocessing.connection import Connection

from headrace.bench.load import run_closed_loop
from headrace.bench.stats import summarize
from headrace.bench.workload import chat_requests

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TEXT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
END = (
    b'data: {"id":"x","choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%d}}\n\ndata: [DONE]\n\n'
)


async def _serve(tokens: int, pipe: Connection) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for _ in range(tokens):
            writer.write(TEXT)
            await writer.drain()
            await asyncio.sleep(0)  # let the other streams in
        writer.write(END % tokens)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _stub(tokens: int, pipe: Connection) -> None:
    asyncio.run(_serve(tokens, pipe))


def main() -> int:
    parser = argparse.ArgumentParser(description="What the load generator itself costs.")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    stub = multiprocessing.get_context("spawn").Process(target=_stub, args=(arguments.tokens, theirs), daemon=True)
    stub.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    requests = chat_requests("m", arguments.requests, words=40, output_tokens=arguments.tokens, seed=0)
    result = asyncio.run(run_closed_loop(url, requests, arguments.streams))
    stub.terminate()
    summary = summarize(result)
    events = sum(len(sample.text_times_s) for sample in result.samples)
    print(f"{summary.completed} of {arguments.requests} requests, {events / result.duration_s:,.0f} events/s")
    cost_us = 1e6 * result.client_cpu_s / events
    print(f"client CPU: {cost_us:.1f} µs an event, {summary.client_cpu_share:.0%} of a core")
    alone = asyncio.run(_alone(arguments.tokens))
    print(f"smallest TTFT at one stream: {1000 * alone:.2f} ms")
    return 0 if not summary.failed else 1


async def _alone(tokens: int) -> float:
    """Least TTFT of 50 requests, one after the other, with the stub in this process."""
    ours, theirs = multiprocessing.Pipe()
    server = asyncio.create_task(_serve(tokens, theirs))
    while not ours.poll():
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{ours.recv()}"
    result = await run_closed_loop(url, chat_requests("m", 50, words=40, output_tokens=tokens, seed=0), 1)
    server.cancel()
    return min(sample.text_times_s[0] - sample.sent_s for sample in result.samples)


if __name__ == "__main__":
    sys.exit(main())
