"""OpenTelemetry traces: a span per HTTP request, and the phases of its runs below it.

    POST /v1/chat/completions            from the request's head to the answer's last byte; continues a traceparent
    ├── tokenize                         body, template, tokens            gateway's clock
    ├── queue ── prefill ── decode       as the worker saw them, when one worker did all of it; else the gateway

The phases' spans are made when a run is over, from times that are kept anyway, so nothing is done per token. The
worker knows no OpenTelemetry: it sends its times with a traced request's finish, on the monotonic clock that the
machine's processes share. Attributes are counts, names and parameters; never a word of a prompt or an answer.

Imported only when ``--otlp-traces-endpoint`` is given (extra ``headrace[otel]``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from headrace import __version__
from headrace.gateway.run_record import RunRecord
from headrace.gateway.service import Interruption

SEND_TIMEOUT_S = 5.0
SEND_EVERY_S = 1.0
_TRACES_PATH = "/v1/traces"
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}

log = logging.getLogger("headrace.gateway")

Attributes = Mapping[str, Any]


class Sender(SpanExporter):
    """Sends spans by OTLP over HTTP; a collector that does not take them is one line in the log."""

    def __init__(self, endpoint: str) -> None:
        self._inner = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
        self._endpoint = endpoint
        self._failing = False
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception:  # whatever the transport raises: spans are lost, the server goes on
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            log.warning("traces cannot be sent: %s does not take them", self._endpoint)
        elif self._failing and not failed:
            log.info("traces are sent again")
        self._failing = failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()  # type: ignore[no-untyped-call]


class Tracing:
    """Implements ``headrace.gateway.run_record.RunTracing``; one per process.

    Args:
        model: the served name.
        exporter: where spans go.
    """

    def __init__(self, model: str, exporter: SpanExporter) -> None:
        resource = Resource.create(
            {"service.name": os.environ.get("OTEL_SERVICE_NAME", "headrace"), "service.version": __version__}
        )
        self._model = model
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_S * 1000))
        self._gateway = self._provider.get_tracer("headrace.gateway", __version__)
        self._worker = self._provider.get_tracer("headrace.worker", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def close(self) -> None:
        """Send what is left; takes up to ``SEND_TIMEOUT_S`` when nobody takes it."""
        self._provider.shutdown()

    @contextlib.contextmanager
    def request(self, method: str, path: str, headers: Mapping[str, str]) -> Iterator[trace.Span]:
        """The span of an HTTP request; what is handled in the block belongs to it."""
        parent = self._propagator.extract(headers)
        attributes: dict[str, Any] = {"http.request.method": method, "url.path": path[:200]}
        span = self._gateway.start_span(method, parent, SpanKind.SERVER, attributes)
        token = context.attach(trace.set_span_in_context(span))
        try:
            yield span
        finally:
            context.detach(token)
            span.end()

    def answered(self, span: trace.Span, method: str, route: str | None, status: int, request_id: str) -> None:
        """How the request was answered; ``route`` None: there is no such route."""
        span.set_attribute("http.response.status_code", status)
        span.set_attribute("headrace.request.id", request_id)
        if route is not None:
            span.update_name(f"{method} {route}")
            span.set_attribute("http.route", route)
        if route in _OPERATIONS:
            span.set_attribute("gen_ai.operation.name", _OPERATIONS[route])
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", str(status))

    # -- RunTracing

    def current(self) -> trace.Span | None:
        span = trace.get_current_span()
        return span if span.is_recording() else None

    def run_ended(self, span: Any, run: RunRecord) -> None:
        """Make the spans of a run's phases, and note on the request's span what it came to."""
        parent = trace.set_span_in_context(span)
        offset_ns = time.time_ns() - time.monotonic_ns()
        for name, begin, end, attributes in phases(run):
            tracer = self._worker if attributes.get("headrace.process") == "worker" else self._gateway
            child = tracer.start_span(name, parent, attributes=attributes, start_time=_ns(begin, offset_ns))
            for event, at in events(run.interruptions):
                if begin <= at < end or (at >= end == run.ended_at):
                    child.add_event(event, timestamp=_ns(at, offset_ns))
            child.end(_ns(max(begin, end), offset_ns))
        if span.is_recording():
            before = getattr(span, "attributes", None) or {}
            span.set_attributes({**_request_attributes(self._model, run), **_usage(run, before)})
            for reason, kind in (("error", "internal_error"), ("timeout", "timeout")):
                if reason in run.finish_reasons:
                    span.set_status(Status(StatusCode.ERROR))
                    span.set_attribute("error.type", kind)


def phases(run: RunRecord) -> Iterator[tuple[str, float, float, Attributes]]:
    """(name, begin, end, attributes) of the phases that were reached, on the monotonic clock."""
    yield "tokenize", run.received_at, run.submitted_at, {"gen_ai.usage.input_tokens": run.prompt_tokens}
    began = {"headrace.cached_tokens": run.cached_tokens}
    if run.timelines:
        queued, scheduled = run.timelines[0].queued_at, run.timelines[0].scheduled_at
        first = min(one.first_token_at for one in run.timelines)
        last = max(one.finished_at for one in run.timelines)
        steps = max(one.steps for one in run.timelines)
        worker = {"headrace.process": "worker"}
        prefill = {**worker, **began, "headrace.prefill_steps": run.timelines[0].prefill_steps}
        preemptions = max(one.preemptions for one in run.timelines)
        yield "queue", queued, scheduled, worker
        yield "prefill", scheduled, first, prefill
        yield "decode", first, last, {**worker, "headrace.steps": steps, "headrace.preemptions": preemptions}
        return
    gateway = {"headrace.process": "gateway"}
    started, first_token = run.started_at, run.first_token_at
    yield "queue", run.submitted_at, run.ended_at if started is None else started, gateway
    if started is not None:
        yield "prefill", started, run.ended_at if first_token is None else first_token, {**gateway, **began}
    if first_token is not None:
        is_over = run.last_token_at is not None and not run.interruptions
        yield "decode", first_token, (run.last_token_at or run.ended_at) if is_over else run.ended_at, gateway


def events(interruptions: Sequence[Interruption]) -> Iterator[tuple[str, float]]:
    for one in interruptions:
        yield "worker lost", one.lost_at
        if one.replayed_at is not None:
            yield "replayed", one.replayed_at


def _request_attributes(model: str, run: RunRecord) -> dict[str, Any]:
    """Names of OpenTelemetry's conventions for generative AI; ours where it has none."""
    params = run.params
    return {
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.choice.count": run.n,
    }


