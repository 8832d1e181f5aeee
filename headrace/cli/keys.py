"""API keys from flags, a file or the environment. Messages never contain a key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace.cli.flags import UsageError
from headrace.config import ApiKey

# NAME:KEY; what stands before the first colon is a name only when it looks like one
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63}):(.+)")
_VARIABLES = ("HEADRACE_API_KEY", "VLLM_API_KEY")


def read_keys(flags: Iterable[str], file: str | None, environment: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """Keys of ``--api-key`` and ``--api-key-file``; without any, of HEADRACE_API_KEY, else of VLLM_API_KEY.

    A key without a name is called key-1, key-2 …; two keys may share a name (rotation). Raises UsageError:
    unreadable or empty file, a key given twice, whitespace or non-ASCII in a key.
    """
    words = [*flags, *(_file_lines(file) if file is not None else ())]
    if not words:
        words = [next((environment[name] for name in _VARIABLES if environment.get(name)), "")]
        words = [word for word in words if word]
    keys = tuple(_key(word, index) for index, word in enumerate(words, start=1))
    if len({key.secret for key in keys}) < len(keys):
        raise UsageError("the same API key was given twice")
    return keys


def _key(word: str, index: int) -> ApiKey:
    if word.startswith(":") or (_NAMED.fullmatch(word + "x") and not _NAMED.fullmatch(word)):
        raise UsageError(f"API key number {index} is half of NAME:KEY; give both, or a key without a colon there")
    named = _NAMED.fullmatch(word)
    name, secret = (named[1], named[2]) if named else (f"key-{index}", word)
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise UsageError(f"API key number {index} has whitespace or characters that a header cannot carry")
    return ApiKey(name=name, secret=secret)


def _file_lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError):
        raise UsageError("--api-key-file cannot be read as text") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError("--api-key-file holds no key")
    return keys
