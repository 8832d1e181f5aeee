"""What a flag's value may be: each kind turns text into a value or says in a few words what it wants.

The same kinds read the command line and configuration files, so both accept and refuse the same things.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Kind:
    """A value's shape. ``parse`` raises ValueError with a phrase that completes "--flag must be …"."""

    metavar: str
    parse: Callable[[str], object]


def integer(low: int, high: int | None = None, *, scale: int = 1) -> Kind:
    """A whole number in [low, high], multiplied by ``scale`` (a unit)."""
    wanted = f"a whole number from {low} to {high}" if high is not None else f"a whole number, at least {low}"

    def parse(text: str) -> object:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(wanted) from None
        if number < low or (high is not None and number > high):
            raise ValueError(wanted)
        return number * scale

    return Kind("N", parse)


def number(low: float, high: float = math.inf, *, above: bool = False, below: bool = False) -> Kind:
    """A finite number in [low, high]; ``above`` excludes low, ``below`` excludes high."""
    wanted = f"a number above {low:g}" if above else f"a number, at least {low:g}"
    if not math.isinf(high):
        is_closed = not (above or below)
        upper = f" and below {high:g}" if below else f" and at most {high:g}"
        wanted = f"a number from {low:g} to {high:g}" if is_closed else wanted + upper

    def parse(text: str) -> object:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(wanted) from None
        too_low = value <= low if above else value < low
        too_high = value >= high if below else value > high
        if not math.isfinite(value) or too_low or too_high:
            raise ValueError(wanted)
        return value

    return Kind("X", parse)


def choice(*names: str, note: str = "") -> Kind:
    """One of ``names``, in lower or upper case; ``note`` is added to what is said about any other."""

    def parse(text: str) -> object:
        if text.lower() not in names:
            wanted = "one of " + ", ".join(names) if len(names) > 1 else names[0]
            raise ValueError(wanted + (f" ({note})" if note else ""))
        return text.lower()

    return Kind("{" + ",".join(names) + "}", parse)


def _kv_bits(text: str) -> object:
    if text not in ("4", "8"):
        raise ValueError("4 or 8")
    return f"int{text}"


KV_BITS = Kind("{4,8}", _kv_bits)


def _truncates(text: str) -> object:
    if text.lower() not in ("error", "truncate"):
        raise ValueError("error or truncate")
    return text.lower() == "truncate"


OVERFLOW_POLICY = Kind("{error,truncate}", _truncates)


def text(metavar: str) -> Kind:
    """Any text but the empty one."""

    def parse(value: str) -> object:
        if not value.strip():
            raise ValueError("not empty")
        return value

    return Kind(metavar, parse)


def _parse_host(value: str) -> object:
    """IPv6 addresses also as URLs write them."""
    if not value.strip():
        raise ValueError("not empty")
    return value[1:-1] if value.startswith("[") and value.endswith("]") and ":" in value else value


HOST = Kind("HOST", _parse_host)


def output_file(metavar: str) -> Kind:
    """A file that can be written, as far as its folder tells: said before the work, not behind it."""

    def parse(value: str) -> object:
        folder = os.path.dirname(os.path.abspath(value))
        if not value.strip() or os.path.isdir(value) or not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError("a file in a folder that exists and can be written to")
        return value

    return Kind(metavar, parse)


def http_url(metavar: str) -> Kind:
    """An http or https URL with a host."""

    def parse(value: str) -> object:
        try:
            parts = urlsplit(value)
            known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
        except ValueError:
            known = None
        if not known:
            raise ValueError("an http or https URL")
        return value

    return Kind(metavar, parse)


def _parse_origin(value: str) -> object:
    parts = urlsplit(value)
    if value not in ("*", "null") and (
        not parts.scheme or not parts.netloc or value != f"{parts.scheme}://{parts.netloc}"
    ):
        raise ValueError('"*", or scheme and host as a browser sends them, such as https://chat.example:8443')
    return value


ORIGIN = Kind("ORIGIN", _parse_origin)


def url_path(metavar: str) -> Kind:
    """A path prefix such as ``/llm``, kept without a slash at its end."""

    def parse(value: str) -> object:
        if not value.startswith("/"):
            raise ValueError('a path that begins with "/"')
        return value.rstrip("/")

    return Kind(metavar, parse)


def _parse_file(value: str) -> object:
    if not os.path.isfile(value):
        is_special = os.path.exists(value) and not os.path.isdir(value)
        raise ValueError(
            "a regular file, which can be read again (no pipe, no device)" if is_special else "a file that exists"
        )
    return os.path.abspath(value)


def _parse_json_object(value: str) -> object:
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError('a JSON object, such as {"enable_thinking": false}')
    return parsed


def mebibytes(low: int = 1) -> Kind:
    """MiB on the command line, bytes in the configuration."""
    return Kind("MIB", integer(low, scale=MIB).parse)


FILE = Kind("FILE", _parse_file)
JSON_OBJECT = Kind("JSON", _parse_json_object)
