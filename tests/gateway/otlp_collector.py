"""A local OTLP/HTTP collector: takes traces as a collector does and keeps their spans."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """Times are nanoseconds since 1970, ids are in hex."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int]]
    failed: bool
    scope: str
    service: str


@dataclass
class Collector:
    url: str = ""
    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""
    paths: set[str] = field(default_factory=set)

    def named(self, name: str, trace: str | None = None) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name and trace in (None, span.trace)]

    def take(self, data: bytes) -> None:
        self.raw += data
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    events = [(event.name, event.time_unix_nano) for event in span.events]
                    self.spans.append(
                        Span(
                            span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(),
                            span.start_time_unix_nano, span.end_time_unix_nano, _values(span.attributes), events,
                            span.status.code == 2, scope.scope.name, service,
                        )
                    )  # fmt: skip


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            collector.paths.add(self.path)
            collector.take(data)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
