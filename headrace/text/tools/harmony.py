"""Calls in the harmony format: the body of a commentary message to ``functions.NAME`` is the arguments.

The channels are split by the parser of the reasoning room; this one also reads the calls in it, so reasoning and
tools of a harmony model are one parser.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.text.reasoning.cursor import WHITE_SPACE, Step
from headrace.text.reasoning.events import ToolDefinition
from headrace.text.reasoning.harmony import CHANNEL, ENDS, START, HarmonyParser
from headrace.text.tools.calls import MAX_HELD_CHARS, Calls, new_call_id
from headrace.text.tools.json_calls import arguments

_NAMESPACE = "functions."


class HarmonyCalls(HarmonyParser):
    """Channels and calls.

    Args:
        tools: those declared; a recipient counts as a function when it is in the namespace or declared.
        reasoning: False: analysis is content too.
        opened: as for ``HarmonyParser``.
    """

    def __init__(self, tools: Iterable[ToolDefinition], reasoning: bool, opened: str = "") -> None:
        self._tools = list(tools)
        self._calls: Calls | None = None
        super().__init__(reasoning, opened)

    def _call(self, recipient: str, markup: str) -> Step[bool]:
        if self._calls is None:
            self._calls = Calls(
                self._cursor, lambda event: self._events.append(event), self._tools, new_call_id, MAX_HELD_CHARS
            )
        calls = self._calls
        name = recipient.removeprefix(_NAMESPACE)
        if not name or (name == recipient and not calls.is_declared(name)):
            return False
        calls.attempt(markup)
        yield from self._cursor.skip(WHITE_SPACE)
        done = yield from arguments(self._cursor, calls, name, closers=ENDS, borders=(START, CHANNEL))
        if done:
            yield from self._cursor.skip(WHITE_SPACE)
            self._cursor.release()
        else:
            self._cursor.rewind()
        return done
