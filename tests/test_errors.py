"""What other libraries' errors say, in a line."""

from __future__ import annotations

import pytest

from headrace.errors import one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("what happened\nwhere"), "what happened"),
        (RuntimeError("\n  what happened"), "what happened"),
        (RuntimeError(), "RuntimeError"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 500), "x" * 160),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line
