"""Logging: one line per event on standard error, as text or as JSON; never a prompt or an answer.

Modules log a constant message and give the particulars in ``extra``; both formats show them as fields:

    2026-01-31 12:00:00,123 INFO gateway: worker ready pid=4242 device=cpu
    {"time": "2026-01-31T12:00:00.123+00:00", "level": "info", "message": "worker ready", "pid": 4242, …}
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import sys

import msgspec

from headrace.errors import StartupError

LEVELS = ("debug", "info", "warning", "error", "critical")

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


def configure(level: str, log_format: str) -> None:
    """Set up the process's logging once, at start. Raises ``StartupError`` for an unknown level or format."""
    if level not in LEVELS:
        raise StartupError(f"--log-level {level} is not one of {', '.join(LEVELS)}")
    formatters: dict[str, logging.Formatter] = {"text": TextFormatter(), "json": JsonFormatter()}
    if log_format not in formatters:
        raise StartupError(f"--log-format {log_format} is not one of text, json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatters[log_format])
    handler.addFilter(_is_no_cancellation)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING if level in ("debug", "info") else level.upper())
    logging.getLogger("headrace").setLevel(level.upper())


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """What was cancelled at shutdown is no event: a handler, or the application's life, told as a text."""
    if record.exc_info:
        return not isinstance(record.exc_info[1], asyncio.CancelledError)
    return not (record.name.startswith("uvicorn") and record.getMessage().rstrip().endswith(".CancelledError"))


def fields(record: logging.LogRecord) -> dict[str, object]:
    """What the call gave in ``extra``."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD and value is not None}


def short_name(record: logging.LogRecord) -> str:
    return record.name.removeprefix("headrace.")


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        particulars = "".join(f" {key}={value}" for key, value in fields(record).items())
        head = f"{self.formatTime(record)} {record.levelname} {short_name(record)}"
        line = f"{head}: {record.getMessage()}{particulars}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        event: dict[str, object] = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": short_name(record),
            "message": record.getMessage(),
            **fields(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(event, enc_hook=str).decode()
