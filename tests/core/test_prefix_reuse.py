"""What the prefix cache promises, counted in tokens that the runner computes."""

from __future__ import annotations

import pytest
from fake_runner import Engine, layout, request

from headrace.core.layout import KVLayout
from headrace.core.scheduler import SchedulerConfig


def engine(kv_layout: KVLayout | None = None, num_blocks: tuple[int, ...] = (200,), **fields: object) -> Engine:
    config = SchedulerConfig(max_model_len=500, **fields)  # type: ignore[arg-type]
    return Engine(config, kv_layout or layout(4, None), num_blocks)


def computed_by(eng: Engine, *requests: object) -> int:
    """Tokens the runner computes for these requests, run together to their end."""
    before = eng.runner.computed_tokens
    for new in requests:
        assert eng.add(new) is None  # type: ignore[arg-type]
    eng.run()
    eng.check_outputs()
    return eng.runner.computed_tokens - before


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 23 for i in range(length)]


@pytest.mark.parametrize("windows", [(None,), (None, 5), (6,), (3, 9), (None, None)])
@pytest.mark.parametrize("length", [*range(1, 14), 15, 16, 17, 63, 64, 65])
def test_an_exact_repeat_computes_one_token(length: int, windows: tuple[int | None, ...]) -> None:
    eng = engine(layout(4, *windows), (200,) * len(windows), prefill_step_size=16)
    computed_by(eng, request("a", prompt(length), 1))
    for i in range(3):
        assert computed_by(eng, request(f"b{i}", prompt(length), 1)) == 1
        first = eng.received[f"b{i}", 0].first
        assert first is not None and first.cached_tokens == length - 1


@pytest.mark.parametrize("chunk", [15, 16, 17])
@pytest.mark.parametrize("length", [31, 32, 33, 47, 48, 49])
def test_chunk_edges(length: int, chunk: int) -> None:
    eng = engine(prefill_step_size=chunk)
    assert computed_by(eng, request("a", prompt(length), 1)) == length
    assert computed_by(eng, request("b", prompt(length), 1)) == 1


@pytest.mark.parametrize("shared", [1, 3, 4, 5, 8, 11])
def test_reuse_ends_where_prompts_diverge(shared: int) -> None:
    eng = engine()
    computed_by(eng, request("a", prompt(20), 1))
    other = prompt(20)[:shared] + [22] * 6
    assert prompt(20)[shared] != 22
    assert computed_by(eng, request("b", other, 1)) == 6


@pytest.mark.parametrize(("more", "reused"), [(30, 2), (31, 0), (200, 0)])
def test_few_tokens_of_a_block_are_not_worth_a_copy(more: int, reused: int) -> None:
    """Two tokens in common, of 4 in the block: they spare a sixteenth, or less."""
    eng = engine()
    computed_by(eng, request("a", prompt(20), 1))
    assert prompt(20)[2] != 22
    assert computed_by(eng, request("b", prompt(20)[:2] + [22] * more, 1)) == more + 2 - reused


def test_output_tokens_are_reused_by_the_next_turn() -> None:
    eng = engine()
    computed_by(eng, request("a", prompt(10), 9))
    said = eng.received["a", 0].tokens
    # The last output token was never computed.
    assert computed_by(eng, request("b", [*prompt(10), *said, 1, 2], 1)) == 3


def test_salts_do_not_share() -> None:
    eng = engine()
    computed_by(eng, request("a", prompt(20), 1, cache_salt="x"))
    assert computed_by(eng, request("b", prompt(20), 1, cache_salt="y")) == 20
    assert computed_by(eng, request("c", prompt(20), 1)) == 20
    assert computed_by(eng, request("d", prompt(20), 1, cache_salt="x")) == 1


def test_nothing_is_kept_without_a_prefix_cache() -> None:
    eng = engine(enable_prefix_cache=False)
    computed_by(eng, request("a", prompt(20), 1))
    assert eng.scheduler.stats().blocks_cached == 0
    assert computed_by(eng, request("b", prompt(20), 1)) == 20


def test_idle_blocks_stay_below_the_cap() -> None:
    eng = engine(prefix_cache_max_blocks=5)
    for i in range(10):
        computed_by(eng, request(f"r{i}", prompt(30, first=i), 4))
        assert eng.scheduler.stats().blocks_cached <= 5


