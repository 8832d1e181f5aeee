"""What a server says about itself: models, version, status, token counts. Each may be missing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.http_stream import BodyCut, ConnectFailed, MalformedAnswer, Server, send


class BenchFault(Exception):
    """A benchmark that cannot be done; one line for a person."""


@dataclass(frozen=True, slots=True)
class Api:
    """A server's small routes; ``headers`` go with every request."""

    server: Server
    headers: Mapping[str, str]
    timeout_s: float = 30.0

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and body. Raises BenchFault: no answer."""
        payload = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self.headers} if payload else self.headers
        where = f"{self.server.host}:{self.server.port}"
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                send(self.server, method, path, headers, payload) as answer,
            ):
                return answer.status, await answer.read(1 << 26)
        except TimeoutError:
            raise BenchFault(f"{where} did not answer {method} {path} within {self.timeout_s:g} s") from None
        except (ConnectFailed, BodyCut, MalformedAnswer) as error:
            raise BenchFault(f"{where} does not answer {method} {path}: {error}") from None

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """The answer of a 200, parsed; None for any other status and for what is not JSON. Raises BenchFault."""
        status, data = await self.call(method, path, body)
        try:
            return json.loads(data) if status == 200 else None
        except (ValueError, RecursionError):
            return None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Who answers. ``status``: what a Headrace server tells of its engine; None elsewhere."""

    models: tuple[str, ...]
    max_model_lens: Mapping[str, int]
    version: str | None
    status: Mapping[str, Any] | None


async def read_info(api: Api) -> ServerInfo:
    """Raises BenchFault: nobody answers, or a key is needed."""
    code, data = await api.call("GET", "/v1/models")
    if code in (401, 403):
        raise BenchFault(f"{api.server.host}:{api.server.port} wants a key: give --api-key")
    try:
        cards = json.loads(data).get("data") if code == 200 else None
    except (ValueError, AttributeError, RecursionError):
        cards = None
    known = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    lengths = {card["id"]: card["max_model_len"] for card in known if isinstance(card.get("max_model_len"), int)}
    version = await api.json("GET", "/version")
    status = await api.json("GET", "/v1/status")
    return ServerInfo(
        tuple(card["id"] for card in known),
        lengths,
        version.get("version") if isinstance(version, dict) else None,
        status if isinstance(status, dict) else None,
    )


class TokenCounter:
    """Counts a model's tokens with ``POST /tokenize``, where the server has that route."""

    def __init__(self, api: Api, model: str) -> None:
        self._api = api
        self._model = model

    async def available(self) -> bool:
        return await self.of_text("one two three") is not None

    async def of_text(self, text: str) -> int | None:
        return await self._count({"prompt": text, "add_special_tokens": False})

    async def of_prompt(self, text: str) -> int | None:
        return await self._count({"prompt": text})

    async def of_messages(self, messages: Sequence[Mapping[str, str]]) -> int | None:
        return await self._count({"messages": list(messages), "add_generation_prompt": True})

    async def _count(self, body: dict[str, object]) -> int | None:
        answer = await self._api.json("POST", "/tokenize", {"model": self._model, **body})
        count = answer.get("count") if isinstance(answer, dict) else None
        return count if isinstance(count, int) else None
