"""A stub of the hub's HTTP API on loopback: one repository, ranges, and the faults that tests ask for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

REVISION = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    """What the server offers; ``faults`` maps a file name to one of the kinds in ``_Handler._fault``."""

    files: dict[str, bytes]
    faults: dict[str, str] = field(default_factory=dict)
    extra_names: list[str] = field(default_factory=list)
    listing_sizes: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    slow_chunk: int = 1 << 20
    gate: threading.Event | None = None

    def siblings(self) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for name, content in self.files.items():
            size = self.listing_sizes.get(name, len(content))
            entry: dict[str, Any] = {"rfilename": name, "size": size}
            if name.endswith((".safetensors", ".gguf")):
                digest = hashlib.sha256(content).hexdigest()
                entry |= {"blobId": "0" * 40, "lfs": {"size": size, "sha256": digest, "pointerSize": 130}}
            else:
                entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            entries.append(entry)
        return entries + [{"rfilename": name, "size": 1, "blobId": "0" * 40} for name in self.extra_names]


class _Handler(BaseHTTPRequestHandler):
    server: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        return None

    def do_GET(self) -> None:
        repository: Repository = self.server.repository
        path = unquote(self.path.split("?")[0])
        repository.requests.append(path)
        if "Authorization" in self.headers:
            repository.tokens.add(self.headers["Authorization"])
        if path.startswith("/api/models/owner/model"):
            listing = {"id": "owner/model", "sha": REVISION, "siblings": repository.siblings(), "tags": []}
            return self._send(json.dumps(listing | {"downloads": 0, "likes": 0, "private": False}).encode())
        prefix = f"/owner/model/resolve/{REVISION}/"
        if path.startswith(prefix) and (name := path.removeprefix(prefix)) in repository.files:
            return self._send_file(repository, name)
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, repository: Repository, name: str) -> None:
        content, fault = repository.files[name], repository.faults.get(name)
        if fault == "loop":
            self.send_response(302)
            self.send_header("Location", self.path)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if fault == "html":
            content = b"<html>sorry</html>"
        if fault == "other content":
            content = bytes(len(content))
        start = 0
        if self.headers.get("Range", "").startswith("bytes="):
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if fault == "short":  # closed cleanly after half of the body, no length announced
            body = body[: len(body) // 2]
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._write(repository, name, body, fault)

    def _write(self, repository: Repository, name: str, body: bytes, fault: str | None) -> None:
        try:
            for start in range(0, len(body), repository.slow_chunk):
                if fault == "stall after half" and start >= len(body) // 2:
                    assert repository.gate is not None
                    repository.gate.wait(20)
                chunk = body[start : start + repository.slow_chunk]
                self.wfile.write(chunk)
                repository.bytes_sent[name] = repository.bytes_sent.get(name, 0) + len(chunk)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    repository: Repository

    def handle_error(self, request: Any, client_address: Any) -> None:
        return None


@contextmanager
def hub(repository: Repository) -> Iterator[str]:
    """Serve ``repository`` as ``owner/model``; yields the endpoint for HF_ENDPOINT."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.repository = repository
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
