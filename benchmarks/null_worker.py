"""A worker that has no model: it speaks the real protocol over the real socket and makes tokens at once.

Started by a gateway in the place of ``headrace.worker.main``, with the seconds between two steps as its argument.
No scheduler, no runner: every step gives one token to every open request, until each has ``max_tokens``. A step
that is late is made at once, so the mean rate is kept as long as this process can.
"""

from __future__ import annotations

import os
import sys
import time

import zmq

from headrace.request import FinishReason, SequenceOutput
from headrace.worker.lifeline import end_with_parent
from headrace.worker.mailbox import HeartbeatThread, Mailbox
from headrace.worker.process import read_start
from headrace.worker.protocol import (
    AbortRequest,
    Accepted,
    AddRequest,
    EngineStats,
    Heartbeat,
    Ready,
    Shutdown,
    StepOutputs,
)

FIRST_TOKEN, NUM_TOKENS = 256, 4096  # of random_checkpoint.py's tokenizers: words of a few letters
MAX_MODEL_LEN = 32768


class Tokens:
    """Open requests, and how many tokens each has had."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, int]] = {}  # id -> made, wanted
        self._made = self._steps = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request_id: str, wanted: int) -> None:
        self._open[request_id] = (0, wanted)

    def drop(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def step(self) -> StepOutputs:
        outputs = []
        for request_id, (made, wanted) in list(self._open.items()):
            token = FIRST_TOKEN + (made * 7 + len(request_id)) % NUM_TOKENS
            finish = FinishReason.LENGTH if made + 1 >= wanted else None
            outputs.append(SequenceOutput(request_id=request_id, token_ids=[token], finish_reason=finish))
            if finish is None:
                self._open[request_id] = (made + 1, wanted)
            else:
                del self._open[request_id]
        self._made += len(outputs)
        self._steps += 1
        return StepOutputs(outputs, self.stats(), time.monotonic())

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._open), blocks_total=1, steps_total=self._steps, generation_tokens_total=self._made
        )


def main(step_s: float) -> int:
    stdin = sys.stdin.fileno()
    start = read_start(stdin)
    end_with_parent(stdin, start.folder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mailbox = Mailbox(context, start.endpoint, start.token)
    heartbeat = HeartbeatThread(context, start.endpoint, start.token)
    heartbeat.start()
    tokens = Tokens()
    mailbox.send(
        Ready(
            pid=os.getpid(), device="none", max_model_len=MAX_MODEL_LEN, block_size=16, num_blocks=1,
            vocab_size=FIRST_TOKEN + NUM_TOKENS, attention="none", plan={},
        )
    )  # fmt: skip
    mailbox.send(Heartbeat(tokens.stats()))
    due_s = 0.0
    while True:
        now_s = time.monotonic()
        # a poll takes whole milliseconds: what is left of the wait is slept below
        wait_s = None if not len(tokens) else max(0.0, due_s - now_s - 1e-3)
        for message in mailbox.receive(wait_s):
            match message:
                case AddRequest(request):
                    tokens.add(request.id, request.params.max_tokens)
                    mailbox.send(Accepted(request.id))
                case AbortRequest(request_id, _):
                    tokens.drop(request_id)
                case Shutdown():
                    return 0
                case _:
                    pass
        now_s = time.monotonic()
        if not len(tokens):
            due_s = 0.0
            continue
        if due_s - now_s > 1e-3:
            continue  # a message came while it waited
        time.sleep(max(0.0, due_s - now_s))
        outputs = tokens.step()
        mailbox.send(outputs)
        heartbeat.stats = outputs.stats
        due_s = max(due_s, now_s - 1.0) + step_s


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
