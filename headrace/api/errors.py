"""Errors as HTTP: one place for the JSON shape, the headers and the faults that only HTTP knows."""

from __future__ import annotations

import math

import msgspec

from headrace.errors import AuthenticationFailed, InvalidRequest, RequestError

DEFAULT_RETRY_AFTER_S = 1.0


class RouteNotFound(InvalidRequest):
    status = 404
    kind = "not_found_error"
    code = "not_found"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class UnsupportedEncoding(InvalidRequest):
    status = 415
    code = "unsupported_encoding"


class RateLimited(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "rate_limit_exceeded"


class ReloadFailed(RequestError):
    status = 409
    kind = "conflict_error"
    code = "reload_failed"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def openai_error(error: RequestError) -> dict[str, dict[str, str | None]]:
    """``{"error": {message, type, param, code}}``."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def openai_error_bytes(error: RequestError) -> bytes:
    return msgspec.json.encode(openai_error(error))


def error_headers(error: RequestError) -> dict[str, str]:
    """Headers that go with an error: when to come back, how to authenticate."""
    if error.status in (429, 503):
        seconds = error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_AFTER_S
        return {"retry-after": str(max(1, math.ceil(seconds)))}
    if isinstance(error, AuthenticationFailed):
        return {"www-authenticate": "Bearer"}
    return {}
