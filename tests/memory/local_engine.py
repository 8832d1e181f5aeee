"""A real model runner under a real scheduler, in this process: for many short requests, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import scripted

from headrace.config import EngineConfig
from headrace.core.scheduler import Scheduler
from headrace.params import SamplingParams
from headrace.request import EngineRequest
from headrace.runner.build import build_runner
from headrace.worker.engine import Engine
from headrace.worker.step_record import StepRecord

WORDS = scripted.vocabulary()
USER, ASSISTANT, TURN_END = (WORDS.added[name] for name in ("<|user|>", "<|assistant|>", "<|im_end|>"))


@dataclass
class Output:
    """What one request got. ``cached_tokens``: None until its first output."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0


class LocalEngine:
    """Submit greedy requests, then ``run`` until all have ended; every step's equations are checked."""

    def __init__(self, folder: Path, record: Path, **config: Any) -> None:
        fields = {"kv_memory_bytes": 96 << 20, "max_num_seqs": 16, **config}
        built = build_runner(EngineConfig(model=str(folder), **fields), lambda stage, fraction: None)
        self.scheduler = Scheduler(built.scheduler_config, built.layout, built.num_blocks)
        self.engine = Engine(self.scheduler, built.runner, StepRecord(str(record)))
        self._count = 0

    def run(self, *prompts: list[int], max_tokens: int = 9, salt: str = "") -> list[Output]:
        """All prompts at once, same salt; outputs in their order."""
        ids = [f"r{self._count + i}" for i in range(len(prompts))]
        self._count += len(prompts)
        found = {request_id: Output() for request_id in ids}
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(TURN_END,))
        for request_id, prompt in zip(ids, prompts, strict=True):
            request = EngineRequest(id=request_id, prompt_token_ids=prompt, params=params, cache_salt=salt)
            assert self.scheduler.add_request(request, time.monotonic()) is None
        while self.engine.has_work:
            message = self.engine.step()
            self.scheduler.check_integrity()
            for output in message.outputs if message is not None else ():
                found[output.request_id].tokens += output.token_ids
                found[output.request_id].cached_tokens += output.cached_tokens
        assert self.scheduler.stats().blocks_held == 0
        return [found[request_id] for request_id in ids]


def expected(script: str, max_tokens: int = 9) -> list[int]:
    """Tokens of a script, its end token included where it fits."""
    tokens = [WORDS.ids[piece] for piece in scripted.expected_pieces(script, max_tokens)]
    return tokens if len(tokens) == max_tokens else [*tokens, TURN_END]


def turn(length: int, trigger_at: int, script: str = "s05", tail: str = "") -> list[int]:
    """``length`` tokens of a user turn, the trigger at ``trigger_at``; then ``tail`` and the answer's start."""
    letters = [ord("abcdefg"[i % 7]) for i in range(length)]
    letters[0] = USER
    letters[trigger_at] = WORDS.added[f"<|{script}|>"]
    return [*letters, *tail.encode(), TURN_END, ASSISTANT]


Build = Callable[..., LocalEngine]
