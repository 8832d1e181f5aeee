"""Scheduler and runner together on checkpoints that say known text: pools so small that everything happens.

Thirty-two requests at once share prefixes, repeat prompts, fork, are preempted and cancelled; every token must be
the script's. The same with packed KV.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support import scripted

from headrace.config import EngineConfig
from headrace.core.scheduler import Scheduler
from headrace.core.step import StepResult
from headrace.params import SamplingParams
from headrace.request import EngineRequest
from headrace.runner.build import BuiltRunner, build_runner
from headrace.runner.model_runner import StepHandle

WORDS = scripted.vocabulary()
BY_ID = {token: piece for piece, token in WORDS.ids.items()}
ENDS = (WORDS.added["<|im_end|>"], WORDS.added["<|eos|>"])


def prompt(script: str, before: str, behind: str) -> list[int]:
    return [
        WORDS.added["<|user|>"],
        *before.encode(),
        WORDS.added[f"<|{script}|>"],
        *behind.encode(),
        WORDS.added["<|im_end|>"],
        WORDS.added["<|assistant|>"],
    ]


class Serving:
    """The engine loop, one step ahead of results, with every sequence's tokens."""

    def __init__(self, built: BuiltRunner) -> None:
        self.scheduler = Scheduler(built.scheduler_config, built.layout, built.num_blocks)
        self.runner = built.runner
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: set[tuple[str, int]] = set()
        self.copies = 0
        self._before: StepHandle | None = None
        self._now = 0.0

    def add(self, request: EngineRequest) -> None:
        assert self.scheduler.add_request(request, self._now) is None
        self.tokens |= {(request.id, index): [] for index in range(request.n)}

    def step(self) -> bool:
        self._now += 0.01
        output = self.scheduler.schedule(self._now)
        self.copies += len(output.copies)
        launched = None if output.is_empty else self.runner.launch(output)
        before, self._before = self._before, launched
        if before is not None:
            self._take(before.result())
        self.scheduler.check_integrity()
        return self._before is not None or self.scheduler.has_work()

    def _take(self, result: StepResult) -> None:
        assert not result.failed
        for output in self.scheduler.update(result, self._now):
            self.tokens[output.request_id, output.index] += output.token_ids
            if output.finish_reason is not None:
                self.finished.add((output.request_id, output.index))


def said(tokens: list[int]) -> list[bytes]:
    return [BY_ID[token] for token in tokens if token not in ENDS]


def build(folder: Path, kv_cache_dtype: str, *, blocks: int, prefix_cache: bool = True) -> BuiltRunner:
    config = EngineConfig(
        model=str(folder),
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=32,
        max_model_len=400,
        block_size=8,
        max_cache_blocks=blocks,
        prefill_step_size=96,
        max_queue=64,
        memory_headroom=0.0,
        enable_prefix_cache=prefix_cache,
    )
    return build_runner(config, lambda stage, fraction: None)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "swa64"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_every_text_is_exact(scripted_folder: Callable[[str], Path], variant: str, kv_cache_dtype: str) -> None:
    # So few that requests are preempted; behind a window they need fewer.
    built = build(scripted_folder(variant), kv_cache_dtype, blocks=36 if variant == "swa64" else 48)
    serving = Serving(built)
    rng = random.Random(7)
    # Behind a trigger there is little enough that a window of 64 sees it until the text ends.
    prefixes = ["", "x" * 30, "shared by several prompts, " * 4]
    scripts: dict[str, tuple[str, int]] = {}
    cancelled: set[str] = set()
    for number in range(32):
        script = rng.choice(["s00", "s01", "s01", "s01", "s02", "s07"])
        count = rng.choice([1, 12, 36, 36 if variant == "swa64" else 120])
        request = EngineRequest(
            id=f"r{number}",
            prompt_token_ids=prompt(script, rng.choice(prefixes), "y" * rng.choice([0, 3, 8, 21])),
            params=SamplingParams(max_tokens=count, temperature=0.0, stop_token_ids=ENDS),
            n=rng.choice([1, 1, 2]),
        )
        serving.add(request)
        scripts[request.id] = script, count
    steps = 0
    while serving.step():
        steps += 1
        if steps in (3, 9, 20):
            victim = rng.choice(sorted(set(scripts) - cancelled))
            serving.scheduler.abort(victim)
            cancelled.add(victim)
        assert steps < 2000
    for (name, index), tokens in serving.tokens.items():
        script, count = scripts[name]
        expected = scripted.expected_pieces(script, count)
        if name in cancelled:
            expected = expected[: len(said(tokens))]
        else:
            assert (name, index) in serving.finished
        assert said(tokens) == expected, (name, index)
    stats = serving.scheduler.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_hits_total > 0
    assert serving.copies > 0
    assert stats.blocks_held == 0


