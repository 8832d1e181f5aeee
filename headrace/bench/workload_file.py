"""Workloads from a file: JSON lines, or one JSON list, sent word for word.

An entry is one of:

    {"prompt": "…"}                                   one turn
    {"messages": [{"role": …, "content": …}, …]}      one request, as it is
    {"turns": ["…", "…"]}                             a conversation, the server's own answers in between
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", …}, …]}   ShareGPT: the human's turns

with ``max_tokens`` (or ``output_tokens``) where the entry decides its own length.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.server import BenchFault

_HUMAN = ("human", "user")


@dataclass(frozen=True, slots=True)
class Entry:
    """``turns``: new messages of each turn."""

    turns: tuple[list[dict[str, Any]], ...]
    max_tokens: int | None = None


def read_workload(path: str, turns: int = 1) -> list[Entry]:
    """Entries of a file; of conversations the first ``turns`` turns. Raises BenchFault with the line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchFault(f"{path}: cannot be read ({type(error).__name__})") from None
    entries = [entry for place, item in _items(path, text) if (entry := _entry(path, place, item, turns))]
    if not entries:
        raise BenchFault(f"{path}: no entry with a prompt")
    return entries


def _items(path: str, text: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            return [(f"entry {index + 1}", item) for index, item in enumerate(json.loads(text))]
        except (ValueError, RecursionError) as error:
            raise BenchFault(f"{path}: not a JSON list: {error}") from None
    items = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                items.append((f"line {number}", json.loads(line)))
            except (ValueError, RecursionError):
                raise BenchFault(f"{path}, line {number}: not JSON") from None
    return items


def _entry(path: str, place: str, item: Any, turns: int) -> Entry | None:
    """None for a conversation without a word of the human's."""
    if not isinstance(item, dict):
        raise BenchFault(f"{path}, {place}: not an object")
    length = item.get("max_tokens", item.get("output_tokens"))
    if length is not None and (not isinstance(length, int) or length < 1):
        raise BenchFault(f"{path}, {place}: max_tokens must be a whole number, at least 1")
    messages = item.get("messages")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return Entry((messages,), length)
    said = _said(item)
    if said is None:
        raise BenchFault(f"{path}, {place}: needs one of prompt, messages, turns, conversations")
    return Entry(tuple([{"role": "user", "content": text}] for text in said[:turns]), length) if said else None


def _said(item: Mapping[str, Any]) -> list[str] | None:
    """What the user says, turn by turn; None when the entry has no known form."""
    if isinstance(item.get("prompt"), str):
        return [item["prompt"]]
    said = item.get("turns")
    if isinstance(said, list) and all(isinstance(text, str) for text in said):
        return said
    talk = item.get("conversations")
    if isinstance(talk, list) and all(isinstance(part, dict) for part in talk):
        values = [part.get("value") for part in talk if part.get("from") in _HUMAN]
        return [value for value in values if isinstance(value, str) and value]
    return None
