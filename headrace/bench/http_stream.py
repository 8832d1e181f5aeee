"""A small HTTP/1.1 client for load generation: one request per connection, the body as it arrives.

Written on asyncio streams, because a general client's cost per received piece would be measured along with the
server. One connection per request keeps streams independent and works with servers that close after each
answer. TLS is supported; redirects, proxies and compression are not (a load generator should meet none).

Every byte has the time at which the event loop took it from the socket, so what a busy client does later does not
move it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_PIECE_BYTES = 65536
_MAX_LINE_BYTES = 65536


class ConnectFailed(Exception):
    """No connection, or it ended before an answer's headers."""


class BodyCut(Exception):
    """The connection ended before the announced end of the body."""


class MalformedAnswer(Exception):
    """What arrived is not HTTP/1.x."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go; made from a base URL such as ``http://127.0.0.1:8000`` (a path is kept as prefix)."""

    host: str
    port: int
    prefix: str
    tls: bool
    context: ssl.SSLContext | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, url: str) -> Server:
        """Raises ValueError for anything but an http or https URL with a host."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url}")
        tls = parts.scheme == "https"
        # one context for all requests: making one reads the system's certificates
        context = ssl.create_default_context() if tls else None
        return cls(parts.hostname, parts.port or (443 if tls else 80), parts.path.rstrip("/"), tls, context)


class StampedReader(asyncio.StreamReader):
    """A stream reader that knows when the byte it gave out last had arrived (``time.perf_counter``)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_MAX_LINE_BYTES, loop=loop)
        self.arrived_s = 0.0
        self._given = 0
        self._fed = 0
        self._marks: deque[tuple[int, float]] = deque()  # (bytes fed so far, when)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        self._fed += len(data)
        self._marks.append((self._fed, time.perf_counter()))
        super().feed_data(data)

    async def read(self, n: int = -1) -> bytes:
        return self._give(await super().read(n))

    async def readexactly(self, n: int) -> bytes:
        return self._give(await super().readexactly(n))

    async def readuntil(self, separator: bytes = b"\n") -> bytes:  # type: ignore[override]
        return self._give(await super().readuntil(separator))

    def _give(self, data: bytes) -> bytes:
        self._given += len(data)
        while self._marks and self._marks[0][0] < self._given:
            self._marks.popleft()
        if self._marks:
            self.arrived_s = self._marks[0][1]
        return data


class Answer:
    """Status and headers (lower-case names); ``pieces`` yields the decoded body once, as it arrives."""

    def __init__(self, status: int, headers: Mapping[str, str], reader: StampedReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    @property
    def arrived_s(self) -> float:
        """When the last byte of the newest piece arrived, on ``time.perf_counter``'s clock."""
        return self._reader.arrived_s

    async def pieces(self) -> AsyncIterator[bytes]:
        """Raises BodyCut, MalformedAnswer."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            decoded = _chunked(self._reader)
        elif "content-length" in self.headers:
            decoded = _counted(self._reader, int(self.headers["content-length"]))
        else:
            decoded = _until_close(self._reader)
        try:
            async for piece in decoded:
                yield piece
        except (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError) as error:
            raise BodyCut(type(error).__name__) from None

    async def read(self, limit_bytes: int = 1 << 20) -> bytes:
        """The body, at most ``limit_bytes`` and a piece of it."""
        body = b""
        async for piece in self.pieces():
            body += piece
            if len(body) >= limit_bytes:
                break
        return body


@asynccontextmanager
async def send(
    server: Server, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Answer]:
    """Sends a request on a connection of its own; the connection is closed when the block ends.

    Raises ConnectFailed, MalformedAnswer.
    """
    try:
        reader, writer = await _connect(server)
    except OSError as error:
        raise ConnectFailed(f"{error.strerror or type(error).__name__}") from None
    try:
        try:
            writer.write(_head(server, method, path, headers, len(body)) + body)
            await writer.drain()
            answer = await _read_head(reader)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise ConnectFailed(f"closed before an answer ({type(error).__name__})") from None
        yield answer
    finally:
        writer.transport.abort()


async def _connect(server: Server) -> tuple[StampedReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    reader = StampedReader(loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.create_connection(lambda: protocol, server.host, server.port, ssl=server.context)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


def _head(server: Server, method: str, path: str, headers: Mapping[str, str], body_bytes: int) -> bytes:
    host = f"[{server.host}]" if ":" in server.host else server.host
    lines = [f"{method} {server.prefix}{path} HTTP/1.1", f"Host: {host}:{server.port}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body_bytes or method != "GET":
        lines.append(f"Content-Length: {body_bytes}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_head(reader: StampedReader) -> Answer:
    while True:
        status = _status(await _line(reader))
        headers: dict[str, str] = {}
        while line := await _line(reader):
            name, separator, value = line.partition(":")
            if not separator:
                raise MalformedAnswer("a header line without a colon")
            headers[name.strip().lower()] = value.strip()
        if status >= 200:  # 1xx: an interim answer, the real one follows
            return Answer(status, headers, reader)


def _status(line: str) -> int:
    parts = line.split(" ", 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not parts[1].isdigit():
        raise MalformedAnswer(f"not an HTTP status line: {line[:60]!r}")
    return int(parts[1])


async def _line(reader: asyncio.StreamReader) -> str:
    try:
        raw = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError:
        raise MalformedAnswer(f"a line longer than {_MAX_LINE_BYTES} bytes") from None
    return raw.rstrip(b"\r\n").decode("latin-1")


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        size_text = (await _line(reader)).split(";")[0].strip()
        try:
            size = int(size_text, 16)
        except ValueError:
            raise MalformedAnswer(f"not a chunk size: {size_text[:20]!r}") from None
        if size == 0:
            while await _line(reader):  # trailers
                pass
            return
        yield await reader.readexactly(size)
        await _line(reader)


async def _counted(reader: asyncio.StreamReader, count: int) -> AsyncIterator[bytes]:
    while count > 0:
        piece = await reader.read(min(count, _PIECE_BYTES))
        if not piece:
            raise BodyCut(f"{count} bytes missing")
        count -= len(piece)
        yield piece


async def _until_close(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(_PIECE_BYTES):
        yield piece
