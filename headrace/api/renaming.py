"""Other dialects are turned into the chat form; errors about a field of that form name the field that was sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headrace.errors import InvalidRequest


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors raised inside: ``names`` maps fields of the chat form to those of the dialect."""
    try:
        yield
    except InvalidRequest as error:
        name = error.param
        if name is not None and name in names:
            error.message = error.message.replace(name, names[name])
            error.param = names[name]
        raise
