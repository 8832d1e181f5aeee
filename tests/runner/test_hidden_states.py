"""Hidden states that requests ask for equal those of the model itself, whatever the chunks and the neighbours."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paged_driver import make_runner
from tiny_models import VOCAB, tiny_model

from headrace.core.scheduler import Scheduler, SchedulerConfig
from headrace.params import SamplingParams
from headrace.request import EngineRequest, FinishReason, SequenceOutput
from headrace.runner.model_runner import RunnerOptions

EMBED = SamplingParams(max_tokens=1, temperature=0.0, embed=True)
LENGTHS = (1, 2, 17, 5, 40, 33, 17, 64)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def run(scheduler: Scheduler, runner: object, requests: list[EngineRequest]) -> dict[str, SequenceOutput]:
    """The last output of each request."""
    for request in requests:
        assert scheduler.add_request(request, 0.0) is None
    found: dict[str, SequenceOutput] = {}
    while scheduler.has_work():
        output = scheduler.schedule(0.0)
        if output.is_empty:
            continue
        for answer in scheduler.update(runner.launch(output).result(), 0.0):
            if answer.finish_reason is not None:
                found[answer.request_id] = answer
    return found


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3_text"])
def test_equal_the_models_own(name: str) -> None:
    model = tiny_model(name)
    expected = [np.array(model.model(mx.array([prompt]))[0, -1].astype(mx.float32)) for prompt in prompts()]
    runner, layout = make_runner(
        model, vocab_size=VOCAB, head_major=name == "llama", options=RunnerOptions(compile=False)
    )
    config = SchedulerConfig(max_num_seqs=16, max_model_len=128, prefill_step_size=16)
    scheduler = Scheduler(config, layout, [399] * len(layout.groups))
    embedding = [EngineRequest(id=f"e{i}", prompt_token_ids=p, params=EMBED) for i, p in enumerate(prompts())]
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    chatting = [EngineRequest(id=f"c{i}", prompt_token_ids=p, params=greedy) for i, p in enumerate(prompts()[:3])]
    first = run(scheduler, runner, [*embedding, *chatting])
    second = run(scheduler, runner, embedding)  # every prompt but its last token is in the prefix cache now
    for found in (first, second):
        for index, want in enumerate(expected):
            output = found[f"e{index}"]
            assert output.token_ids == [] and output.finish_reason is FinishReason.LENGTH
            np.testing.assert_allclose(np.frombuffer(output.hidden, "<f4"), want, atol=1e-4, rtol=1e-3)
    assert all(len(first[f"c{i}"].token_ids) <= 6 and first[f"c{i}"].hidden == b"" for i in range(3))
    assert second["e5"].cached_tokens > 0
    assert scheduler.stats().generation_tokens_total == 18
    scheduler.check_integrity()


def test_a_model_without_a_known_head_refuses() -> None:
    model = tiny_model("llama")
    runner, layout = make_runner(model, vocab_size=VOCAB, options=RunnerOptions(compile=False))
    model.lm_head = model.lm_head.inner
    scheduler = Scheduler(SchedulerConfig(max_model_len=128), layout, [399])
    found = run(scheduler, runner, [EngineRequest(id="e", prompt_token_ids=[1, 2], params=EMBED)])
    assert found["e"].finish_reason is FinishReason.ERROR and "embeddings" in found["e"].error
