"""Events -> bytes: one JSON body, or SSE chunks, in the two OpenAI dialects.

A chunk is a constant frame around the one or two values that change. The frame is encoded once per sequence, so
a chunk costs one JSON string:

    data: {"id":…,"choices":[{"index":0,"delta":{"content":  + text +  },"logprobs":null,"finish_reason":null}]}
    |<------------------- frame, once -------------------->|         |<------------ frame, once ------------->|
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headrace.api.errors import openai_error_bytes
from headrace.api.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from headrace.errors import RequestError
from headrace.gateway.events import (
    CallArguments,
    CallEnded,
    CallStarted,
    Embedded,
    Event,
    Folded,
    FoldedCall,
    FoldedSequence,
    KeepAlive,
    PromptScored,
    ReasoningDelta,
    ScoredToken,
    SequenceFinished,
    Started,
    TextDelta,
    Usage,
)
from headrace.request import FinishReason

encode = msgspec.json.Encoder().encode

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the client asked of the answer's form, and what is constant in it.

    Attributes:
        chat: the chat dialect; otherwise the legacy completions dialect.
        id, created, model: constant in all chunks of an answer.
        n: sequences per prompt.
        logprobs: whether they were asked for.
        prompt_logprobs: the same, for the prompt (vLLM's field).
        as_ids: tokens in logprobs are named ``token_id:N``.
        token_ids: answers carry token ids.
        prompts: token ids of the prompts.
        reasoning: whether thinking is shown apart, under both names that clients know.
        echo: texts of the prompts, to be put before the completions; empty: no echo.
        usage, continuous_usage: whether a stream ends with usage, and whether every chunk carries it.
    """

    chat: bool
    id: str
    created: int
    model: str
    prompts: Sequence[list[int]]
    n: int = 1
    logprobs: bool = False
    prompt_logprobs: bool = False
    as_ids: bool = False
    token_ids: bool = False
    reasoning: bool = False
    echo: Sequence[str] = ()
    usage: bool = False
    continuous_usage: bool = False

    @property
    def num_sequences(self) -> int:
        return self.n * len(self.prompts)

    def echo_text(self, index: int) -> str:
        return self.echo[index // self.n] if self.echo else ""

    def head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def logprobs_of(self, tokens: Sequence[ScoredToken], offset: int) -> object:
        if not self.logprobs:
            return None
        return (
            chat_logprobs(tokens, self.as_ids) if self.chat else completion_logprobs(tokens, offset, self.as_ids)
        )


def usage_object(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def finish_reason(finished: SequenceFinished) -> str:
    """The dialect's word: an answer that ended by itself with calls in it waits for their results."""
    if finished.num_calls and finished.reason is FinishReason.STOP:
        return "tool_calls"
    return finished.reason.value


# -- one body ------------------------------------------------------------------------------------------


def render_body(shape: Shape, folded: Folded) -> bytes:
    """The whole answer as one JSON object."""
    choices = [_choice(shape, folded, index) for index in range(shape.num_sequences)]
    body = {
        **shape.head("chat.completion" if shape.chat else "text_completion"),
        "choices": choices,
        "usage": usage_object(folded.usage),
    }
    if shape.chat and shape.token_ids:
        body["prompt_token_ids"] = shape.prompts[0]
    if shape.chat and shape.prompt_logprobs:
        body["prompt_logprobs"] = prompt_logprobs(folded.sequences[0].prompt)
    return encode(body)


def _choice(shape: Shape, folded: Folded, index: int) -> dict[str, object]:
    sequence = folded.sequences[index]
    choice: dict[str, object] = {"index": index}
    if shape.chat:
        choice["message"] = _message(shape, sequence)
        choice["logprobs"] = shape.logprobs_of(sequence.logprobs, 0)
    else:
        _add_completion_text(choice, shape, sequence, folded.sequences[index - index % shape.n].prompt)
    choice["finish_reason"] = finish_reason(sequence.finished) if sequence.finished else None
    choice["stop_reason"] = sequence.finished.stop if sequence.finished else None
    if shape.token_ids:
        choice["token_ids"] = sequence.token_ids
        if not shape.chat:
            choice["prompt_token_ids"] = shape.prompts[index // shape.n]
    return choice


def _message(shape: Shape, sequence: FoldedSequence) -> dict[str, object]:
    content = sequence.text
    message: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if shape.reasoning:
        message["reasoning_content"] = message["reasoning"] = sequence.reasoning or None
    if sequence.calls:
        message["content"] = content or None
        message["tool_calls"] = [_call(call) for call in sequence.calls]
    return message


def _call(call: FoldedCall) -> dict[str, object]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _add_completion_text(
    choice: dict[str, object], shape: Shape, sequence: FoldedSequence, prompt: Sequence[ScoredToken]
) -> None:
    echo = shape.echo_text(choice["index"])  # type: ignore[arg-type]
    choice["text"] = echo + sequence.text
    tokens = [*prompt, *sequence.logprobs] if shape.echo else sequence.logprobs
    choice["logprobs"] = shape.logprobs_of(tokens, 0)
    if shape.prompt_logprobs:
        choice["prompt_logprobs"] = prompt_logprobs(prompt)


# -- chunks --------------------------------------------------------------------------------------------


class StreamRenderer:
    """SSE bytes of one streamed answer; fed all its events in order."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        kind = "chat.completion.chunk" if shape.chat else "text_completion"
        self._head = encode(shape.head(kind))[:-1]
        self._frames = [self._frame(index) for index in range(shape.num_sequences)]
        self._thought_frames = [self._thought_frame(index) for index in range(shape.num_sequences)]
        self._plain = not (shape.logprobs or shape.token_ids or shape.continuous_usage)
        self._begun = [False] * shape.num_sequences
        self._offsets = [len(shape.echo_text(index)) for index in range(shape.num_sequences)]
        self._completion_tokens = 0
        self._prompt_told = False

    def render(self, events: Iterable[Event]) -> bytes:
        """Bytes of a batch of events; may be empty."""
        return b"".join([self._render(event) for event in events])

    def begin(self) -> bytes:
        return b""

    async def end(self) -> bytes:
        return DONE

    async def fail(self, error: RequestError) -> bytes:
        """An error event; the stream then ends without ``[DONE]``."""
        return b"data: %b\n\n" % openai_error_bytes(error)

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        key = b'"delta":{"content":' if self._shape.chat else b'"text":'
        end = b'},"logprobs":null,"finish_reason":null}]}\n\n' if self._shape.chat else (
            b',"logprobs":null,"finish_reason":null}]}\n\n'
        )  # fmt: skip
        return b'data: %b,"choices":[{"index":%d,%b' % (self._head, index, key), end

    def _thought_frame(self, index: int) -> tuple[bytes, bytes, bytes]:
        begin = b'data: %b,"choices":[{"index":%d,"delta":{"reasoning_content":' % (self._head, index)
        return begin, b',"reasoning":', b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def _render(self, event: Event) -> bytes:
        match event:
            case TextDelta():
                return self._delta(event)
            case ReasoningDelta():
                return self._thought(event)
            case CallStarted():
                function = {"name": event.name, "arguments": ""}
                return self._call_delta(event, {"id": event.id, "type": "function", "function": function})
            case CallArguments():
                return self._call_delta(event, {"function": {"arguments": event.text}})
            case SequenceFinished():
                return self._finish(event)
            case Usage():
                return self._usage(event)
            case PromptScored():
                return self._prompt(event)
            case KeepAlive() | Embedded():
                return KEEP_ALIVE
            case CallEnded() | Started():
                return b""

    def _delta(self, event: TextDelta) -> bytes:
        if self._plain and self._begun[event.index]:
            if not event.text:
                return b""
            before, after = self._frames[event.index]
            return before + encode(event.text) + after
        self._completion_tokens += len(event.token_ids)
        if not (event.text or event.logprobs or self._shape.token_ids):
            return b""
        opening = self._open(event.index)
        logprobs = self._shape.logprobs_of(event.logprobs, self._offsets[event.index])
        self._offsets[event.index] += len(event.text)
        choice = self._choice(event.index, opening + event.text, first=not self._begun[event.index])
        choice["logprobs"] = logprobs
        choice["finish_reason"] = None
        if self._shape.token_ids:
            choice["token_ids"] = event.token_ids
            if not self._shape.chat and not self._begun[event.index]:
                choice["prompt_token_ids"] = self._shape.prompts[event.index // self._shape.n]
        self._begun[event.index] = True
        return self._chunk([choice])

    def _thought(self, event: ReasoningDelta) -> bytes:
        if self._plain and self._begun[event.index]:
            before, between, after = self._thought_frames[event.index]
            text = encode(event.text)
            return b"".join((before, text, between, text, after))
        return self._further(event.index, {"reasoning_content": event.text, "reasoning": event.text})

    def _call_delta(self, event: CallStarted | CallArguments, call: dict[str, object]) -> bytes:
        return self._further(event.index, {"tool_calls": [{"index": event.call, **call}]})

    def _further(self, index: int, delta: dict[str, object]) -> bytes:
        """A chunk with something else than content; it opens the sequence when it is the first."""
        if not self._begun[index]:
            self._begun[index] = True
            delta = {"role": "assistant", "content": None, **delta}
        return self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _finish(self, event: SequenceFinished) -> bytes:
        """The only chunk of a sequence with a reason; it opens the sequence too when that had no text at all."""
        first = not self._begun[event.index]
        text = self._open(event.index)
        choice = self._choice(event.index, text, first=first)
        if self._shape.chat and not first:
            choice["delta"] = {}
        choice["logprobs"] = None
        choice["finish_reason"] = finish_reason(event)
        choice["stop_reason"] = event.stop
        self._begun[event.index] = True
        return self._chunk([choice])

    def _prompt(self, event: PromptScored) -> bytes:
        """Echo with logprobs: the prompt is a chunk of its own."""
        if not (self._shape.echo and self._shape.logprobs):
            return b""
        choice = self._choice(event.index, self._open(event.index), first=True)
        choice["logprobs"] = self._shape.logprobs_of(event.tokens, 0)
        choice["finish_reason"] = None
        self._begun[event.index] = True
        return self._chunk([choice])

    def _usage(self, event: Usage) -> bytes:
        if not self._shape.usage:
            return b""
        return b'data: %b,"choices":[],"usage":%b}\n\n' % (self._head, encode(usage_object(event)))

    def _open(self, index: int) -> str:
        """What a sequence begins with: the echoed prompt, once."""
        return "" if self._begun[index] else self._shape.echo_text(index)

    def _choice(self, index: int, text: str, *, first: bool) -> dict[str, object]:
        if not self._shape.chat:
            return {"index": index, "text": text}
        delta = {"role": "assistant", "content": text} if first else {"content": text}
        return {"index": index, "delta": delta}

    def _chunk(self, choices: list[dict[str, object]]) -> bytes:
        tail: dict[str, object] = {"choices": choices}
        if self._shape.chat and self._shape.token_ids and not self._prompt_told:
            tail["prompt_token_ids"] = self._shape.prompts[0]
            self._prompt_told = True
        if self._shape.continuous_usage:
            tail["usage"] = self._running_usage()
        return b"data: %b,%b\n\n" % (self._head, encode(tail)[1:])

    def _running_usage(self) -> dict[str, int]:
        prompt_tokens = sum(len(prompt) for prompt in self._shape.prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
        }
