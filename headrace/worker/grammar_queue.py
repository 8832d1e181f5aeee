"""Requests that wait for their grammar to be compiled, off the step loop.

Most grammars take a millisecond and are waited for; a large one is compiled beside the steps, and its request is
queued when it is done. Only then is the request answered, so what the client hears first is the truth.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillCompiling
from typing import Any, Protocol

from headrace.errors import GrammarError
from headrace.params import Grammar
from headrace.request import EngineRequest

SHORT_WAIT_S = 0.005

log = logging.getLogger("headrace.worker")


class Compiler(Protocol):
    def compile(self, grammar: Grammar) -> Future[Any]:
        """Compile and keep; fails with ``GrammarError``."""
        ...


class GrammarQueue:
    """Order of arrival is kept among the requests that are done. Main thread only."""

    def __init__(self, compiler: Compiler | None) -> None:
        self._compiler = compiler
        self._waiting: dict[str, tuple[EngineRequest, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: EngineRequest) -> None:
        """Begin; does not wait longer than ``SHORT_WAIT_S``."""
        assert request.params.grammar is not None
        if self._compiler is None:
            future: Future[Any] = Future()
            future.set_exception(GrammarError("this engine makes no masks"))
        else:
            future = self._compiler.compile(request.params.grammar)
        self._waiting[request.id] = (request, future)
        try:
            future.exception(SHORT_WAIT_S)
        except StillCompiling:
            return

    def drop(self, request_id: str) -> None:
        """The request was aborted; the compiled grammar is of use to others."""
        self._waiting.pop(request_id, None)

    def done(self) -> Iterator[tuple[EngineRequest, str | None]]:
        """Take out the requests whose grammar is compiled, or cannot be: then with the reason."""
        for request_id, (request, future) in list(self._waiting.items()):
            if not future.done():
                continue
            del self._waiting[request_id]
            error = future.exception()
            if error is not None and not isinstance(error, GrammarError):
                log.error("a grammar could not be compiled", exc_info=error)
            reason = str(error) if isinstance(error, GrammarError) else "the grammar library failed"
            yield request, None if error is None else reason
