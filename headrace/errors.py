"""Every error Headrace raises on purpose.

HeadraceError
├── StartupError            permanent fault at start (files, configuration, memory): one line, exit code 2
│   └── ModelFileError      a model's files are missing, broken or unsupported
├── GrammarError            a grammar cannot be compiled, or nothing fits it: one line that says why
└── RequestError            a request that is refused; carries what every API dialect needs to render it
    ├── InvalidRequest      400
    │   └── ContextLengthExceeded
    ├── RequestCancelled    400
    ├── AuthenticationFailed 401
    ├── ModelNotFound       404
    ├── QueueFull           429, with Retry-After
    ├── NotReady            503, with Retry-After
    ├── RequestTimeout      504
    └── InternalFault       500

A message says what happened, the numbers, and what to do; it never contains a path of the server, a class
name or a traceback.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors raised on purpose; ``str(error)`` is one line for a person."""


class StartupError(HeadraceError):
    """The process cannot start and trying again would not help."""


class ModelFileError(StartupError):
    """A model's files are missing, incomplete, inconsistent or of an unknown kind."""


class GrammarError(HeadraceError):
    """A grammar cannot be used; ``str(error)`` is one line that says why."""


class RequestError(HeadraceError):
    """A refused request.

    Attributes:
        status: HTTP status.
        kind: OpenAI-style error type (``invalid_request_error``, ``rate_limit_error`` …).
        code: machine-readable code, or None.
        param: name of the offending field, or None.
        retry_after_s: seconds after which trying again makes sense, or None.
    """

    status = 400
    kind = "invalid_request_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class InvalidRequest(RequestError):
    """The request is malformed or asks for something that cannot be honoured."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt (plus requested output) does not fit ``max_model_len`` or the KV pool."""

    code = "context_length_exceeded"


class RequestCancelled(RequestError):
    """Somebody cancelled the request by its id, and there is no part of an answer that could be given."""

    code = "request_cancelled"


class AuthenticationFailed(RequestError):
    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    status = 404
    kind = "not_found_error"
    code = "model_not_found"


class QueueFull(RequestError):
    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class NotReady(RequestError):
    status = 503
    kind = "service_unavailable_error"
    code = "not_ready"


class RequestTimeout(RequestError):
    status = 504
    kind = "timeout_error"
    code = "timeout"


class InternalFault(RequestError):
    status = 500
    kind = "internal_error"
    code = "internal_error"


def one_line(error: BaseException) -> str:
    """What a library's error says, for a log or a note: its first line, or its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
