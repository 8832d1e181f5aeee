"""An OpenAI-compatible server of scripted answers, in a thread: what a chat is told, and what it sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stub:
    """``answer(body, number)`` gives the events of a chat request: deltas, raw lines, or (status, JSON).

    ``gone`` is set when a client left in the middle of an answer.
    """

    answer: Callable[[dict[str, Any], int], Any]
    models: tuple[str, ...] = ("stub",)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)


def said(text: str, **more: Any) -> list[dict[str, Any]]:
    """An answer of one text in pieces of three characters, with usage."""
    pieces = [{"content": text[i : i + 3]} for i in range(0, len(text), 3)]
    return [*pieces, {**more, "finish_reason": more.get("finish_reason", "stop")}]


@contextmanager
def running(answer: Callable[[dict[str, Any], int], Any], **more: Any) -> Iterator[Stub]:
    stub = Stub(answer, **more)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            stub.paths.append(self.path)
            self.whole(200, {"data": [{"id": name} for name in stub.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            stub.paths.append(self.path)
            stub.bodies.append(body)
            stub.headers.append({name.lower(): value for name, value in self.headers.items()})
            script = stub.answer(body, len(stub.bodies))
            if isinstance(script, tuple):
                self.whole(*script)
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream; charset=utf-8")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            try:
                for event in script:
                    self.chunk(event if isinstance(event, str) else line_of(event))
                self.chunk("data: [DONE]\n\n")
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                stub.gone.set()
                self.close_connection = True
            except Cut:
                self.close_connection = True

        def whole(self, status: int, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def chunk(self, text: str) -> None:
            data = text.encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Cut(Exception):
    """Raised by an answer's events: the connection ends here."""


def line_of(event: dict[str, Any]) -> str:
    finish = event.pop("finish_reason", None)
    usage = event.pop("usage", None)
    chunk = {"choices": [{"index": 0, "delta": event, "finish_reason": finish}], "usage": usage}
    return f"data: {json.dumps(chunk)}\n\n"
