"""Who may come in: API keys for everything but the two probes and the dashboard's files, and a rate per key.

Checked before routing, so a path that does not exist, is misspelled or has another case asks for the key like any
other. Keys are compared as digests in constant time, all of them, whichever matches.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Set

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.api.errors import RateLimited
from headrace.api.request_scope import KEY
from headrace.config import ApiKey, ServerConfig
from headrace.errors import AuthenticationFailed

OPEN_PATHS = frozenset({"/health", "/ready"})
MAX_BUCKETS = 10_000


class KeyRing:
    """The accepted keys."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = [(key, _digest(key.secret)) for key in keys]

    def find(self, headers: Headers) -> ApiKey | None:
        """The key that the headers carry (bearer or ``x-api-key``), None without keys at all.

        Raises ``AuthenticationFailed``.
        """
        if not self._keys:
            return None
        offered = _offered(headers)
        if offered is None:
            raise AuthenticationFailed("an API key is needed: send the header Authorization: Bearer KEY")
        digest = _digest(offered)
        found: ApiKey | None = None
        for key, known in self._keys:
            if hmac.compare_digest(digest, known):
                found = key
        if found is None:
            raise AuthenticationFailed("the API key is not known here")
        return found


class RateLimiter:
    """A token bucket per caller: ``per_minute`` requests, saved up to as many.

    The number of callers remembered is bounded; the one not seen for longest is forgotten first.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str) -> None:
        """Count one request; ``RateLimited`` with the time until the next one would pass."""
        if self._per_minute <= 0:
            return
        now = self._clock()
        level, then = self._buckets.pop(caller, (float(self._per_minute), now))
        level = min(float(self._per_minute), level + (now - then) * self._per_minute / 60)
        allowed = level >= 1
        self._buckets[caller] = (level - 1 if allowed else level, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        if not allowed:
            raise RateLimited(
                f"more than {self._per_minute} requests per minute",
                retry_after_s=(1 - level) * 60 / self._per_minute,
            )


class AuthMiddleware:
    """Lets a request pass with its key noted in the scope, or raises its ``RequestError``."""

    def __init__(self, app: ASGIApp, config: ServerConfig, open_paths: Set[str] = OPEN_PATHS) -> None:
        self._app = app
        self._keys = KeyRing(config.api_keys)
        self._limiter = RateLimiter(config.rate_limit_per_min)
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            key = self._keys.find(Headers(scope=scope))
            scope[KEY] = key
            if scope["method"] == "POST" and not scope["path"].endswith("/cancel"):
                client = scope.get("client")
                self._limiter.take(key.name if key else client[0] if client else "")
        await self._app(scope, receive, send)


def _offered(headers: Headers) -> str | None:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credentials.strip():
        return credentials.strip()
    return headers.get("x-api-key") or None


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()
