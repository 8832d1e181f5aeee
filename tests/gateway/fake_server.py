"""The real server process around the worker without a model and a small application.

Argument: ServerConfig as JSON. ``GET /health``; ``GET /frozen``, how many objects the collector leaves out;
``POST /generate`` with {id, max_tokens, seed, marks} streams a token id per line (and ``padding`` dashes in front
of the next), then ``end`` or ``error STATUS``.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import msgspec
from engine_harness import FAKE_WORKER, request

from headrace.config import ServerConfig
from headrace.errors import RequestError
from headrace.gateway.metrics import Metrics
from headrace.gateway.server import run_server
from headrace.gateway.worker_client import WorkerClient


def make_app(config: ServerConfig, client: WorkerClient, metrics: Metrics) -> Any:
    async def answer(send: Any, status: int, body: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def generate(send: Any, asked: dict[str, Any]) -> None:
        try:
            stream = client.submit(
                request(
                    asked["id"],
                    asked["max_tokens"],
                    seed=asked.get("seed", 0),
                    marks=tuple(asked.get("marks", ())),
                )
            )
            await stream.accepted()
        except RequestError as error:
            await answer(send, error.status, error.message.encode())
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        last, padding = b"end\n", "-" * asked.get("padding", 0)
        try:
            async for outputs in stream:
                lines = "".join(f"{token}\n" + padding for output in outputs for token in output.token_ids)
                await send({"type": "http.response.body", "body": lines.encode(), "more_body": True})
        except RequestError as error:
            last = f"error {error.status}\n".encode()
        await send({"type": "http.response.body", "body": last})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/health":
            healthy = client.state().status in ("ready", "restarting")
            await answer(send, 200 if healthy else 503, client.state().status.encode())
        elif scope["path"] == "/frozen":
            await answer(send, 200, str(gc.get_freeze_count()).encode())
        else:
            await generate(send, msgspec.json.decode(body))

    return app


if __name__ == "__main__":
    sys.exit(run_server(msgspec.json.decode(sys.argv[1], type=ServerConfig), make_app, worker_command=FAKE_WORKER))
