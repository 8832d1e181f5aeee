"""A conversation and what is sent of it: pure state, no terminal and no network.

    messages:  user  assistant  user  assistant(calls)  tool  tool  assistant …
               └── a turn ────┘ └── a turn ─────────────────────────────────┘

A turn begins with the user's message; ``undo`` takes the last one away whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.chat_http import ChatFault, Delta

Message = dict[str, Any]

# What the chat itself decides; everything else may be set.
OURS = frozenset({"messages", "model", "stream", "stream_options", "n"})
_FORMAT = "headrace-chat"


@dataclass
class Answer:
    """One answer, put together from its deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[Message] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage
        for piece in delta.calls:
            self._add_call(piece)

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        """Pieces of a call share its index; servers that send whole calls may leave it out."""
        index = piece.get("index")
        index = len(self.calls) if index is None else int(index)
        while len(self.calls) <= index:
            empty = {"name": "", "arguments": ""}
            self.calls.append({"id": f"call_{len(self.calls)}", "type": "function", "function": empty})
        call, function = self.calls[index], piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = self.calls
        return message


@dataclass
class Conversation:
    """``params``: fields of the request beside messages and model. ``unsent``: a text whose answer failed."""

    model: str
    system: str = ""
    params: dict[str, object] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)
    unsent: str | None = None

    def body(self) -> dict[str, object]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**self.params, "model": self.model, "messages": [*system, *self.messages]}

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        self.unsent = None

    def undo(self) -> str | None:
        """Take the last turn away; the user's text of it, None when there is none."""
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index]["role"] == "user":
                text = str(self.messages[index]["content"])
                del self.messages[index:]
                return text
        return None

    def give_back(self) -> None:
        """The last turn's answer failed: it is as if it had not been asked, but can be asked again."""
        self.unsent = self.undo()

    def to_repeat(self) -> str | None:
        """The text to ask once more; its turn, if it is there, is taken away."""
        return self.unsent if self.unsent is not None else self.undo()

    def clear(self) -> None:
        self.messages.clear()
        self.unsent = None

    def set(self, name: str, value: str) -> None:
        """A request field from what was typed: JSON, else text; "" takes it back. Raises ChatFault."""
        if name in OURS:
            raise ChatFault(
                f"{name} is not for /set: there are /model and /system, and an answer is always one stream"
            )
        if not value:
            self.params.pop(name, None)
            return
        try:
            self.params[name] = json.loads(value)
        except (ValueError, RecursionError):
            self.params[name] = value

    # -- files

    def save(self, path: Path) -> None:
        """Write for ``load``, readable by this user only. Raises ChatFault; overwrites saved chats alone."""
        data = {
            "format": _FORMAT,
            "model": self.model,
            "system": self.system,
            "params": self.params,
            "messages": self.messages,
        }
        if path.exists():
            read(path)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(data, file, ensure_ascii=False, indent=1)
        except OSError as error:
            raise ChatFault(f"{path} cannot be written: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """Take over what was saved, but for the model: it may not be served here. Raises ChatFault."""
        data = read(path)
        self.system, self.params, self.messages = data["system"], data["params"], data["messages"]
        self.unsent = None


def read(path: Path) -> dict[str, Any]:
    """Raises ChatFault: no saved chat."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        is_ours = data["format"] == _FORMAT and all("role" in message for message in data["messages"])
        if is_ours and isinstance(data["system"], str) and isinstance(data["params"], dict):
            return dict(data)
    except OSError as error:
        raise ChatFault(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ChatFault(f"{path} is not a saved chat")