def _usage(run: RunRecord, before: Attributes) -> dict[str, Any]:
    """A run's counts on top of those of the request's other prompts."""
    counts = {
        "gen_ai.usage.input_tokens": run.prompt_tokens,
        "gen_ai.usage.output_tokens": run.completion_tokens,
        "headrace.cached_tokens": run.cached_tokens,
        "headrace.reasoning_tokens": run.reasoning_tokens,
        "headrace.replays": sum(one.replayed_at is not None for one in run.interruptions),
    }
    usage: dict[str, Any] = {name: count + before.get(name, 0) for name, count in counts.items()}
    reasons = before.get("gen_ai.response.finish_reasons", ())
    usage["gen_ai.response.finish_reasons"] = [*reasons, *map(str, run.finish_reasons)]
    if run.first_token_at is not None:
        usage["gen_ai.server.time_to_first_token"] = run.first_token_at - run.received_at
    return usage


def _ns(at: float, offset_ns: int) -> int:
    """Wall-clock nanoseconds of a time on the monotonic clock."""
    return int(at * 1e9) + offset_ns


def traces_url(endpoint: str) -> str:
    """As given; a URL without a path gets OTLP's own."""
    url = endpoint.rstrip("/")
    return url if urlsplit(url).path else url + _TRACES_PATH


def open_tracing(model: str, endpoint: str) -> Tracing:
    return Tracing(model, Sender(traces_url(endpoint)))
