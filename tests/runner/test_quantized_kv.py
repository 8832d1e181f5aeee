"""Packed KV in whole models: logits stay near mlx-lm's own exact ones; what layouts count; refusals."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paged_driver import Driver, make_runner
from tiny_models import CONFIGS, VOCAB, tiny_model

from headrace.errors import StartupError
from headrace.params import SamplingParams
from headrace.runner.kv.layout import read_layout
from headrace.runner.kv.pool import KVPool
from headrace.runner.mlx_lm_adapter import one_sequence_cache
from headrace.runner.model_runner import RunnerOptions

PARAMS = SamplingParams(max_tokens=6, temperature=0.0)
# Largest difference of a logit, as a share of the logits' spread.
NEAR = {"auto": 1e-4, "int8": 0.03, "int4": 0.35}


def logits_of(name: str, dtype: str, *, head_major: bool, options: RunnerOptions) -> float:
    """Two rows, teacher-forced: the worst difference from mlx-lm's own cache."""
    rng = random.Random(3)
    tokens = [[rng.randrange(VOCAB) for _ in range(count)] for count in (31, 22)]
    model = tiny_model(name)
    expected = []
    for row in tokens:
        cache = one_sequence_cache(model)
        prompt = row[:-6]
        logits = [model(mx.array([prompt]), cache=cache)[0, -1]]
        logits += [model(mx.array([[token]]), cache=cache)[0, -1] for token in row[-6:]]
        expected.append(np.array(mx.stack(logits)))
    runner, layout = make_runner(
        model, vocab_size=VOCAB, head_major=head_major, options=options, kv_cache_dtype=dtype
    )
    driver = Driver(runner, layout, 400)
    rows = [driver.add(row[:-6], PARAMS) for row in tokens]
    for row, known in zip(rows, tokens, strict=True):
        row.output.extend(known[-6:])
    found: list[list[np.ndarray]] = [[], []]
    for index, row in enumerate(rows):  # two chunks
        for count in (7, len(row.prompt) - 7):
            logits = runner.prefill_logits([driver.row(row, count)])
            mx.eval(logits)
            row.computed += count
        found[index].append(np.array(logits[0]))
    for _ in range(6):
        logits = runner.decode_logits([driver.row(row, 1) for row in rows])
        mx.eval(logits)
        for index, row in enumerate(rows):
            row.computed += 1
            found[index].append(np.array(logits[index]))
    return max(
        float(np.abs(np.stack(got) - want).max() / (want.max() - want.min()))
        for got, want in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("head_major", [True, False])
def test_logits_are_near_the_exact_ones(name: str, dtype: str, head_major: bool) -> None:
    options = RunnerOptions(compile=False)
    assert logits_of(name, dtype, head_major=head_major, options=options) < NEAR[dtype]


def test_logits_of_a_compiled_decode() -> None:
    assert logits_of("llama", "int8", head_major=False, options=RunnerOptions(compile=True)) < NEAR["int8"]


@pytest.mark.parametrize("head_major", [True, False])
def test_logits_of_materialized_attention(head_major: bool) -> None:
    options = RunnerOptions(compile=False, materialize=True, single_rows=True)
    assert logits_of("gemma2", "int8", head_major=head_major, options=options) < NEAR["int8"]


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96])
def test_head_sizes_that_no_group_divides(monkeypatch: pytest.MonkeyPatch, head_dim: int) -> None:
    monkeypatch.setitem(CONFIGS, "odd", CONFIGS["qwen3"] | {"model_type": "qwen3", "head_dim": head_dim})
    for head_major in (True, False):
        assert logits_of("odd", "int8", head_major=head_major, options=RunnerOptions(compile=False)) < NEAR["int8"]


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_layout_counts_what_is_allocated(name: str, dtype: str) -> None:
    found = read_layout(tiny_model(name), 4, dtype)
    blocks = [5 + 3 * index for index in range(len(found.layout.groups))]
    pool = KVPool(found.layers, blocks, 4, head_major=True)
    assert pool.nbytes == sum(count * found.layout.block_bytes(index) for index, count in enumerate(blocks))
    assert found.unpacked() == read_layout(tiny_model(name), 4)


def test_heads_that_packing_makes_larger_are_refused_by_name() -> None:
    model = tiny_model("llama")  # heads of 16 elements: padded to a group of 32
    model.set_dtype(mx.float16)
    with pytest.raises(StartupError, match=r"int8 saves nothing: layer 0 has heads of 16 .* 128 .* 144"):
        read_layout(model, 4, "int8")
