"""Whose dialect a request speaks: Anthropic's below ``/v1/messages``, OpenAI's everywhere else.

``/v1/models`` is in both; clients of Anthropic's API send the header ``anthropic-version``.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from headrace.api.errors import error_headers, openai_error_bytes
from headrace.api.request_scope import shown_id
from headrace.errors import ContextLengthExceeded, RequestError

_ANTHROPIC_ROOT = "/v1/messages"
_MODELS = "/v1/models"
_VERSION_HEADER = b"anthropic-version"
_OVERLOADED = 529
# Status -> Anthropic's error type; other 4xx are invalid requests, other 5xx are the API's own errors.
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one to Anthropic's API, to a path that is known or not."""
    path: str = scope["path"]
    if path == _MODELS or path.startswith(_MODELS + "/"):
        return any(name == _VERSION_HEADER for name, _ in scope["headers"])
    return path == _ANTHROPIC_ROOT or path.startswith(_ANTHROPIC_ROOT + "/")


def error_response(error: RequestError, scope: Scope) -> Response:
    """The answer to a refused request, in the shape of its route."""
    status, body = error.status, openai_error_bytes(error)
    if is_anthropic(scope):
        status = _OVERLOADED if error.status == 503 else error.status
        body = anthropic_error_bytes(error, shown_id(scope))
    return Response(body, status, media_type="application/json", headers=error_headers(error))


def anthropic_error_bytes(error: RequestError, request_id: str) -> bytes:
    """``{"type": "error", "error": {type, message}, "request_id"}``."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    # Clients of this dialect know a full context by these words, and shorten the conversation.
    message = f"prompt is too long: {error.message}" if isinstance(error, ContextLengthExceeded) else error.message
    content = {"type": _ANTHROPIC_KINDS.get(error.status, fallback), "message": message}
    return msgspec.json.encode({"type": "error", "error": content, "request_id": request_id})
