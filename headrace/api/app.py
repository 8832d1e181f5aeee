"""The app factory: routes, layers, and the OpenAPI document.

    BelowRoot ► RequestIds ► CORS ► ErrorBoundary ► Authentication ► routing ► handler

Handlers take the raw body and decode it themselves (see ``body`` and ``fields``); their schemas are written into
the OpenAPI document from the same structs that decode them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

import headrace
from headrace.api import admin, models, tokens
from headrace.api.anthropic import routes as anthropic
from headrace.api.anthropic.schema import MessagesFields, PromptFields
from headrace.api.auth import OPEN_PATHS, AuthMiddleware
from headrace.api.dashboard import feed
from headrace.api.dashboard.pages import add_pages, read_files
from headrace.api.edge import (
    ANTHROPIC_HEADER,
    HEADER,
    BelowRoot,
    ErrorBoundary,
    RequestIds,
    answer_http_exception,
)
from headrace.api.embeddings import routes as embeddings
from headrace.api.embeddings.models import make_text_models
from headrace.api.embeddings.schema import EmbeddingFields, RerankFields
from headrace.api.grammar_check import Compiler, GrammarCheck
from headrace.api.openai import generate
from headrace.api.openai.schema import ChatFields, CompletionFields
from headrace.api.parsers import choose_parsers
from headrace.api.responses import routes as responses
from headrace.api.responses.schema import ResponseFields
from headrace.api.responses.store import ResponseStore
from headrace.api.services import Services
from headrace.api.traced import TracedRequests
from headrace.config import GenerationDefaults, ServerConfig
from headrace.gateway.grammar_process import GrammarProcess
from headrace.gateway.latencies import WatchedMetrics
from headrace.gateway.live import Live
from headrace.gateway.pipeline import Pipeline
from headrace.gateway.prompt_run import PipelineLimits
from headrace.gateway.service import EngineClient, RequestMetrics
from headrace.text.model_text import ModelText

if TYPE_CHECKING:
    from headrace.gateway.tracing import Tracing

Handler = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("headrace.api")

KEEP_ALIVE_S = 10.0

# Method, path, handler, schema of the JSON body.
ROUTES: tuple[tuple[str, str, Handler, type | None], ...] = (
    ("POST", "/v1/chat/completions", generate.create_chat_completion, ChatFields),
    ("POST", "/v1/completions", generate.create_completion, CompletionFields),
    ("POST", "/v1/responses", responses.create_response, ResponseFields),
    ("GET", "/v1/responses/{response_id}", responses.get_response, None),
    ("DELETE", "/v1/responses/{response_id}", responses.delete_response, None),
    ("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response, None),
    ("GET", "/v1/responses/{response_id}/input_items", responses.list_input_items, None),
    ("POST", "/v1/messages", anthropic.create_message, MessagesFields),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens, PromptFields),
    ("POST", "/v1/embeddings", embeddings.create_embedding, EmbeddingFields),
    ("POST", "/v1/rerank", embeddings.create_rerank, RerankFields),
    ("POST", "/rerank", embeddings.create_rerank, RerankFields),
    ("POST", "/v1/requests/{request_id}/cancel", admin.cancel, None),
    ("GET", "/v1/models", models.list_models, None),
    ("GET", "/v1/models/{model_id:path}", models.get_model, None),
    ("POST", "/tokenize", tokens.tokenize, tokens.TokenizeRequest),
    ("POST", "/detokenize", tokens.detokenize, tokens.Detokenize),
    ("GET", "/version", models.get_version, None),
    ("GET", "/health", admin.health, None),
    ("GET", "/ready", admin.ready, None),
    ("GET", "/metrics", admin.metrics, None),
    ("GET", "/v1/status", admin.status, None),
    ("GET", "/v1/status/events", feed.status_events, None),
    ("GET", "/v1/cache/stats", admin.cache_stats, None),
    ("POST", "/v1/models/reload", admin.reload, None),
    ("DELETE", "/v1/cache", admin.clear_cache, None),
    ("DELETE", "/v1/cache/prefix", admin.clear_cache, None),
)


def create_app(
    config: ServerConfig,
    engine: EngineClient,
    text: ModelText,
    metrics: RequestMetrics,
    sides: Mapping[str, EngineClient] | None = None,
    tracing: Tracing | None = None,
    compiler: Compiler | None = None,
) -> FastAPI:
    """The HTTP side of one engine, and of the ones beside it (see ``make_text_models``).

    ``compiler`` judges grammars; None: a process of its own does.
    """
    compiler = compiler or GrammarProcess(config.engine.model, config.chat_template_file)
    house = make_services(config, engine, text, metrics, sides or {}, GrammarCheck(compiler), tracing)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        house.responses.close()

    app = FastAPI(
        title="Headrace",
        version=headrace.__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers={HTTPException: answer_http_exception},
        # FastAPI's own would send what exceptions say; ours is in headrace.gateway.tracing
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.services = house
    schemas: list[type] = []
    for method, path, handler, schema in ROUTES:
        _add_route(app, method, path, handler, schema)
        if schema is not None:
            schemas.append(schema)
    _document(app, schemas)
    pages = read_files()
    add_pages(app, pages)
    app.add_middleware(AuthMiddleware, config=config, open_paths=OPEN_PATHS | pages.keys())
    app.add_middleware(ErrorBoundary, metrics=metrics)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
            allow_headers=("*",),
            expose_headers=(HEADER, ANTHROPIC_HEADER, "retry-after"),
        )
    app.add_middleware(RequestIds)
    if tracing is not None:
        app.add_middleware(TracedRequests, tracing=tracing)
    if config.root_path:
        app.add_middleware(BelowRoot, root_path=config.root_path)
    return app


def make_services(
    config: ServerConfig,
    engine: EngineClient,
    text: ModelText,
    metrics: RequestMetrics,
    sides: Mapping[str, EngineClient],
    check: GrammarCheck,
    tracing: Tracing | None = None,
) -> Services:
    watched = WatchedMetrics(metrics)
    limits = PipelineLimits(
        queue_timeout_s=config.queue_timeout_s,
        progress_timeout_s=config.progress_timeout_s,
        keep_alive_s=KEEP_ALIVE_S,
    )
    defaults = msgspec.convert({**text.sampling_defaults, **config.defaults}, GenerationDefaults)
    isolate_keys = config.prefix_isolation == "key"
    pipeline = Pipeline(engine, text.tokenizer, watched, limits, isolate_keys=isolate_keys, tracing=tracing)
    store = ResponseStore(config.response_store_file, config.response_store_mb * 1024 * 1024)
    store.check()
    parsers = choose_parsers(config, text)
    log.info("answers: tool calls %s, thinking %s", parsers.tools or "as text", parsers.reasoning or "as text")
    text_models = make_text_models(config, engine, text, watched, limits, sides)
    live = Live(engine, watched, lambda: pipeline.num_running)
    return Services(config, engine, text, watched, pipeline, defaults, parsers, store, check, text_models, live)


def _add_route(app: FastAPI, method: str, path: str, handler: Handler, schema: type | None) -> None:
    extra: dict[str, Any] = {}
    if schema is not None:
        reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if names := re.findall(r"{(\w+)", path):
        string = {"type": "string"}
        extra["parameters"] = [{"name": name, "in": "path", "required": True, "schema": string} for name in names]
    app.add_api_route(path, handler, methods=[method], response_model=None, openapi_extra=extra)
    if method == "GET":
        app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)


def _document(app: FastAPI, schemas: list[type]) -> None:
    """Add the bodies' schemas to the OpenAPI document, which is made at the first request for it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, components = msgspec.json.schema_components(schemas, ref_template="#/components/schemas/{name}")
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
