"""A worker's log lines on their way to the gateway: ``<4>text``, the severity as systemd's journal reads it.

Lines without it (a library's, the interpreter's last words) are news of no particular weight.
"""

from __future__ import annotations

import logging
import re

_SEVERITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_LEVELS = {severity: level for level, severity in _SEVERITIES.items()}
_MARKED = re.compile(r"<([23467])>(.*)", re.DOTALL)


class LineFormatter(logging.Formatter):
    """Message and traceback, every line of them marked."""

    def format(self, record: logging.LogRecord) -> str:
        mark = f"<{_SEVERITIES.get(record.levelno, 6)}>"
        return "\n".join(mark + line for line in super().format(record).split("\n"))


def read_line(line: str) -> tuple[int, str]:
    """The level of ``logging`` and the text."""
    found = _MARKED.match(line)
    return (_LEVELS[int(found[1])], found[2]) if found else (logging.INFO, line)
