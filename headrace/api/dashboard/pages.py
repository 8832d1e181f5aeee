"""The dashboard's files: one page and what it loads, from this package, with headers that allow nothing else.

The page holds no data and needs no key: it asks for one and sends it with each request. Its links are relative, so
it works behind any ``--root-path``. Files are read once; browsers ask each time whether theirs is still the one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import resources

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

PAGE = "index.html"
FOLDER = "/dashboard/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file as it is sent."""

    content: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, StaticFile]:
    """Path below the root -> file: the page at ``/``, the others in ``FOLDER``."""
    files: dict[str, StaticFile] = {}
    for entry in sorted(resources.files(__package__).joinpath("static").iterdir(), key=lambda entry: entry.name):
        media_type = TYPES.get("." + entry.name.rpartition(".")[2])
        if media_type is not None:
            content = entry.read_bytes()
            path = "/" if entry.name == PAGE else FOLDER + entry.name
            files[path] = StaticFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files


def add_pages(app: FastAPI, files: Mapping[str, StaticFile]) -> None:
    for path, file in files.items():
        app.add_api_route(
            path, _handler(file), methods=["GET", "HEAD"], response_model=None, include_in_schema=False
        )


def _handler(file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**HEADERS, "etag": file.etag}

    async def send(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers={**headers, "content-type": file.media_type})

    return send