class Crowd:
    """Always 32 requests open: who ends or is cancelled is followed by the next one."""

    OPEN = 32

    def __init__(self, serving: Serving, variant: str, rng: random.Random) -> None:
        self.serving, self.rng = serving, rng
        # Outputs of the windowed model are short; it takes more of them until as many have been preempted.
        self.longest, self.all = (36, 256) if variant == "swa64" else (90, 128)
        self.scripts: dict[str, tuple[str, int]] = {}
        self.outputs: dict[str, int] = {}
        self.cancelled: dict[str, int] = {}  # with how many tokens
        self.most_open = 0

    def is_open(self, name: str) -> bool:
        ended = sum((name, index) in self.serving.finished for index in range(self.outputs[name]))
        return name not in self.cancelled and ended < self.outputs[name]

    def refill(self) -> None:
        still = [name for name in self.scripts if self.is_open(name)]
        while len(still) < self.OPEN and len(self.scripts) < self.all:
            still.append(self.add(f"r{len(self.scripts)}"))
        self.most_open = max(self.most_open, len(still))
        if still and self.rng.random() < 0.06:
            name = self.rng.choice(still)
            self.serving.scheduler.abort(name)
            self.cancelled[name] = sum(len(self.serving.tokens[name, i]) for i in range(self.outputs[name]))

    def add(self, name: str) -> str:
        script = self.rng.choice(["s00", "s01", "s01", "s01", "s02"])
        count, self.outputs[name] = self.rng.randint(1, self.longest), self.rng.choice([1, 1, 2, 3])
        before = self.rng.choice(["", "x" * 23, "x" * 24, "x" * 25, "many begin like this; "])
        request = EngineRequest(
            id=name,
            prompt_token_ids=prompt(script, before, "y" * self.rng.choice([0, 1, 6, 7, 8])),
            params=SamplingParams(max_tokens=count, temperature=0.0, stop_token_ids=ENDS),
            n=self.outputs[name],
        )
        self.serving.add(request)
        self.scripts[name] = script, count
        return name

    def check(self) -> None:
        for (name, index), tokens in self.serving.tokens.items():
            script, count = self.scripts[name]
            expected = scripted.expected_pieces(script, count)
            if name in self.cancelled:
                expected = expected[: len(said(tokens))]
            else:
                assert (name, index) in self.serving.finished
            assert said(tokens) == expected, (name, index)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kv_cache_dtype", "variant", "prefix_cache"),
    [  # every pair of choices once
        ("auto", "plain", True),
        ("auto", "swa64", False),
        ("int8", "plain", False),
        ("int8", "swa64", True),
        ("int4", "plain", True),
        ("int4", "swa64", False),
    ],
)
def test_thirty_two_are_open_while_everything_is_preempted(
    scripted_folder: Callable[[str], Path], variant: str, kv_cache_dtype: str, prefix_cache: bool
) -> None:
    built = build(scripted_folder(variant), kv_cache_dtype, blocks=44, prefix_cache=prefix_cache)
    serving = Serving(built)
    crowd = Crowd(serving, variant, random.Random(f"{variant} {kv_cache_dtype} {prefix_cache}"))
    crowd.refill()
    while serving.step():
        crowd.refill()
    crowd.check()
    stats = serving.scheduler.stats()
    assert crowd.most_open == Crowd.OPEN and len(crowd.scripts) == crowd.all
    assert stats.preemptions_total >= Crowd.OPEN, "all the time, not once"
    assert len(crowd.cancelled) >= 5 and max(crowd.cancelled.values()) > 0 == min(crowd.cancelled.values())
    # Without a prefix cache nothing but the further outputs of a request makes copies.
    assert serving.copies > 10
    assert stats.blocks_held == 0 and (prefix_cache or stats.blocks_cached == 0)


@pytest.mark.slow
def test_the_plan_shows_packed_kv(scripted_folder: Callable[[str], Path]) -> None:
    found = {
        dtype: build(scripted_folder("plain"), dtype, blocks=40).ready_info.plan
        for dtype in ("auto", "int8", "int4")
    }
    elements = 2 * 10 * 64  # K and V of ten heads of 64 in one layer
    assert [found[dtype]["kv_bytes_per_token"] for dtype in found] == [4 * elements, 1360, 720]
    assert found["int8"]["kv_bytes_per_token"] <= 0.6 * 2 * elements
    assert found["int4"]["kv_bytes_per_token"] <= 0.4 * 2 * elements
    assert found["auto"]["attention_scratch_bytes"] > 0
