"""Both log formats show message and particulars, one event per line."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from headrace.errors import StartupError
from headrace.gateway.logs import JsonFormatter, TextFormatter, configure
from headrace.worker.log_lines import LineFormatter, read_line


def record(**extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "headrace.gateway", "levelname": "INFO", "levelno": 20, "msg": "hello %s", "args": ("you",)}
    )
    made.__dict__.update(extra)
    return made


def test_text() -> None:
    assert TextFormatter().format(record(request_id="r1")).endswith("INFO gateway: hello you request_id=r1")


def test_json() -> None:
    event = json.loads(JsonFormatter().format(record(request_id="r1", path=object())))
    assert event["level"] == "info" and event["logger"] == "gateway" and event["request_id"] == "r1"
    assert event["message"] == "hello you" and event["time"].endswith("+00:00")


def test_a_workers_lines_keep_their_levels() -> None:
    formatter = LineFormatter()
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        lines = formatter.format(record(levelno=level, msg="first of %s\n<3>second")).split("\n")
        assert [read_line(line) for line in lines] == [(level, "first of you"), (level, "<3>second")]
    assert read_line("a library's") == (logging.INFO, "a library's")
    assert read_line("<9>x") == (logging.INFO, "<9>x") and read_line("") == (logging.INFO, "")


def test_what_a_stop_cancels_is_no_event(capsys: pytest.CaptureFixture[str]) -> None:
    root, own = logging.getLogger(), logging.getLogger("headrace")
    before = root.handlers[:], root.level, own.level
    try:
        configure("info", "text")
        told = "Traceback (most recent call last):\n  await receive()\n"
        logging.getLogger("uvicorn.error").error("%s", told + "asyncio.exceptions.CancelledError\n")
        try:
            raise asyncio.CancelledError
        except asyncio.CancelledError:
            logging.getLogger("uvicorn.error").exception("in a handler")
        assert capsys.readouterr().err == ""
        logging.getLogger("uvicorn.error").error("%s", told + "ValueError: no\n")
        assert "ValueError: no" in capsys.readouterr().err
    finally:
        root.handlers[:] = before[0]
        root.setLevel(before[1])
        own.setLevel(before[2])


def test_unknown_values_are_startup_errors() -> None:
    with pytest.raises(StartupError, match="--log-level"):
        configure("loud", "text")
    with pytest.raises(StartupError, match="--log-format"):
        configure("info", "xml")
