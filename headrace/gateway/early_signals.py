"""Signals from the first moment of a start until the event loop takes them over.

Imports little, so that a start listens early: a model may be fetched for minutes before anything else is loaded.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


class StoppedEarly(BaseException):
    """Told to stop before the event loop listens to signals."""


@contextlib.contextmanager
def early_signals(hangups: list[int] | None = None) -> Iterator[list[int]]:
    """A stop undoes what was begun (``StoppedEarly``); a hangup waits in the list, behind those of ``hangups``."""
    waiting: list[int] = [] if hangups is None else hangups
    has_terminal = os.isatty(0)

    def stop(number: int, frame: object) -> None:
        raise StoppedEarly

    def hang_up(number: int, frame: object) -> None:
        if terminal_is_gone(has_terminal):
            raise StoppedEarly
        waiting.append(number)

    handlers = {signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGHUP: hang_up}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield waiting
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def terminal_is_gone(had_terminal: bool) -> bool:
    """Whether the terminal of the start is gone: a hangup is then no request of a person."""
    return had_terminal and not os.isatty(0)
