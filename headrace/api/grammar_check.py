"""Whether a demanded form can be kept to, found out before an answer begins.

What the worker will compile is compiled before, in a process of its own (``headrace.gateway.grammar_process``):
whatever a grammar does to its compiler happens there.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, Protocol

from headrace.errors import GrammarError, InvalidRequest, NotReady
from headrace.params import Grammar

WAIT_S = 8.0
RETRY_S = 3.0


class Compiler(Protocol):
    """Finds out whether a grammar compiles."""

    def compile(self, grammar: Grammar) -> Future[Any]:
        """Fails with ``GrammarError``."""
        ...


class GrammarCheck:
    """Waits for verdicts on grammars."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    async def check(self, grammar: Grammar, param: str, part: str = "") -> None:
        """Raises InvalidRequest that says why ``param`` cannot be kept to; NotReady when others come first.

        ``part`` of what ``param`` demands, if it is about that alone; the message names it.
        """
        compiling = self._compiler.compile(grammar)
        waiting = asyncio.wrap_future(compiling)
        done, _ = await asyncio.wait({waiting}, timeout=WAIT_S)
        if not done:
            compiling.cancel()
            waiting.cancel()
            raise NotReady("other schemas are being compiled; try again", retry_after_s=RETRY_S)
        error = waiting.exception()
        if isinstance(error, GrammarError):
            raise refusal(param, error, part)
        if error is not None:
            raise error


def refusal(param: str, error: GrammarError, part: str = "") -> InvalidRequest:
    reason = f"{part}: {error}" if part else str(error)
    return InvalidRequest(f"{param} cannot be kept to: {reason}", param=param)
