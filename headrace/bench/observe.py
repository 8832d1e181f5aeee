"""One streamed request as seen from outside: its events become a sample.

What fails is a failure with its kind, never a fast request: an error status, an error event, a stream that
ends without a finish reason, a stream without any text. Output tokens are the server's own usage; where it
sends none they are the number of events with text, and the sample says that this is an estimate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Failure(StrEnum):
    """Why a request does not count. ``NOT_SENT``: an earlier turn of its conversation failed."""

    CONNECT = "connect"
    STATUS = "status"
    ERROR_EVENT = "error_event"
    CUT = "cut"
    EMPTY = "empty"
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    NOT_SENT = "not_sent"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as observed. Times are seconds since the run began.

    Attributes:
        index: place in the list of requests (of conversations, where they have several turns).
        turn: place in its conversation.
        stream: which of the N streams sent it; its index where arrivals are scheduled.
        due_s: when it was to be sent, where arrivals are scheduled.
        sent_s, end_s: begin of connecting; arrival of the answer's last byte, or end of the attempt.
        text_times_s: arrival of each event with text (several tokens may share one).
        status: of the answer; None without one.
        prompt_tokens, cached_tokens, reasoning_tokens: from usage; None where the server sends none.
        output_tokens: from usage, or an estimate when ``estimated``.
        finish_reason: as the server spells it.
        failure: None for a request that counts; ``detail`` is a few words about it.
        text: what was generated, where keeping it was asked for.
    """

    index: int
    stream: int
    sent_s: float
    end_s: float
    turn: int = 0
    due_s: float | None = None
    text_times_s: tuple[float, ...] = ()
    status: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    output_tokens: int = 0
    estimated: bool = False
    finish_reason: str | None = None
    failure: Failure | None = None
    detail: str = ""
    text: str = ""

    @property
    def first_text_s(self) -> float | None:
        return self.text_times_s[0] if self.text_times_s else None


class Observer:
    """Collects one request's events and turns them into its sample."""

    def __init__(
        self, index: int, stream: int, sent_s: float, *, turn: int = 0, due_s: float | None = None
    ) -> None:
        self.status: int | None = None
        self._index, self._stream, self._turn = index, stream, turn
        self._due_s, self._sent_s = due_s, sent_s
        self._texts: list[str] = []
        self._times_s: list[float] = []
        self._usage: Mapping[str, Any] | None = None
        self._finish_reason: str | None = None
        self._error: tuple[Failure, str] | None = None

    def take(self, data: str, arrived_s: float) -> None:
        """One event's data and when it arrived."""
        if data.strip() == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            self._fail(Failure.MALFORMED, f"event is not JSON: {data[:80]}")
            return
        if not isinstance(chunk, dict):
            self._fail(Failure.MALFORMED, f"event is not an object: {data[:80]}")
        elif chunk.get("error"):
            self._fail(Failure.ERROR_EVENT, _error_text(chunk["error"]))
        else:
            self._take_chunk(chunk, arrived_s)

    def _take_chunk(self, chunk: Mapping[str, Any], arrived_s: float) -> None:
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        has_text = False
        for choice in chunk.get("choices") or ():
            if choice.get("finish_reason"):
                self._finish_reason = str(choice["finish_reason"])
            text = choice_text(choice)
            if text:
                has_text = True
                self._texts.append(text)
        if has_text:
            self._times_s.append(arrived_s)

    def _fail(self, kind: Failure, detail: str) -> None:
        if self._error is None:
            self._error = (kind, detail)

    def ended(self, end_s: float, keep_text: bool = False) -> Sample:
        """The stream ended without a fault of the connection."""
        if self._error is None and self._finish_reason is None:
            empty = not self._times_s
            self._fail(
                Failure.EMPTY if empty else Failure.CUT,
                "stream without any text" if empty else "stream ended without a finish reason",
            )
        if self._error is None and not self._times_s:
            self._fail(Failure.EMPTY, f"no text, finish reason {self._finish_reason}")
        return self._sample(end_s, keep_text)

    def failed(self, kind: Failure, detail: str, end_s: float) -> Sample:
        self._fail(kind, detail)
        return self._sample(end_s, False)

    def _sample(self, end_s: float, keep_text: bool) -> Sample:
        usage = self._usage or {}
        tokens = _count(usage, "completion_tokens")
        return Sample(
            index=self._index,
            stream=self._stream,
            turn=self._turn,
            due_s=self._due_s,
            sent_s=self._sent_s,
            end_s=end_s,
            text_times_s=tuple(self._times_s),
            status=self.status,
            prompt_tokens=_count(usage, "prompt_tokens"),
            cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens"),
            reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
            output_tokens=len(self._times_s) if tokens is None else tokens,
            estimated=tokens is None,
            finish_reason=self._finish_reason,
            failure=self._error[0] if self._error else None,
            detail=self._error[1] if self._error else "",
            text="".join(self._texts) if keep_text else "",
        )


def _count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def choice_text(choice: Mapping[str, Any]) -> str:
    """Text of a choice of either route; reasoning and tool-call arguments count, roles and nulls do not."""
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    delta = choice.get("delta") or choice.get("message") or {}
    # some servers send the same thought under both names
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    parts = [thought, delta.get("content")]
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        parts += [function.get("name"), function.get("arguments")]
    return "".join(part for part in parts if isinstance(part, str))


def _error_text(error: object) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message).split())[:200]
