"""Long contexts behind sliding windows: paged logits are those of mlx-lm's own rotating cache.

Blocks that a window left are given away and written again by the same sequence, as a small pool would have it.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import CONFIGS, VOCAB, tiny_model

from headrace.checkpoint.model_folder import describe
from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.attention.dispatch import install
from headrace.runner.forwards.logits_head import HeadSelector, substitute_head
from headrace.runner.kv.layout import read_layout
from headrace.runner.kv.pool import KVPool
from headrace.runner.loading.loader import load_model
from headrace.runner.mlx_lm_adapter import one_sequence_cache
from headrace.runner.model_runner import ModelRunner, RunnerOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

BLOCK, CHUNK, CONTEXT = 16, 1024, 4096  # eight windows
GEMMA_CONTEXT = 1024  # two windows
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
SPREAD = 0.01  # largest difference of a logit, as a share of the logits' spread


class Sequence:
    """One row whose sliding groups have just enough blocks, used in turns."""

    def __init__(
        self, model: Any, selector: HeadSelector, vocab_size: int, tokens: list[int], head_major: bool
    ) -> None:
        found = read_layout(model, BLOCK)
        self.tokens, self.groups = tokens, found.layout.groups
        self.rings = [
            -(-len(tokens) // BLOCK) if group.window is None else (group.window + CHUNK) // BLOCK + 2
            for group in self.groups
        ]
        pool = KVPool(found.layers, [ring + 1 for ring in self.rings], BLOCK, head_major=head_major)
        self.runner = ModelRunner(model, selector, pool, found.layout, vocab_size, RunnerOptions(compile=False))

    def row(self, start: int, end: int) -> ScheduledRow:
        tables = []
        for group, ring in zip(self.groups, self.rings, strict=True):
            gone = 0 if group.window is None else max(0, start - group.window + 1) // BLOCK
            live = range(gone, -(-end // BLOCK))
            tables.append((0,) * gone + tuple(1 + index % ring for index in live))
        return ScheduledRow(
            seq_id=0,
            start=start,
            num_tokens=end - start,
            token_ids=tuple(self.tokens[start:end]),
            block_tables=tuple(tables),
            samples=True,
            sample_position=end,
            seed=0,
            params=PARAMS,
            num_prompt_tokens=end,
        )

    def logits(self, start: int, end: int) -> np.ndarray:
        row = self.row(start, end)
        found = self.runner.decode_logits([row]) if end - start == 1 else self.runner.prefill_logits([row])
        mx.eval(found)
        return np.array(found[0].astype(mx.float32))


def check(model: Any, vocab_size: int, tokens: list[int], prompt: int, head_major: bool) -> None:
    """Logits after the prompt and after each further token, which is given, not sampled."""
    selector, _ = substitute_head(model)  # logits of the last position alone: a vocabulary times 8k is too much
    cache = one_sequence_cache(model)
    steps = [*range(0, prompt, CHUNK), *range(prompt, len(tokens))]
    ends = [*steps[1:], len(tokens)]
    expected = {}
    for start, end in zip(steps, ends, strict=True):
        selector.last_of([end - start], end - start, keep=False)
        logits = model(mx.array([tokens[start:end]]), cache=cache)[0, -1]
        expected[end] = np.array(logits.astype(mx.float32))
    install()
    sequence = Sequence(model, selector, vocab_size, tokens, head_major)
    for start, end in zip(steps, ends, strict=True):
        got, wanted = sequence.logits(start, end), expected[end]
        worst = float(np.abs(got - wanted).max() / (wanted.max() - wanted.min()))
        assert worst < SPREAD, (start, end, worst)


@pytest.mark.parametrize(("window", "head_major"), [(511, True), (512, True), (512, False)])
def test_a_tiny_model_of_gemma3s_form(monkeypatch: pytest.MonkeyPatch, window: int, head_major: bool) -> None:
    shape = {"sliding_window": window, "sliding_window_pattern": 3, "num_hidden_layers": 6}
    monkeypatch.setitem(
        CONFIGS, "gemma3_text", CONFIGS["gemma3_text"] | shape | {"max_position_embeddings": 16384}
    )
    rng = random.Random(window)
    tokens = [rng.randrange(VOCAB) for _ in range(CONTEXT + 24)]
    check(tiny_model("gemma3_text"), VOCAB, tokens, CONTEXT - 5, head_major)


def test_gemma3_270m() -> None:
    path = Path(os.environ.get("HEADRACE_TEST_MODELS", "")) / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        pytest.skip(f"{path.name} is not at hand")
    script = (
        "from headrace.runner.cpu import blas; blas.prepare()\n"  # before MLX is imported, as a worker does
        f"import sys; sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        f"import test_window_edge; test_window_edge.check_gemma3({str(path)!r})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def check_gemma3(path: str) -> None:
    loaded = load_model(describe(path), device="cpu", keep_quantized=False, dtype="float32")
    vocab_size = int(loaded.model(mx.zeros((1, 1), mx.int32)).shape[-1])
    rng = random.Random(2)
    tokens = [2, *(rng.randrange(5000, 40000) for _ in range(GEMMA_CONTEXT + 6))]
    check(loaded.model, vocab_size, tokens, GEMMA_CONTEXT - 2, True)
