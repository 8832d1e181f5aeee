"""Models that compute attention themselves: split forwards stay within the plan, and stay right."""

from __future__ import annotations

import gc
import json
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from paged_driver import Driver, make_runner, reference_tokens
from tiny_models import CONFIGS, VOCAB, tiny_model

from headrace.checkpoint.model_folder import describe
from headrace.config import EngineConfig
from headrace.core import context_scratch
from headrace.core.context_scratch import ContextCost
from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.memory_plan import DeviceMemory
from headrace.core.scheduler import Scheduler
from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.request import EngineRequest
from headrace.runner import build as builder
from headrace.runner import estimate as estimate_module
from headrace.runner.build import BuiltRunner, build_runner
from headrace.runner.estimate import estimate
from headrace.runner.forwards.split import ForwardLimit
from headrace.runner.kv.layout import read_layout
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.start.context_cost import computes_own_attention

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
LONG, SEQS, MIB = 2500, 4, 2**20
SCRATCH = 3 * MIB


@pytest.fixture
def checkpoint(tmp_path: Path, scripted_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        weights = dict(nn.utils.tree_flatten(tiny_model(name).parameters()))
        mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
        config = {"model_type": name, "max_position_embeddings": 4096, **CONFIGS[name]}
        (path / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):  # of no matter: prompts are token ids here
            shutil.copy(scripted_folder("plain") / file, path)
        return path

    return write


def build(folder: Path, **fields: object) -> BuiltRunner:
    config = EngineConfig(
        model=str(folder),
        max_num_seqs=SEQS,
        max_model_len=LONG + 50,
        kv_memory_bytes=16 * MIB,
        prefill_step_size=512,
        max_decode_stall_ms=None,
        memory_headroom=0.01,
        **fields,  # type: ignore[arg-type]
    )
    return build_runner(config, lambda stage, fraction: None)


def serve(built: BuiltRunner, prompts: list[list[int]]) -> list[list[int]]:
    scheduler = Scheduler(built.scheduler_config, built.layout, built.num_blocks)
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found[str(index)] = []
        request = EngineRequest(id=str(index), prompt_token_ids=prompt, params=GREEDY)
        assert scheduler.add_request(request, 0.0) is None
    now, before = 0.0, None
    while scheduler.has_work():
        now += 0.01
        output = scheduler.schedule(now)
        launched = None if output.is_empty else built.runner.launch(output)
        if before is not None:
            for said in scheduler.update(before.result(), now):
                found[said.request_id] += said.token_ids
        before = launched
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("single_rows", [True, False])
def test_long_contexts_stay_within_the_plan(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, own_cache: Path, single_rows: bool
) -> None:
    folder = checkpoint("llama")

    def choose(*args: object, wanted: RunnerOptions, **kwargs: object) -> RunnerOptions:
        """As for models of which no part is replaced; they get arrays, which every model takes."""
        return replace(wanted, materialize=True, compile=False, single_rows=single_rows)

    monkeypatch.setattr(builder, "choose_options", choose)
    monkeypatch.setattr(context_scratch, "WISHED_QUERIES", 4)
    monkeypatch.setitem(context_scratch.TARGET_BYTES, "cpu", SCRATCH)
    built = build(folder)
    plan = built.ready_info.plan
    assert "computes its own" in built.ready_info.attention
    assert SCRATCH <= int(plan["attention_scratch_bytes"]) < 2 * SCRATCH
    assert "computes attention itself" in str(plan["notes"])
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(LONG - 300 * index)] for index in range(SEQS)]
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found = serve(built, prompts)
    used = mx.get_peak_memory() - before
    bound = int(plan["attention_scratch_bytes"]) + int(plan["activations_bytes"])
    assert used <= bound, f"{used:,} of {bound:,}"
    assert found == [reference_tokens(tiny_model("llama"), prompt, 6) for prompt in prompts]
    again = build(folder).ready_info.plan
    assert again["attention_scratch_bytes"] == plan["attention_scratch_bytes"], "known from the first start"


def test_who_computes_its_own_is_seen_without_weights() -> None:
    own = {"gemma2": True, "llama": False, "gemma3_text": False}
    for name, expected in own.items():
        model = tiny_model(name)
        assert computes_own_attention(model, read_layout(model, 16)) is expected, name


