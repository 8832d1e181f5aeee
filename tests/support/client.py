"""What tests send to a server and how they read its answers; one ``Answer`` for both modes."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

HANG_S = 90.0
"""No answer within this is a hang. Far above what any request of a test needs, also on a busy machine."""

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Answer:
    """A finished answer: one body, or a stream's chunks put together."""

    status: int
    headers: httpx.Headers
    body: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    comments: int = 0
    error: dict[str, Any] | None = None

    @property
    def streamed(self) -> bool:
        return self.body is None

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        sources = self.chunks if self.body is None else [self.body]
        return [choice for source in sources for choice in source["choices"] if choice["index"] == index]

    def deltas(self, index: int = 0) -> list[str]:
        return [_text(choice) for choice in self.choices(index)]

    def text(self, index: int = 0) -> str:
        assert self.status == 200 and self.error is None, (self.status, self.error)
        return "".join(self.deltas(index))

    def finish_reason(self, index: int = 0) -> str:
        """The one there is."""
        (reason,) = [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"]]
        return str(reason)

    def logprobs(self, index: int = 0) -> list[dict[str, Any]]:
        """Entries of the chat form."""
        parts = [choice["logprobs"] for choice in self.choices(index) if choice.get("logprobs")]
        return [entry for part in parts for entry in part["content"]]

    @property
    def usage(self) -> dict[str, Any]:
        if self.body is not None:
            return self.body["usage"]
        (usage,) = [chunk["usage"] for chunk in self.chunks if chunk.get("usage") and not chunk["choices"]]
        return usage

    @property
    def cached_tokens(self) -> int:
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def message(self) -> str:
        """Of the error."""
        assert self.error is not None, "no error"
        return str(self.error["message"])


def _text(choice: dict[str, Any]) -> str:
    if "delta" in choice:
        return choice["delta"].get("content") or ""
    return choice["message"]["content"] or "" if "message" in choice else choice["text"]


def chat_body(model: str, content: object, /, **fields: Any) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 40,
        **fields,
    }
    return {name: value for name, value in body.items() if value is not ABSENT}


def completion_body(model: str, prompt: object, /, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 40, **fields}
    return {name: value for name, value in body.items() if value is not ABSENT}


ABSENT = object()
"""As a field's value: the field is left out."""


class Client:
    """Blocking HTTP client of one server; may be used from several threads."""

    def __init__(self, url: str, model: str, key: str | None = None) -> None:
        self.url = url
        self.model = model
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self.http = httpx.Client(
            base_url=url, headers=headers, timeout=HANG_S, trust_env=False, limits=limits, follow_redirects=False
        )

    def close(self) -> None:
        self.http.close()

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.get(path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, **({"json": body} if body is not None else {}), **kwargs)

    def chat(self, content: object = "<|s05|>", **fields: Any) -> Answer:
        return self.send("/v1/chat/completions", chat_body(self.model, content, **fields))

    def complete(self, prompt: object = "<|s05|><|assistant|>", **fields: Any) -> Answer:
        return self.send("/v1/completions", completion_body(self.model, prompt, **fields))

    def send(self, path: str, body: dict[str, Any]) -> Answer:
        if not body.get("stream"):
            return read_answer(self.http.post(path, json=body))
        with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                return read_answer(response)
            return read_stream(response)

    def both(self, content: object = "<|s05|>", **fields: Any) -> tuple[Answer, Answer]:
        """A chat in one piece and streamed (with usage)."""
        usage = {"include_usage": True}
        return self.chat(content, **fields), self.chat(content, stream=True, stream_options=usage, **fields)

    def both_complete(self, prompt: object, **fields: Any) -> tuple[Answer, Answer]:
        usage = {"include_usage": True}
        return self.complete(prompt, **fields), self.complete(prompt, stream=True, stream_options=usage, **fields)

    @contextmanager
    def streaming(self, content: object = "<|s01|>", **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Chunks of a stream as they come; leaving the block closes the connection."""
        body = chat_body(self.model, content, **{"max_tokens": 100_000, **fields, "stream": True})
        with (
            httpx.Client(base_url=self.url, headers=self.http.headers, timeout=HANG_S, trust_env=False) as http,
            http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            assert response.status_code == 200, response.read()
            yield _chunks(response)

    def check_control(self) -> None:
        """The server answers, and rightly."""
        answer = self.chat("<|s05|>")
        assert answer.status == 200 and answer.text() == "ABCDEFGH", answer


def read_answer(response: httpx.Response) -> Answer:
    body = response.json()
    return Answer(response.status_code, response.headers, body=body, error=body.get("error"))


def read_stream(response: httpx.Response) -> Answer:
    """Every event is one ``data:`` line of JSON or a comment; nothing follows ``[DONE]``."""
    answer = Answer(response.status_code, response.headers)
    assert response.headers["content-type"].startswith("text/event-stream")
    for line in response.iter_lines():
        if not line:
            continue
        assert not answer.done, f"after [DONE]: {line}"
        if line.startswith(":"):
            answer.comments += 1
            continue
        assert line.startswith("data: "), line
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            answer.done = True
            continue
        event = json.loads(data)
        if "error" in event:
            answer.error = event["error"]
        else:
            answer.chunks.append(event)
    return answer


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def at_once(function: Callable[[T], R], items: Iterable[T], width: int) -> list[R]:
    """``function`` of every item, ``width`` at a time; results in order."""
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(function, items))


class RawConnection:
    """A plain TCP connection, for what HTTP clients do not let one do."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(HANG_S)
        self.socket.connect(("127.0.0.1", port))
        self.received = b""

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.socket.close()

    def request(
        self,
        method: str,
        path: str,
        body: object | bytes | None = None,
        headers: Sequence[tuple[str, str]] = (),
        version: str = "HTTP/1.1",
    ) -> None:
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} {version}", "Host: test"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + content)

    def read_some(self) -> bytes:
        data = self.socket.recv(65536)
        self.received += data
        return data

    def read_until(self, mark: bytes, count: int = 1) -> bytes:
        """All bytes so far, once ``mark`` is in them ``count`` times; fails at the end of the connection."""
        while self.received.count(mark) < count:
            assert self.read_some(), f"closed before {mark!r}: {self.received[-500:]!r}"
        return self.received

    def read_to_end(self) -> bytes:
        while self.read_some():
            pass
        return self.received

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
