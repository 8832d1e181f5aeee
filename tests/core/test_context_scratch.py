"""Scratch of models that compute attention themselves: as much as is wished for, never more than a share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import EngineConfig
from headrace.core.context_scratch import LARGEST_SHARE, TARGET_BYTES, ContextCost, plan_context_scratch
from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.memory_plan import DeviceMemory, FixedMemory, own_attention_scratch, plan_memory
from headrace.errors import StartupError

MIB = 2**20
COST = ContextCost(8192, 64)
LAYOUT = KVLayout(16, (LayerGroup("full", 4, 4096),))


@given(st.integers(1, 1 << 20), st.integers(1, 4096), st.integers(1, 256), st.integers(1, 1 << 17), st.integers(0))
def test_what_holds_for_any_model(context: int, query: int, seqs: int, max_len: int, room: int) -> None:
    cost = ContextCost(context, query)
    found = plan_context_scratch(cost, "cpu", seqs, max_len, room)
    assert found.nbytes <= room * LARGEST_SHARE
    assert found.max_len <= max_len
    assert cost.of(1, 1, found.max_len) <= found.nbytes
    if found.max_len < max_len:
        assert cost.of(1, 1, found.max_len + 1) > found.nbytes, "no shorter than it must be"
    if found.nbytes > max(TARGET_BYTES["cpu"], cost.of(1, 16, max_len)):
        raise AssertionError("more than anybody asked for")


def device(free: int) -> DeviceMemory:
    return DeviceMemory("cpu", 4 * free, 4 * free, free)


def test_few_short_sequences_need_little() -> None:
    found = plan_context_scratch(COST, "cpu", 4, 1000, 64 << 30)
    assert found.nbytes == COST.of(4, 1, 1000)
    assert plan_context_scratch(COST, "cpu", 256, 8192, 64 << 30).nbytes == TARGET_BYTES["cpu"]


def test_the_plan_lowers_the_length_and_says_why() -> None:
    config = EngineConfig(model="m", memory_headroom=0.0, max_num_seqs=8)
    fixed = FixedMemory(weights=MIB)
    own = own_attention_scratch(COST, device(81 * MIB), fixed, config, 8192)
    plan = plan_memory(LAYOUT, device(81 * MIB), FixedMemory(MIB, scratch=own.nbytes), config, 8192, own)
    assert own.nbytes == 20 * MIB
    assert plan.max_model_len == own.max_len == 20 * MIB // 8256
    assert dict(plan.rows())["attention scratch"] == own.nbytes
    lowered = next(note for note in plan.notes if "lowered" in note)
    assert "from 8192 to 2540 tokens" in lowered and "20 MiB" in lowered and "--memory-headroom" in lowered
    assert any("1 of 8 sequences" in note and "--max-num-seqs" in note for note in plan.notes)


def test_too_little_for_a_short_sequence_is_refused() -> None:
    config = EngineConfig(model="m", memory_headroom=0.0)
    own = own_attention_scratch(COST, device(8 * MIB), FixedMemory(MIB), config, 8192)
    with pytest.raises(StartupError, match=r"computes attention itself, 8,256 bytes a token .* 222 tokens"):
        plan_memory(LAYOUT, device(8 * MIB), FixedMemory(MIB, scratch=own.nbytes), config, 8192, own)
