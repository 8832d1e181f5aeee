"""A stub HTTP server whose answers are scripts: bytes with delays, then a clean end or an abort.

It also records what it saw, from its own side: arrivals, ends, how many requests were open at once.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

HEADERS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@dataclass(frozen=True)
class Script:
    """Pieces of (delay before it in s, bytes); ``abort``: reset the connection instead of closing it."""

    pieces: Sequence[tuple[float, bytes]]
    abort: bool = False


@dataclass
class Log:
    bodies: list[dict[str, object]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    open_now: int = 0
    open_most: int = 0


# Path -> what it answers, given the parsed body: text as it is, anything else as JSON, None as a 404.
Routes = Mapping[str, Callable[[dict[str, object]], object]]


async def _answer(routes: Routes, path: str, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
    answer = routes[path](body) if path in routes else None
    status = "404 x" if answer is None else "200 OK"
    data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()
    writer.close()


@asynccontextmanager
async def scripted_server(
    script_of: Callable[[int], Script], routes: Routes | None = None
) -> AsyncIterator[tuple[str, Log]]:
    """Serves streamed request i (in order of arrival) with ``script_of(i)``; yields base URL and log.

    GETs, and POSTs to ``routes``, are answered from there and not logged.
    """
    log = Log()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lengths = head.lower().split("content-length:")[1:]
        raw = await reader.readexactly(int(lengths[0].split("\r\n")[0])) if lengths else b"{}"
        body = json.loads(raw)
        if method == "GET" or path in (routes or {}):
            await _answer(routes or {}, path, body, writer)
            return
        index = len(log.bodies)
        log.bodies.append(body)
        log.heads.append(head)
        log.arrivals_s.append(time.perf_counter())
        log.open_now += 1
        log.open_most = max(log.open_most, log.open_now)
        script = script_of(index)
        try:
            for delay_s, piece in script.pieces:
                await asyncio.sleep(delay_s)
                writer.write(piece)
                await writer.drain()
            if not script.abort:
                writer.close()
        except ConnectionError:
            pass
        finally:
            log.open_now -= 1
            log.ends_s.append(time.perf_counter())
            if not writer.is_closing():
                writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"http://{host}:{port}", log
    finally:
        server.close()
        await server.wait_closed()


@contextmanager
def scripted_thread(script_of: Callable[[int], Script], routes: Routes | None = None) -> Iterator[tuple[str, Log]]:
    """The same on a thread of its own, for what runs its own event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    serving = scripted_server(script_of, routes)
    try:
        yield asyncio.run_coroutine_threadsafe(serving.__aenter__(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(serving.__aexit__(None, None, None), loop).result(10)
        asyncio.run_coroutine_threadsafe(_drain(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _drain() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(payload: object) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_event(text: str, finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
DONE = b"data: [DONE]\n\n"


def usage_event(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def good_stream(ttft_s: float, gap_s: float, tokens: int) -> Script:
    """A whole chunked answer: role at once, ``tokens`` texts, finish reason, usage, [DONE]."""
    pieces = [(0.0, HEADERS + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(ROLE))]
    for index in range(tokens):
        finish = "length" if index == tokens - 1 else None
        pieces.append((gap_s if index else ttft_s, chunked(text_event(f"w{index} ", finish))))
    pieces.append((0.0, chunked(usage_event(7, tokens)) + chunked(DONE) + b"0\r\n\r\n"))
    return Script(pieces)
