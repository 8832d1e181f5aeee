"""Events -> an Anthropic message, streamed or whole: content blocks in the order in which the model wrote them.

    message_start ─ {content_block_start ─ content_block_delta … ─ content_block_stop} … ─ message_delta
        ─ message_stop

The message starts with the engine's first sign of work, when the cached part of the prompt is known (or with the
first keep-alive, if that comes earlier; ``message_delta`` has the final numbers).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from headrace.api.dialects import anthropic_error_bytes
from headrace.errors import RequestError
from headrace.gateway.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Embedded,
    Event,
    KeepAlive,
    PromptScored,
    ReasoningDelta,
    SequenceFinished,
    Started,
    TextDelta,
    Usage,
)
from headrace.request import FinishReason

encode = msgspec.json.Encoder().encode

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# Fields that clients' types require and that mean nothing here: refusals, containers, bills.
_NO_STOP_DETAILS: dict[str, object] = {"stop_details": None, "container": None}
_NO_BILLING: dict[str, object] = dict.fromkeys(
    ("cache_creation", "inference_geo", "server_tool_use", "service_tier")
)
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What is constant in an answer.

    Attributes:
        id: of the message.
        model: the name that was asked for.
        prompt_tokens: of the whole prompt.
        request_id: for errors.
        omits_thinking: thinking blocks come without their text.
    """

    id: str
    model: str
    prompt_tokens: int
    request_id: str
    omits_thinking: bool = False


class MessageRenderer:
    """Renders one message; fed all events of its one sequence. ``message`` is the whole of it."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._begun = False
        self._cached_tokens = 0
        self._blocks: list[dict[str, object]] = []  # the last one is open if ``_kind`` is not ""
        self._kind = ""
        self._pieces: list[str] = []
        self._frame = b""  # what a delta of the open block begins with
        self._stop: tuple[str | None, str | None] = (None, None)
        self._usage: dict[str, object] = {}

    # -- the whole

    def take(self, events: Iterable[Event]) -> None:
        self.render(events)

    def message(self) -> dict[str, object]:
        reason, sequence = self._stop
        return {
            **self._head(),
            "content": self._blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            **_NO_STOP_DETAILS,
            "usage": self._usage,
        }

    # -- the stream

    def render(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._render(event) for event in events])

    def begin(self) -> bytes:
        """Nothing: the message starts when its usage is known."""
        return b""

    async def end(self) -> bytes:
        return b""

    async def fail(self, error: RequestError) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_error_bytes(error, self._shape.request_id)

    def _render(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._piece("text", event.text) if event.text else b""
            case ReasoningDelta():
                return self._thinking(event.text)
            case CallStarted():
                return self._open_call(event)
            case CallArguments():
                return self._delta(event.text)
            case CallEnded():
                return self._close()
            case Started():
                self._cached_tokens = event.cached_tokens
                return self._begin()
            case KeepAlive() | Embedded():
                return self._begin() + PING
            case SequenceFinished():
                self._stop = _stop_of(event)
                return self._begin() + self._close()
            case Usage():
                return self._finish(event)
            case PromptScored():
                return b""

    def _head(self) -> dict[str, object]:
        return {"id": self._shape.id, "type": "message", "role": "assistant", "model": self._shape.model}

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        usage = self._usage_object(self._shape.prompt_tokens, self._cached_tokens, 0, 0)
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **_NO_STOP_DETAILS,
            "usage": usage,
        }
        return _event("message_start", {"message": message})

    def _piece(self, kind: str, text: str) -> bytes:
        if self._kind == kind:
            return self._delta(text)
        before = self._close()
        # No ``citations`` in a text block: the description wants null, the AI SDK accepts only their absence.
        empty: dict[str, object] = {"type": kind, kind: ""}
        if kind == "thinking":
            empty["signature"] = ""
        return before + self._open(kind, f"{kind}_delta", kind, empty) + (self._delta(text) if text else b"")

    def _thinking(self, text: str) -> bytes:
        if not self._shape.omits_thinking:
            return self._piece("thinking", text)
        return (b"" if self._kind == "thinking" else self._piece("thinking", "")) + PING  # the line stays in use

    def _open_call(self, event: CallStarted) -> bytes:
        call_id = "toolu_" + event.id.removeprefix("call_") if event.id.startswith("call_") else event.id
        block: dict[str, object] = {
            "type": "tool_use",
            "id": call_id,
            "caller": {"type": "direct"},
            "name": event.name,
            "input": {},
        }
        return self._close() + self._open("tool_use", "input_json_delta", "partial_json", block)

    def _open(self, kind: str, delta: str, field: str, block: dict[str, object]) -> bytes:
        self._kind = kind
        index = len(self._blocks)
        self._blocks.append(dict(block))
        self._frame = b'%b"index":%d,"delta":%b,"%b":' % (
            b'event: content_block_delta\ndata: {"type":"content_block_delta",',
            index,
            encode({"type": delta})[:-1],
            field.encode(),
        )
        return self._begin() + _event("content_block_start", {"index": index, "content_block": block})

    def _delta(self, text: str) -> bytes:
        self._pieces.append(text)
        return self._frame + encode(text) + b"}}\n\n"

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        index, block = len(self._blocks) - 1, self._blocks[-1]
        text = "".join(self._pieces)
        before = b""
        if self._kind == "tool_use":
            block["input"] = _input(text)
        else:
            block[self._kind] = text
        if self._kind == "thinking":
            block["signature"] = signature = _signature(text)
            delta = {"type": "signature_delta", "signature": signature}
            before = _event("content_block_delta", {"index": index, "delta": delta})
        self._kind = ""
        self._pieces.clear()
        return before + _event("content_block_stop", {"index": index})

    def _finish(self, usage: Usage) -> bytes:
        self._usage = self._usage_object(
            usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens, usage.reasoning_tokens
        )
        reason, sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": sequence, **_NO_STOP_DETAILS}
        return _event("message_delta", {"delta": delta, "usage": self._usage}) + _event("message_stop", {})

    @staticmethod
    def _usage_object(prompt: int, cached: int, output: int, thinking: int) -> dict[str, object]:
        """The dialect counts the cached part of the prompt apart from ``input_tokens``."""
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
            "output_tokens_details": {"thinking_tokens": thinking},
            **_NO_BILLING,
        }


def _event(name: str, content: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **content}))


def _stop_of(event: SequenceFinished) -> tuple[str | None, str | None]:
    """``stop_reason`` and ``stop_sequence``; a cancelled answer has no reason."""
    if event.reason is FinishReason.LENGTH:
        return "max_tokens", None
    if event.reason is not FinishReason.STOP:
        return None, None
    if isinstance(event.stop, str):
        return "stop_sequence", event.stop
    return "tool_use" if event.num_calls else "end_turn", None


def _input(arguments: str) -> object:
    """Arguments, a JSON object by Python's lenient rules, as data that strict JSON can carry."""
    try:
        return msgspec.json.decode(arguments)
    except msgspec.MsgspecError:
        return json.loads(_SURROGATE.sub(r"\\ufffd", arguments))


def _signature(thinking: str) -> str:
    """Clients send it back with the block; it proves nothing, since thinking comes back in plain text."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
