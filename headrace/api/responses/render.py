"""Events -> a response, streamed or whole.

    created ─ in_progress ─ per item { output_item.added ─ its parts and deltas ─ output_item.done } … ─ completed

Thinking, text and calls become items in the order in which the model wrote them; a thinking block between two
texts makes two messages. The last event (``completed``, ``incomplete`` or ``failed``) carries the whole response.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from headrace.api.responses.items import Item, item_id, text_part
from headrace.errors import InvalidRequest, RequestError
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

KEEP_ALIVE = b": keep-alive\n\n"

Keep = Callable[[dict[str, Any]], Awaitable[None]]


class ResponseRenderer:
    """Renders one response; fed all events of its one sequence.

    Args:
        echo: fields of the response that the request decides.
        grouped: name by which the model knows a function of a namespace -> (namespace, name).
        keep: called with the whole response when it is over, before the client is told; it may change it.
    """

    def __init__(self, echo: dict[str, Any], grouped: Mapping[str, tuple[str, str]], keep: Keep) -> None:
        self.id: str = echo["id"]
        self._echo = echo
        self._grouped = grouped
        self._keep = keep
        self._hex = self.id.partition("_")[2]
        self._sequence_number = 0
        self._output: list[Item] = []  # the last one is open if ``_kind`` is not ""
        self._kind = ""
        self._pieces: list[str] = []
        self._frame = b""
        self._finished: SequenceFinished | None = None
        self._error: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None

    # -- the whole

    def take(self, events: Iterable[Event]) -> None:
        self.render(events)

    async def response(self) -> dict[str, Any]:
        """The finished response, kept."""
        whole = self._response(self._status())
        await self._keep(whole)
        return whole

    def _status(self) -> str:
        if self._error is not None:
            return "failed"
        if self._finished is None:
            return "in_progress"
        if self._finished.reason is FinishReason.LENGTH:
            return "incomplete"
        return "completed" if self._finished.reason is FinishReason.STOP else "cancelled"

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._echo,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output if status != "in_progress" else [],
            "usage": self._usage,
        }

    # -- the stream

    def begin(self) -> bytes:
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def render(self, events: Iterable[Event]) -> bytes:
        return b"".join([self._render(event) for event in events])

    async def end(self) -> bytes:
        response = await self.response()
        name = "completed" if response["status"] == "completed" else "incomplete"
        return self._event(f"response.{name}", response=response)

    async def fail(self, error: RequestError) -> bytes:
        before = self._close("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        self._error = {
            "code": "invalid_prompt" if isinstance(error, InvalidRequest) else code,
            "message": error.message,
        }
        return before + self._event("response.failed", response=await self.response())

    def _event(self, kind: str, /, **content: Any) -> bytes:
        number = self._sequence_number
        self._sequence_number += 1
        data = encode({"type": kind, "sequence_number": number, **content})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _render(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._piece("message", event.text) if event.text else b""
            case ReasoningDelta():
                return self._piece("reasoning", event.text)
            case CallStarted():
                return self._close() + self._open("function_call", self._call(event))
            case CallArguments():
                return self._delta(event.text)
            case CallEnded():
                return self._close("completed" if event.complete else "incomplete")
            case SequenceFinished():
                self._finished = event
                return self._close("completed" if event.reason is FinishReason.STOP else "incomplete")
            case Usage():
                self._usage = usage_object(event)
                return b""
            case KeepAlive() | Embedded():
                return KEEP_ALIVE
            case Started() | PromptScored():
                return b""

    # -- items

    def _call(self, event: CallStarted) -> Item:
        namespace, name = self._grouped.get(event.name, (None, event.name))
        group = {} if namespace is None else {"namespace": namespace}
        return {"call_id": event.id, "name": name, **group, "arguments": ""}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _piece(self, kind: str, text: str) -> bytes:
        if self._kind == kind:
            return self._delta(text)
        before = self._close()
        fields: Item = (
            {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        )
        part = text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        return (
            before
            + self._open(kind, fields)
            + self._event("response.content_part.added", **self._place(), content_index=0, part=part)
            + self._delta(text)
        )

    def _open(self, kind: str, fields: Item) -> bytes:
        index = len(self._output)
        item = {"id": item_id(kind, self._hex, index), "type": kind, "status": "in_progress", **fields}
        self._kind = kind
        self._output.append(item)
        deltas: dict[str, tuple[str, dict[str, Any]]] = {
            "message": ("response.output_text.delta", {"content_index": 0, "logprobs": []}),
            "reasoning": ("response.reasoning_text.delta", {"content_index": 0}),
            "function_call": ("response.function_call_arguments.delta", {}),
        }
        name, place = deltas[kind]
        head = encode({"type": name, **self._place(), **place})[:-1]
        self._frame = b"event: %b\ndata: %b" % (name.encode(), head)
        return self._event("response.output_item.added", output_index=index, item=item)

    def _delta(self, text: str) -> bytes:
        self._pieces.append(text)
        number = self._sequence_number
        self._sequence_number += 1
        return b'%b,"sequence_number":%d,"delta":%b}\n\n' % (self._frame, number, encode(text))

    def _close(self, status: str = "completed") -> bytes:
        if not self._kind:
            return b""
        item, kind, text = self._output[-1], self._kind, "".join(self._pieces)
        self._kind = ""
        self._pieces.clear()
        item["status"] = status
        place = self._place()
        if kind == "function_call":
            item["arguments"] = text
            done = self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            place["content_index"] = 0
            is_text = kind == "message"
            part = text_part(text) if is_text else {"type": "reasoning_text", "text": text}
            item["content"] = [part]
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            done = self._event(name, **place, text=text, **({"logprobs": []} if is_text else {}))
            done += self._event("response.content_part.done", **place, part=part)
        return done + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
