"""A chat's side of an OpenAI-compatible server: list its models, stream one answer.

Blocking, on the standard library's client: an interrupt then ends the read it falls into, and the connection is
closed, by which a server knows that nobody listens any more. No redirects and no proxies.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from headrace.bench.sse import EventParser
from headrace.errors import HeadraceError

CONNECT_TIMEOUT_S = 10.0
_PIECE_BYTES = 65536


class ChatFault(HeadraceError):
    """No answer, or a refusal; one line for a person."""


def key_variable(url: str) -> str:
    """The environment's variable with a key for this URL's host: ours for this machine, OpenAI's for any other.

    This machine is ``localhost`` and loopback addresses; no name is looked up.
    """
    host = str(urlsplit(url).hostname)
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return "HEADRACE_API_KEY" if is_here else "OPENAI_API_KEY"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event of a stream adds. ``calls``: pieces of tool calls as the API sends them."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. ``silence_s``: longest time without a byte from the server."""

    url: str
    key: str | None = None
    silence_s: float = 300.0

    @property
    def base(self) -> str:
        """The URL in front of ``/models``: ``/v1`` is added to a URL without a path."""
        url = self.url.rstrip("/")
        return url if urlsplit(url).path else url + "/v1"

    def models(self) -> list[str]:
        """Names the server lists. Raises ChatFault."""
        connection = self._connect()
        try:
            data = self._exchange(connection, "GET", "/models", None).read()
            cards = json.loads(data)["data"]
            return [str(card["id"]) for card in cards]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ChatFault(
                f"{self.base}/models does not list models: is this an OpenAI-compatible URL?"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatFault(f"{self.url} ended its list of models early ({_cause(error)})") from None
        finally:
            connection.close()

    def stream(self, body: Mapping[str, object]) -> Generator[Delta, None, None]:
        """One answer as it comes. Raises ChatFault; close the iterator to end the request."""
        connection = self._connect()
        try:
            payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
            response = self._exchange(connection, "POST", "/chat/completions", payload.encode())
            yield from _deltas(response)
        except TimeoutError:
            raise ChatFault(f"{self.url} sent nothing for {self.silence_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatFault(f"the connection ended in the middle of the answer ({_cause(error)})") from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        host, port = str(parts.hostname), parts.port
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_TIMEOUT_S, context=context)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_TIMEOUT_S)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, route: str, payload: bytes | None
    ) -> http.client.HTTPResponse:
        """The answer, once it is a 200. Raises ChatFault for any other, and when there is none."""
        headers = {"Accept": "text/event-stream" if payload else "application/json"}
        if payload:
            headers["Content-Type"] = "application/json"
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            connection.connect()
            connection.sock.settimeout(self.silence_s)
            connection.request(method, urlsplit(self.base).path + route, payload, headers)
            response = connection.getresponse()
        except TimeoutError:
            raise ChatFault(f"{self.url} does not answer") from None
        except (OSError, http.client.HTTPException) as error:
            hint = ": start a server with headrace serve" if isinstance(error, ConnectionRefusedError) else ""
            raise ChatFault(f"{self.url} does not answer ({_cause(error)}){hint}") from None
        if response.status != 200:
            raise ChatFault(self._refusal(response, route))
        return response

    def _refusal(self, response: http.client.HTTPResponse, route: str) -> str:
        said = _message(response.read(65536)) or response.reason
        if response.status == 401:
            return (
                f"the server wants a key ({said}): give --api-key, or set {key_variable(self.url)}"
                if not self.key
                else f"the key is wrong ({said})"
            )
        if response.status == 404 and route not in said:
            return f"404 from {self.base}{route}: {said}"
        wait = response.headers.get("retry-after")
        return f"{response.status}: {said}" + (f" (try again in {wait} s)" if wait else "")


def _deltas(response: http.client.HTTPResponse) -> Iterator[Delta]:
    if not response.headers.get_content_type().startswith("text/event-stream"):
        raise ChatFault("the server answered without streaming; this chat needs a server that streams")
    parser, finished = EventParser(), False
    while piece := response.read1(_PIECE_BYTES):
        for event in parser.feed(piece):
            if event.data == "[DONE]":
                return
            delta = read_event(event.data)
            finished = finished or delta.finish_reason is not None
            yield delta
    if not finished:
        raise ChatFault("the connection ended in the middle of the answer")


def read_event(data: str) -> Delta:
    """Raises ChatFault: the event is an error, or none of this API."""
    try:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise ChatFault(_message(data.encode()) or "the server failed")
        usage = chunk.get("usage") if isinstance(chunk.get("usage"), dict) else None
        if not chunk.get("choices"):
            return Delta(usage=usage)
        choice = chunk["choices"][0]
        delta = choice.get("delta") or {}
        return Delta(
            text=delta.get("content") or "",
            reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
            calls=tuple(delta.get("tool_calls") or ()),
            finish_reason=choice.get("finish_reason"),
            usage=usage,
        )
    except (ValueError, AttributeError, TypeError, KeyError, IndexError, RecursionError):
        raise ChatFault(f"the server sent an event that is no chat chunk: {data[:80]!r}") from None


def _message(data: bytes) -> str:
    """What an error body says, in one line; "" when nothing can be read."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return " ".join(data.decode("utf-8", "replace").split())[:200]
    for name in ("error", "detail", "message"):
        said = body.get(name) if isinstance(body, dict) else None
        if isinstance(said, dict):
            said = said.get("message")
        if said:
            return " ".join(str(said).split())[:500]
    return ""


def _cause(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return cast("str | None", getattr(error, "strerror", None)) or type(error).__name__
