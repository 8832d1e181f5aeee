"""Whether a demanded form can be kept to, found out before an answer begins.

The gateway compiles what the worker will compile again, on a thread beside the event loop, and keeps the verdict.
"""

from __future__ import annotations

import asyncio

from headrace.errors import GrammarError, InvalidRequest, NotReady
from headrace.params import Grammar
from headrace.text.grammars.compiler import GrammarCompiler
from headrace.text.model_text import ModelText

LIMIT_S = 4.0


class GrammarCheck:
    """Compiles grammars for one model, within a time."""

    def __init__(self, text: ModelText) -> None:
        self._compiler = GrammarCompiler(lambda: text)

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises InvalidRequest that says why ``param`` cannot be kept to; NotReady when others come first."""
        compiling = self._compiler.compile(grammar)
        waiting = asyncio.wrap_future(compiling)
        done, _ = await asyncio.wait({waiting}, timeout=LIMIT_S)
        if not done:
            began = not compiling.cancel()
            waiting.cancel()
            if began:
                raise InvalidRequest(
                    f"{param} is too complex: compiling it takes more than {LIMIT_S:g} s", param=param
                )
            raise NotReady("other schemas are being compiled; try again", retry_after_s=LIMIT_S)
        error = waiting.exception()
        if isinstance(error, GrammarError):
            raise refusal(param, error)
        if error is not None:
            raise error


def refusal(param: str, error: GrammarError) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be kept to: {error}", param=param)