def test_a_plan_without_weights_counts_it_too(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("llama")
    monkeypatch.setattr(estimate_module, "computes_own_attention", lambda *args: True)
    config = EngineConfig(model=str(folder), max_num_seqs=SEQS, max_model_len=LONG)
    found = estimate(describe(str(folder)), config, DeviceMemory("cpu", 1 << 34, 1 << 34, 1 << 34))
    assert found.own_attention is not None
    # measured on this model: 404 to 545 bytes a position, and 16 to 24 more for each query
    assert 500 <= found.own_attention.cost.context_bytes <= 1000
    assert 20 <= found.own_attention.cost.query_bytes <= 80
    assert found.fixed.scratch == found.own_attention.nbytes == found.own_attention.cost.of(SEQS, 1, LONG)


def test_soft_caps_are_computed_in_place(
    checkpoint: Callable[[str], Path], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = describe(str(checkpoint("gemma2")))
    config = EngineConfig(model=str(files.path), max_num_seqs=SEQS, max_model_len=LONG)
    found = {
        kind: estimate(files, config, DeviceMemory(kind, 1 << 34, 1 << 34, 1 << 34)).own_attention
        for kind in ("cpu", "metal")
    }
    assert found["cpu"] is None and found["metal"] is None
    built = build(files.path)
    assert "computes its own" not in built.ready_info.attention
    prompts = [[5, 3, 1] * 20, [2] * 7]
    assert serve(built, prompts) == [reference_tokens(tiny_model("gemma2"), prompt, 6) for prompt in prompts]


@pytest.mark.parametrize("head_major", [True, False])
def test_split_forwards_give_the_same_tokens(head_major: bool) -> None:
    model = tiny_model("llama")
    rng = random.Random(1)
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in (70, 3, 41, 1, 64, 90)]
    expected = [reference_tokens(model, prompt, 6) for prompt in prompts]
    for nbytes in (1, 40_000, 100_000):  # one token at a time, pieces, pairs of rows
        limit = ForwardLimit(ContextCost(512, 16), nbytes, head_major)
        options = RunnerOptions(compile=False, materialize=True, limit=limit)
        runner, layout = make_runner(model, vocab_size=VOCAB, head_major=head_major, options=options)
        driver = Driver(runner, layout, 400)
        for prompt in prompts:
            driver.add(prompt, GREEDY)
        assert driver.run(64) == expected, nbytes


# -- the split itself ----------------------------------------------------------------------------------

WINDOWED = KVLayout(4, (LayerGroup("sliding_32", 2, 512, 32),))
FULL = KVLayout(4, (LayerGroup("full", 2, 512),))


def row(seq_id: int, start: int, count: int) -> ScheduledRow:
    return ScheduledRow(
        seq_id=seq_id,
        start=start,
        num_tokens=count,
        token_ids=tuple(range(start, start + count)),
        block_tables=(tuple(range(1, 2 + (start + count) // 4)),),
        samples=True,
        sample_position=start + count,
        seed=0,
        params=GREEDY,
        num_prompt_tokens=start + count,
        prompt_targets=tuple(range(start + 1, start + count)),
    )


@pytest.mark.parametrize("layout", [FULL, WINDOWED])
@pytest.mark.parametrize("slices", [True, False])
@pytest.mark.parametrize("nbytes", [1, 30_000, 90_000, 10**9])
def test_parts_cover_everything_once_and_fit(layout: KVLayout, slices: bool, nbytes: int) -> None:
    limit = ForwardLimit(ContextCost(400, 20), nbytes, slices)
    rows = [row(0, 10, 37), row(1, 0, 90), row(2, 200, 5)]
    parts = limit.prefill_parts(rows, layout)
    if nbytes == 10**9:
        assert parts == [rows]
        return
    for whole in rows:
        own = [part for (part,) in parts if part.seq_id == whole.seq_id]
        assert [token for part in own for token in part.token_ids] == list(whole.token_ids)
        assert tuple(target for part in own for target in part.prompt_targets) == whole.prompt_targets
        assert [part.samples for part in own] == [False] * (len(own) - 1) + [True]
        assert all(part.start == part.token_ids[0] and part.num_tokens == len(part.token_ids) for part in own)
    if slices and nbytes == 90_000:
        for (part,) in parts:
            seen = part.start + part.num_tokens
            if layout is WINDOWED:
                seen = min(seen, 32 + part.num_tokens)
            assert part.num_tokens == 1 or limit.cost.of(1, part.num_tokens, seen) <= nbytes
    decodes = [row(index, start, 1) for index, start in enumerate((5, 100, 7, 7, 7, 99))]
    groups = limit.decode_parts(decodes, layout)
    assert [each for group in groups for each in group] == decodes
    assert len(groups) == 6 if nbytes == 1 else len(groups) < 6
