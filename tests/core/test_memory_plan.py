from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.config import EngineConfig
from headrace.core.kv_cache_manager import KVCacheManager
from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.memory_plan import DeviceMemory, FixedMemory, plan_memory
from headrace.errors import StartupError

GIB = 2**30
FULL = KVLayout(16, (LayerGroup("full", 16, 65536),))
MIXED = KVLayout(16, (LayerGroup("full", 3, 6144), LayerGroup("sliding_512", 15, 30720, 512)))
CPU = DeviceMemory("cpu", 32 * GIB, 32 * GIB, 30 * GIB)
METAL = DeviceMemory("metal", 32 * GIB, 28 * GIB, 30 * GIB)
CONFIG = EngineConfig(model="m")


def test_budget_is_the_lower_of_working_set_and_free_memory() -> None:
    fixed = FixedMemory(4 * GIB, GIB, 0, GIB)
    by_free = plan_memory(FULL, CPU, fixed, CONFIG, 8192)
    assert by_free.budget_bytes == 30 * GIB - int(32 * GIB * 0.2)
    by_set = plan_memory(FULL, DeviceMemory("metal", 32 * GIB, 20 * GIB, 31 * GIB), fixed, CONFIG, 8192)
    assert by_set.budget_bytes == 18 * GIB
    cuda = plan_memory(FULL, DeviceMemory("cuda", 32 * GIB, 32 * GIB, 31 * GIB), fixed, CONFIG, 8192)
    assert cuda.budget_bytes == int(32 * GIB * 0.9)


def test_the_pool_is_all_that_is_left_and_no_more() -> None:
    plan = plan_memory(FULL, METAL, FixedMemory(4 * GIB, GIB, 0, GIB), CONFIG, 8192)
    left = plan.budget_bytes - 6 * GIB
    assert left - FULL.block_bytes(0) < plan.pool_bytes <= left
    rows = dict(plan.rows())
    assert sum(size for name, size in rows.items() if name != "budget") == rows["budget"]
    assert plan.max_model_len == 8192 and not plan.notes
    assert plan.sequences_at(8192) == plan.num_blocks[0] // 512
    assert plan.sequences_at(8193) == 0
    assert plan.numbers()["blocks_full"] == plan.num_blocks[0]


def test_a_length_that_does_not_fit_is_lowered_and_said_so() -> None:
    config = replace(CONFIG, kv_memory_bytes=101 * 16 * 65536)
    plan = plan_memory(FULL, CPU, FixedMemory(GIB), config, 131072)
    assert plan.num_blocks == (100,)
    assert plan.max_model_len == 1600
    assert "131072" in plan.notes[0] and "1600" in plan.notes[0]


def test_exactly_the_blocks_that_were_asked_for() -> None:
    plan = plan_memory(FULL, CPU, FixedMemory(GIB), replace(CONFIG, max_cache_blocks=7), 8192)
    assert plan.num_blocks == (7,)
    assert plan.max_model_len == 112


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (replace(CONFIG, max_cache_blocks=10**6), "--max-cache-blocks"),
        (replace(CONFIG, kv_memory_bytes=64 * GIB), "--kv-memory-mb"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_numbers(config: EngineConfig, flag: str) -> None:
    with pytest.raises(StartupError, match=flag) as caught:
        plan_memory(FULL, CPU, FixedMemory(GIB), config, 8192)
    assert "weights 1,024 MiB" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_too_little_for_a_short_sequence_is_refused_with_numbers() -> None:
    with pytest.raises(StartupError, match="256 tokens needs 16 MiB"):
        plan_memory(FULL, CPU, FixedMemory(int(23.59 * GIB)), CONFIG, 8192)
    with pytest.raises(StartupError, match="0 MiB are left"):
        plan_memory(FULL, CPU, FixedMemory(40 * GIB), CONFIG, 8192)


def test_prefix_cache_cap_in_share_and_bytes() -> None:
    plan = plan_memory(FULL, CPU, FixedMemory(GIB), replace(CONFIG, max_cache_blocks=100), 512)
    assert plan.prefix_cache_blocks == (20,)
    config = replace(CONFIG, max_cache_blocks=100, prefix_cache_bytes=10 * 16 * 65536)
    assert plan_memory(FULL, CPU, FixedMemory(GIB), config, 512).prefix_cache_blocks == (9,)
    config = replace(CONFIG, max_cache_blocks=100, enable_prefix_cache=False)
    assert plan_memory(FULL, CPU, FixedMemory(GIB), config, 512).prefix_cache_blocks == (0,)


def test_sliding_groups_leave_the_rest_to_full_ones() -> None:
    plan = plan_memory(MIXED, CPU, FixedMemory(GIB), replace(CONFIG, max_num_seqs=4), 32768)
    full, sliding = plan.num_blocks
    assert sliding == 4 * 33 + 6 * 128
    assert full == 2 * 4 * 2048  # enough for everybody, twice
    assert plan.sequences_at(32768) == 4


@given(
    st.integers(1, 64),
    st.integers(1, 4096),
    st.integers(64, 2048),
    st.integers(1, 2**31),
    st.sampled_from([1, 16, 32]),
)
def test_a_plan_never_exceeds_its_bytes_and_holds_its_length(
    seqs: int, window: int, chunk: int, pool: int, block_size: int
) -> None:
    layout = KVLayout(block_size, (LayerGroup("full", 3, 600), LayerGroup("sliding", 9, 1800, window)))
    config = replace(CONFIG, max_num_seqs=seqs, prefill_step_size=chunk, kv_memory_bytes=pool)
    try:
        plan = plan_memory(layout, CPU, FixedMemory(0), config, 4096)
    except StartupError:
        assert pool < (256 + 2 * block_size) * 2400 * 2
        return
    assert plan.pool_bytes <= pool
    held = KVCacheManager(layout, plan.num_blocks, True, (None, None)).max_tokens
    assert held is not None and plan.max_model_len <= held
    assert plan.sequences_at(plan.max_model_len) >= 1


def test_a_replacement_takes_what_is_left_rather_than_nothing() -> None:
    """Another program took memory since the first start."""
    layout = KVLayout(16, (LayerGroup("full", 4, 1024),))
    device = DeviceMemory("cpu", total=8 << 30, working_set=8 << 30, free=3 << 30)
    fixed = FixedMemory(weights=1 << 30)
    asked = {"memory_headroom": 0.25, "kv_memory_bytes": 2 << 30}
    with pytest.raises(StartupError, match="--kv-memory-mb"):
        plan_memory(layout, device, fixed, EngineConfig(model="m", **asked), 4096)
    plan = plan_memory(layout, device, fixed, EngineConfig(model="m", replaces=True, **asked), 4096)
    assert 0.9 * (1 << 30) < plan.pool_bytes <= 1 << 30
    assert plan.max_model_len == 4096
    blocks = EngineConfig(model="m", replaces=True, memory_headroom=0.25, max_cache_blocks=100_000)
    assert plan_memory(layout, device, fixed, blocks, 4096).pool_bytes <= 1 << 30
