"""Stop strings over a stream of text pieces.

All stop strings form one automaton (Aho and Corasick, 1975) that is fed character by character. Its state is
the longest suffix of the text so far that begins some stop string: exactly what must be held back, since it
may still become a stop. The match that completes first ends the stream; of several that complete at the same
character the longest wins. The outcome therefore depends on the text alone, never on how it was cut.

    emitted text ........ | held back (state) | not seen yet
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.errors import InvalidRequest
from headrace.text.unicode import check_text

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 20_000


def validate_stops(value: object, param: str = "stop") -> tuple[str, ...]:
    """Turn a request's ``stop`` (null, a string, a list of strings) into a tuple, or refuse it.

    An empty string is refused: it would end every answer at once. Raises InvalidRequest that names ``param``.
    """
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise InvalidRequest(f"'{param}' must be a string, a list of strings or null", param=param)
    stops: dict[str, None] = {}
    for item in items:
        if not isinstance(item, str):
            raise InvalidRequest(f"'{param}' may hold only strings", param=param)
        if not item:
            raise InvalidRequest(f"'{param}' may not hold an empty string", param=param)
        check_text(item, param)
        stops[item] = None
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"'{param}' holds {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed", param=param
        )
    if (chars := sum(map(len, stops))) > MAX_STOP_CHARS:
        raise InvalidRequest(
            f"'{param}' holds {chars} characters; at most {MAX_STOP_CHARS} are allowed", param=param
        )
    return tuple(stops)


class StopAutomaton:
    """The automaton of some stop strings: immutable, made once per request, shared by its sequences.

    Node 0 is the root; a node stands for a string that begins some stop.

    Args:
        stops: non-empty strings, as ``validate_stops`` returns them.
    """

    __slots__ = ("_children", "_fail", "depth", "first_chars", "match")

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._fail = [0]  # the longest proper suffix that is a node too
        self.depth = [0]  # length of the node's string
        self.match: list[str | None] = [None]  # the longest stop that the node's string ends with
        for stop in stops:
            self._add(stop)
        self._link()
        self.first_chars = frozenset(self._children[0])

    def _add(self, stop: str) -> None:
        node = 0
        for char in stop:
            child = self._children[node].get(char)
            if child is None:
                child = len(self._children)
                self._children[node][char] = child
                self._children.append({})
                self._fail.append(0)
                self.depth.append(self.depth[node] + 1)
                self.match.append(None)
            node = child
        self.match[node] = stop

    def _link(self) -> None:
        """Set fallbacks breadth first, so that the shorter node's is there already."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                if self.match[child] is None:
                    self.match[child] = self.match[self._fail[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The node after one more character."""
        while (child := self._children[node].get(char)) is None:
            if node == 0:
                return 0
            node = self._fail[node]
        return child


class StopStrings:
    """Cuts one sequence's text at the first stop string. One object per sequence.

    Args:
        stops: the strings, or their automaton where several sequences share it.
        include: whether the stop string itself is emitted.
    """

    __slots__ = ("_automaton", "_held", "_include", "_matched", "_state")

    def __init__(self, stops: Sequence[str] | StopAutomaton, include: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include = include
        self._held = ""
        self._matched: str | None = None
        self._state = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, or None so far."""
        return self._matched

    def push(self, text: str) -> tuple[str, str | None]:
        """Feed the next piece; returns (text that may be sent now, the stop string if one completed).

        After a match the stream is over: later pieces yield nothing.
        """
        if self._matched is not None:
            return "", None
        automaton, state = self._automaton, self._state
        if state == 0 and automaton.first_chars.isdisjoint(text):
            return text, None
        text = self._held + text
        for end in range(len(self._held), len(text)):
            state = automaton.step(state, text[end])
            stop = automaton.match[state]
            if stop is not None:
                self._matched, self._held = stop, ""
                return text[: end + 1 if self._include else end + 1 - len(stop)], stop
        self._state = state
        cut = len(text) - automaton.depth[state]
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """The sequence ended otherwise: release what was held back."""
        held, self._held, self._state = self._held, "", 0
        return held