def test_clearing_forgets_idle_blocks() -> None:
    eng = engine()
    computed_by(eng, request("a", prompt(20), 1))
    assert eng.scheduler.stats().blocks_cached == 5
    eng.scheduler.clear_prefix_cache()
    eng.scheduler.check_integrity()
    assert eng.scheduler.stats().blocks_cached == 0
    assert computed_by(eng, request("b", prompt(20), 1)) == 20


def test_tails_are_evicted_before_heads() -> None:
    eng = engine(num_blocks=(12,))
    computed_by(eng, request("a", prompt(40), 1))  # 10 blocks
    computed_by(eng, request("b", prompt(16, first=7), 1))  # 4 of 2 free ones: two of a's go
    assert computed_by(eng, request("c", prompt(32), 1)) == 1


def test_a_repeat_leaves_no_second_copy() -> None:
    eng = engine()
    computed_by(eng, request("a", prompt(21), 3))
    cached = eng.scheduler.stats().blocks_cached
    for i in range(5):
        computed_by(eng, request(f"b{i}", prompt(21), 3))
    assert eng.scheduler.stats().blocks_cached == cached


def test_a_running_sequence_shares_its_prompt() -> None:
    eng = engine()
    eng.add(request("long", prompt(41), 60))
    for _ in range(3):
        eng.step()
    held = eng.scheduler.stats().blocks_held
    eng.add(request("same", prompt(41), 1))
    out = eng.step()
    # The block that is being written cannot be found; the ten full ones before it are shared, not copied.
    assert [row.start for row in (*out.decode, *out.prefill)] == [43, 40]
    assert eng.scheduler.stats().blocks_held == held + 1
    assert not out.copies
    eng.run()
    eng.check_outputs()


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    eng = engine(num_blocks=(600,), prefill_step_size=64)
    burst = [request(f"r{i}", [*prompt(160), i, i], 2) for i in range(20)]
    assert computed_by(eng, *burst) <= 160 + 20 * (2 + 1) + 4


def test_prompt_logprobs_are_computed_not_skipped() -> None:
    eng = engine(prefill_step_size=16)
    plain = computed_by(eng, request("a", prompt(40), 3))
    assert computed_by(eng, request("b", prompt(40), 3, prompt_logprobs=0)) == plain
    first = eng.received["b", 0].first
    assert first is not None and first.prompt_logprobs is not None and first.cached_tokens == 0
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == 40 and all(first.prompt_logprobs[1:])
    assert first.token_ids


def test_prompt_logprobs_without_output() -> None:
    eng = engine(prefill_step_size=16)
    for length in (1, 15, 16, 17, 40):
        computed_by(eng, request(f"r{length}", prompt(length), 0, prompt_logprobs=2))
        got = eng.received[f"r{length}", 0]
        assert got.tokens == [] and got.finish == "length"
        assert got.first is not None and got.first.prompt_logprobs is not None
        assert len(got.first.prompt_logprobs) == length


@pytest.mark.parametrize("windows", [(None,), (None, 5), (6,)])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 39, 40, 41])
def test_siblings_compute_one_prompt_token_each(
    length: int, caching: bool, windows: tuple[int | None, ...]
) -> None:
    kv_layout = layout(4, *windows)
    eng = engine(kv_layout, (200,) * len(windows), enable_prefix_cache=caching, prefill_step_size=16)
    computed = computed_by(eng, request("r", prompt(length), 5, n=4, seed=3))
    outputs = [eng.received["r", i].tokens for i in range(4)]
    assert all(len(tokens) == 5 for tokens in outputs)
    assert len({tuple(tokens) for tokens in outputs}) > 1
    assert computed == length + 3 + 4 * 4  # all end by length: nobody runs a step too far


def test_a_stop_token_costs_at_most_one_surplus_step() -> None:
    for seed in range(20):
        eng = engine()
        computed = computed_by(eng, request("r", prompt(9), 30, stop=True, seed=seed))
        got = eng.received["r", 0]
        assert computed - (9 + len(got.tokens) - 1) == (1 if got.finish == "stop" and len(got.tokens) < 30 else 0)
