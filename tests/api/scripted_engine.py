"""An engine in this process that says what the scripted checkpoint would say, without a model.

Knobs are plain attributes: ``paused`` (nothing is generated), ``refusal`` (raised by ``accepted``), ``chunk``
(tokens per output), ``failure`` (finish reason instead of the second token), ``state_now``.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from support import scripted

from headrace.errors import NotReady, RequestError
from headrace.gateway.service import EngineState
from headrace.gateway.streams import SlotStream
from headrace.request import EngineRequest, FinishReason, SequenceOutput, TokenLogprobs
from headrace.worker.protocol import Ready

CONTEXT = 512


class ScriptedEngine:
    """Implements ``headrace.gateway.service.EngineClient``."""

    def __init__(self, context: int = CONTEXT) -> None:
        words = scripted.vocabulary()
        self._ids = words.ids
        self._added = words.added
        self._scripts = {words.added[f"<|{name}|>"]: script for name, script in scripted.SCRIPTS.items()}
        ready = Ready(
            pid=1, device="none", max_model_len=context, block_size=16, num_blocks=64, vocab_size=words.size,
            attention="none", plan={},
        )  # fmt: skip
        self.state_now = EngineState(status="ready", ready=ready)
        self.paused = False
        self.refusal: RequestError | None = None
        self.failure: FinishReason | None = None
        self.chunk = 1
        self.cached_tokens = 0
        self.requests: list[EngineRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.cleared = 0
        self._streams: dict[str, SlotStream] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped: dict[str, set[int]] = {}

    # -- EngineClient

    def submit(self, request: EngineRequest) -> SlotStream:
        if self.state_now.status not in ("ready", "restarting"):
            raise NotReady("the model is still loading", retry_after_s=5.0)
        self.requests.append(request)
        stream = SlotStream(request.id)
        if self.refusal is not None:
            stream.fail(self.refusal)
            return stream
        stream.accept()
        self._streams[request.id] = stream
        self._stopped[request.id] = set()
        self._tasks[request.id] = asyncio.get_running_loop().create_task(self._run(request, stream))
        return stream

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.aborted.append((request_id, index))
        if request_id not in self._streams:
            return
        if index is not None:
            self._stopped[request_id].add(index)
            return
        self._tasks[request_id].cancel()
        self._streams.pop(request_id).discard()

    def state(self) -> EngineState:
        return self.state_now

    def clear_prefix_cache(self) -> None:
        self.cleared += 1

    @property
    def running(self) -> int:
        return len(self._streams)

    def set_status(self, status: str) -> None:
        ready = None if status in ("starting", "failed") else self.state_now.ready
        self.state_now = msgspec.structs.replace(self.state_now, status=status, ready=ready)

    # -- inside

    async def _run(self, request: EngineRequest, stream: SlotStream) -> None:
        stream.put(self._output(request, 0, [], None), time.monotonic())
        while self.paused:
            await asyncio.sleep(0.005)
        answers = [self._answer(request) for _ in range(request.n)]
        stopped = self._stopped[request.id]
        position = 0
        while len(stopped) < request.n:
            await asyncio.sleep(0)
            for index in range(request.n):
                if index not in stopped:
                    self._put(request, stream, index, answers[index], position)
            position += self.chunk
        self._streams.pop(request.id, None)
        stream.end()

    def _put(
        self, request: EngineRequest, stream: SlotStream, index: int, answer: list[int], position: int
    ) -> None:
        token_ids = answer[position : position + self.chunk]
        is_last = position + self.chunk >= len(answer)
        reason: FinishReason | None = None
        if self.failure is not None and position > 0:
            token_ids, reason = [], self.failure
        elif is_last:
            ends = bool(answer) and answer[-1] in request.params.stop_token_ids
            reason = FinishReason.STOP if ends else FinishReason.LENGTH
        if reason is not None:
            self._stopped[request.id].add(index)
        stream.put(self._output(request, index, token_ids, reason, first=position == 0), time.monotonic())

    def _output(
        self,
        request: EngineRequest,
        index: int,
        token_ids: list[int],
        reason: FinishReason | None,
        first: bool = False,
    ) -> SequenceOutput:
        params = request.params
        logprobs = [] if params.logprobs is None else [self._scored(t, params.logprobs) for t in token_ids]
        prompt = None
        if first and params.prompt_logprobs is not None and index == 0:
            rest = [self._scored(t, params.prompt_logprobs) for t in request.prompt_token_ids[1:]]
            prompt = [None, *rest]
        return SequenceOutput(
            request_id=request.id,
            index=index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
            prompt_logprobs=prompt,
            error="the row failed" if reason is FinishReason.ERROR else "",
        )

    def _scored(self, token_id: int, k: int) -> TokenLogprobs:
        others = [other for other in range(65, 65 + k) if other != token_id][: max(0, k - 1)]
        top = [(token_id, -0.25), *((other, -3.0 - other / 10) for other in others)][:k]
        return TokenLogprobs(-0.25, top)

    def _answer(self, request: EngineRequest) -> list[int]:
        """Token ids up to the end token or the length limit."""
        params = request.params
        answer: list[int] = []
        emitted = request.emitted.get(0, [])
        token = [*request.prompt_token_ids, *emitted][-1]
        trigger = next((t for t in reversed(request.prompt_token_ids) if t in self._scripts), None)
        forced = max(params.logit_bias, key=params.logit_bias.__getitem__, default=None)
        while len(emitted) + len(answer) < params.max_tokens:
            if forced is not None and params.logit_bias[forced] >= 100:
                token = forced
            else:
                token = self._next(token, trigger)
            answer.append(token)
            if token in params.stop_token_ids:
                break
        return answer

    def _next(self, token: int, trigger: int | None) -> int:
        if trigger is None:
            return token
        script = self._scripts[trigger]
        ids = [self._ids[piece] for piece in script.pieces]
        if token in (self._added["<|assistant|>"], self._ids[b"\n"]):
            return ids[0]
        if token in ids[:-1]:
            return ids[ids.index(token) + 1]
        if token == ids[-1]:
            return ids[0] if script.loops else self._added["<|im_end|>"]
        return token
