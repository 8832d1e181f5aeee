"""Admission, fairness, priorities, limits, cancellation: what one user may notice of the others."""

from __future__ import annotations

import pytest
from fake_runner import Engine, expected_tokens, layout, request

from headrace.core.scheduler import SchedulerConfig
from headrace.core.step import SchedulerOutput
from headrace.request import FinishReason


def engine(blocks: int = 100, block_size: int = 4, **fields: object) -> Engine:
    values = {"max_model_len": 200, **fields}
    return Engine(SchedulerConfig(**values), layout(block_size, None), (blocks,))  # type: ignore[arg-type]


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i * i) % 23 for i in range(length)]


def first_tokens(eng: Engine) -> list[str]:
    """Run to the end; request ids in the order of their first tokens."""
    order: list[str] = []
    while eng.scheduler.has_work():
        eng.step()
        order += [key for (key, _), got in eng.received.items() if got.tokens and key not in order]
    eng.check_outputs()
    return order


# -- limits --------------------------------------------------------------------------------------------


def test_a_prompt_over_the_model_length_is_refused_with_both_numbers() -> None:
    rejection = engine().add(request("r", prompt(201)))
    assert rejection is not None
    assert (rejection.status, rejection.code, rejection.param) == (400, "context_length_exceeded", "prompt")
    assert "201" in rejection.message and "200" in rejection.message


def test_a_prompt_over_the_pool_is_refused_with_both_numbers() -> None:
    rejection = engine(blocks=10).add(request("r", prompt(41)))
    assert rejection is not None and rejection.code == "context_length_exceeded"
    assert "41" in rejection.message and "40" in rejection.message and "--max-cache-blocks" in rejection.message


@pytest.mark.parametrize("length", [198, 199])
def test_output_ends_at_the_model_length(length: int) -> None:
    eng = engine()
    assert eng.add(request("r", prompt(length), 50)) is None
    eng.run()
    got = eng.received["r", 0]
    assert len(got.tokens) == 200 - length and got.finish is FinishReason.LENGTH
    eng.check_outputs()


def test_the_whole_length_leaves_no_room_for_output() -> None:
    eng = engine()
    assert eng.add(request("a", prompt(200), 1)) is not None
    assert eng.add(request("b", prompt(200), 0, prompt_logprobs=1)) is None
    eng.run()


def test_one_sequence_may_fill_the_pool() -> None:
    eng = engine(blocks=10)
    assert eng.add(request("r", prompt(3), 100)) is None
    eng.run()
    assert len(eng.received["r", 0].tokens) == 37


def test_a_full_queue_refuses_with_a_time() -> None:
    eng = engine(max_num_seqs=1, max_queue=4)
    eng.add(request("long", prompt(5), 100))
    eng.step()
    answers = [eng.add(request(f"r{i}", prompt(5), 3)) for i in range(20)]
    refused = [answer for answer in answers if answer is not None]
    assert len(refused) == 16
    assert all(answer.status == 429 and answer.code == "queue_full" for answer in refused)
    assert all(answer.retry_after_s is not None and answer.retry_after_s >= 1 for answer in refused)
    eng.run()
    eng.check_outputs()


def test_a_burst_into_free_seats_is_not_refused() -> None:
    eng = engine(blocks=1000, max_num_seqs=32, max_queue=0)
    assert [eng.add(request(f"r{i}", prompt(5), 3)) for i in range(32)] == [None] * 32
    assert eng.add(request("one more", prompt(5), 3)) is not None
    eng.run()


def test_a_key_that_fills_the_queue_does_not_shut_others_out() -> None:
    eng = engine(max_num_seqs=1, max_queue=8)
    eng.add(request("long", prompt(5), 100, key="heavy"))
    eng.step()
    refused = dict.fromkeys(("heavy", "light", "third"), 0)
    for key in refused:
        for i in range(20):
            refused[key] += eng.add(request(f"{key}{i}", prompt(5), 3, key=key)) is not None
    assert refused == {"heavy": 12, "light": 16, "third": 18}
    eng.run()
    eng.check_outputs()


def test_running_sequences_are_bounded() -> None:
    eng = engine(max_num_seqs=3)
    for i in range(4):
        eng.add(request(f"r{i}", prompt(5, i), 10, n=2))
    while eng.scheduler.has_work():
        eng.step()
        assert eng.scheduler.stats().running <= 3
    eng.check_outputs()


def test_one_request_at_a_time() -> None:
    eng = engine(continuous_batching=False)
    for i in range(4):
        eng.add(request(f"r{i}", prompt(9, i), 5, n=2))
    while eng.scheduler.has_work():
        eng.step()
        assert len(eng.scheduler.running_ids()) <= 1
    eng.check_outputs()


# -- order and fairness --------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    eng = engine(max_num_seqs=2)
    for i in range(6):
        eng.add(request(f"r{i}", prompt(5 + i, i), 6))
    assert first_tokens(eng) == [f"r{i}" for i in range(6)]


def test_smaller_priorities_first() -> None:
    eng = engine(max_num_seqs=1)
    for i, priority in enumerate([5, 0, 5, -1]):
        eng.add(request(f"r{i}", prompt(5, i), 4, priority=priority))
    assert first_tokens(eng) == ["r3", "r1", "r0", "r2"]


def test_a_heavy_key_does_not_push_out_a_light_one() -> None:
    eng = engine(max_num_seqs=2, max_queue=1000)
    for i in range(60):
        eng.add(request(f"heavy{i}", prompt(90, i), 30, key="heavy"))
    for _ in range(20):
        eng.step()
    for i in range(3):
        eng.add(request(f"light{i}", prompt(20, i), 5, key="light"))
    order = first_tokens(eng)
    assert max(order.index(f"light{i}") for i in range(3)) < 20


def test_equal_keys_get_equal_shares() -> None:
    eng = engine(max_num_seqs=4, max_queue=1000)
    for i in range(80):
        eng.add(request(f"a{i}", prompt(30, i), 10, key="a"))
    for i in range(20):
        eng.add(request(f"b{i}", prompt(120, i), 40, key="b"))  # four times the tokens each
    tokens = {"a": 0, "b": 0}
    while eng.received["b19", 0].first is None and eng.received["a79", 0].first is None:
        eng.step()
    for (key, _), got in eng.received.items():
        if got.finish is not None:
            tokens[key[0]] += len(eng.requests[key].prompt_token_ids) + len(got.tokens)
    assert 0.6 < tokens["a"] / tokens["b"] < 1.7
    eng.run()


def test_a_large_prompt_is_not_passed_over_for_ever() -> None:
    """Small requests keep coming; the large one, which needs most of the pool, still gets its turn."""
    eng = engine(blocks=40, max_queue=1000)
    count = 0
    for i in range(400):
        if i == 20:
            eng.add(request("large", prompt(130), 4))
        if eng.scheduler.stats().waiting < 4:
            eng.add(request(f"s{count}", prompt(9, count), 12))
            count += 1
        eng.step()
        if eng.received.get(("large", 0)) and eng.received["large", 0].finish:
            break
    assert eng.received["large", 0].finish is FinishReason.LENGTH
    eng.run()
    eng.check_outputs()


def test_running_out_of_blocks_preempts_the_newest_of_the_lowest_priority() -> None:
    eng = engine(blocks=12, watermark=0.0, enable_prefix_cache=False)
    eng.add(request("low", prompt(8, 1), 30, priority=1))
    eng.add(request("high", prompt(8, 2), 30))
    eng.add(request("higher", prompt(8, 3), 30, priority=-1))
    finished: list[str] = []
    while eng.scheduler.has_work():
        eng.step()
        finished += [key for (key, _), got in eng.received.items() if got.finish and key not in finished]
    assert finished == ["higher", "high", "low"]
    assert eng.scheduler.stats().preemptions_total > 0
    eng.check_outputs()


def test_a_preempted_sequence_resumes_from_its_own_blocks() -> None:
    eng = engine(blocks=22, watermark=0.0)
    eng.add(request("a", prompt(40, 1), 20))
    eng.add(request("b", prompt(40, 2), 20))
    eng.run()
    eng.check_outputs()
    assert eng.scheduler.stats().preemptions_total > 0
    assert eng.runner.computed_tokens < 2 * 59 + 40  # less than computing b's prompt again


# -- chunks and stalls ---------------------------------------------------------------------------------


def prefill_tokens(output: SchedulerOutput) -> list[int]:
    return [row.num_tokens for row in output.prefill]


def test_short_prompts_prefill_together() -> None:
    eng = engine(prefill_step_size=64, max_prefill_rows=4)
    for i in range(6):
        eng.add(request(f"r{i}", prompt(12, i), 2))
    assert prefill_tokens(eng.step()) == [12] * 4
    assert prefill_tokens(eng.step()) == [12] * 2
    eng.run()


def test_padding_counts() -> None:
    eng = engine(prefill_step_size=64)
    eng.add(request("long", prompt(60), 2))
    eng.add(request("short", prompt(3, 5), 2))
    assert prefill_tokens(eng.step()) == [60]  # a second row would compute 60 positions for 3 tokens
    assert prefill_tokens(eng.step()) == [3]
    eng.run()


def test_decodes_go_on_beside_a_long_prompt() -> None:
    eng = engine(prefill_step_size=16)
    eng.add(request("stream", prompt(4), 60))
    eng.step()
    eng.add(request("long", prompt(150, 3), 2))
    while not eng.received["long", 0].finish:
        out = eng.step()
        assert len(out.decode) >= 1
    eng.run()
    eng.check_outputs()


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    eng = engine(prefill_step_size=8)
    eng.add(request("long", prompt(150, 3), 2))
    eng.step()
    eng.add(request("short", prompt(6), 2))
    assert first_tokens(eng) == ["short", "long"]


def stalled(output: SchedulerOutput) -> float:
    """A device on which attention matters: 2 ms per decode forward, 20 µs per prompt token without context."""
    seconds = 0.002 if output.decode else 0.0
    for row in output.prefill:
        seconds += row.num_tokens * 2e-5 * (1 + (row.start + row.num_tokens / 2) / 4000)
    return seconds


def test_stalls_stay_bounded_once_the_device_is_known() -> None:
    eng = Engine(
        SchedulerConfig(max_model_len=20_000, prefill_step_size=2048, max_decode_stall_ms=10.0),
        layout(32, None),
        (1000,),
    )
    eng.runner.cost_s = stalled
    eng.runner.read_context = lambda row: 0  # type: ignore[method-assign]  # long prompts, checked elsewhere
    eng.add(request("stream", prompt(4), 3000))
    for _ in range(20):
        eng.step()
    eng.add(request("long", prompt(12_000, 3), 2))
    durations = []
    sizes = []
    while not eng.received["long", 0].finish:
        out = eng.step()
        durations.append(stalled(out))
        sizes += prefill_tokens(out)
    assert max(durations[5:]) < 0.0125
    assert max(sizes) >= 256  # the bound is used
    assert sizes[-2] < max(sizes) / 2  # chunks shrink as the context grows
    eng.abort("stream")
    eng.run()


def test_without_streams_chunks_are_full_and_shrink_with_context() -> None:
    eng = Engine(SchedulerConfig(max_model_len=50_000, max_decode_stall_ms=1.0), layout(256, None), (200,))
    eng.runner.cost_s = stalled
    eng.runner.read_context = lambda row: 0  # type: ignore[method-assign]
    eng.add(request("long", prompt(40_000), 1))
    sizes = []
    while eng.scheduler.has_work():
        sizes += prefill_tokens(eng.step())
    assert sizes[0] == 2048
    assert sizes[-2] <= 512
    assert sum(sizes) == 40_000


# -- cancellation and faults ---------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(12))
def test_an_abort_frees_everything_in_every_phase(steps: int) -> None:
    eng = engine(prefill_step_size=8, enable_prefix_cache=False)
    eng.add(request("other", prompt(5), 20))
    eng.add(request("r", prompt(30, 4), 50, n=3))
    for _ in range(steps):
        eng.step()
    eng.abort("r")
    assert eng.scheduler.stats().waiting + eng.scheduler.stats().running <= 1
    eng.step()
    assert eng.scheduler.stats().blocks_held <= 7
    eng.run()
    eng.check_outputs()
    assert eng.scheduler.stats().blocks_held == 0


def test_one_sequence_of_a_request_may_be_aborted() -> None:
    eng = engine()
    eng.add(request("r", prompt(10), 20, n=3))
    eng.abort("r", 0)  # the one that was to compute the prompt
    for _ in range(5):
        eng.step()
    eng.abort("r", 2)
    eng.run()
    eng.check_outputs()
    assert eng.received["r", 1].finish is FinishReason.LENGTH


def test_unknown_ids_are_ignored() -> None:
    eng = engine()
    eng.abort("nobody")
    eng.add(request("r", prompt(3), 3))
    eng.abort("r", 7)
    eng.run()
    eng.check_outputs()


def test_a_failed_row_ends_its_sequence_alone() -> None:
    eng = engine()
    eng.add(request("good", prompt(10, 1), 20))
    eng.add(request("bad", prompt(10, 2), 20))
    for _ in range(4):
        eng.step()
    bad = 1
    eng.runner.fail = lambda row: row.seq_id == bad
    eng.run()
    got = eng.received["bad", 0]
    assert got.finish is FinishReason.ERROR and got.error == "non-finite logits"
    assert eng.received["good", 0].finish is FinishReason.LENGTH
    eng.check_outputs()


def test_nothing_of_a_failed_step_is_reused() -> None:
    eng = engine(prefill_step_size=16)
    eng.runner.fail = lambda row: row.start >= 16
    eng.add(request("a", prompt(40), 3))
    eng.run()
    eng.runner.fail = lambda row: False
    eng.add(request("b", prompt(40), 3))
    eng.run()
    first = eng.received["b", 0].first
    assert first is not None and first.cached_tokens == 16
    eng.check_outputs()


def test_a_row_that_fails_once_is_computed_again_alone_and_nobody_notices() -> None:
    eng = engine(prefill_step_size=16)
    eng.add(request("good", prompt(40, 1), 30))
    eng.add(request("bad", prompt(40, 2), 20))
    while len(eng.received["bad", 0].tokens) < 5:
        eng.step()
    bad, at = 1, len(eng.steps)
    eng.runner.fail = lambda row: row.seq_id == bad and len(eng.steps) == at
    eng.run()
    assert [eng.received[name, 0].finish for name in ("good", "bad")] == [FinishReason.LENGTH] * 2
    eng.check_outputs()
    alone = [step for step in eng.steps if step.recomputes]
    rows = [row for step in alone for row in (*step.decode, *step.prefill)]
    assert {row.seq_id for row in rows} == {bad} and len(rows) == len(alone)
    assert rows[0].start == 0, "its own cached blocks were used"
    assert rows[-1].samples
    first, last = eng.steps.index(alone[0]), eng.steps.index(alone[-1])
    assert last - first >= 2 * (len(alone) - 1), "others had no turn"


def test_a_row_that_keeps_failing_is_given_up() -> None:
    eng = engine()
    eng.runner.fail = lambda row: row.seq_id == 1 and row.sample_position >= 18 and not eng.steps[-1].recomputes
    eng.add(request("good", prompt(10, 1), 40))
    eng.add(request("bad", prompt(10, 2), 40))
    eng.run()
    assert eng.received["bad", 0].finish is FinishReason.ERROR
    assert eng.received["good", 0].finish is FinishReason.LENGTH
    eng.check_outputs()


# -- replay --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", range(9))
def test_replay_continues_where_it_stopped(known: int) -> None:
    eng = engine()
    whole, _ = expected_tokens(request("r", prompt(10), 8, n=2), 0, 200)
    other, _ = expected_tokens(request("r", prompt(10), 8, n=2), 1, 200)
    eng.add(request("r", prompt(10), 8, n=2, emitted={0: whole[:known], 1: other[:2]}))
    eng.run()
    eng.check_outputs()


def test_sequences_that_were_done_are_not_run() -> None:
    eng = engine()
    eng.add(request("r", prompt(10), 8, n=3, done=[0, 2]))
    eng.add(request("all", prompt(10), 8, done=[0]))
    eng.run()
    assert list(eng.received) == [("r", 1)]
    eng.check_outputs()


def test_counters() -> None:
    eng = engine()
    eng.add(request("a", prompt(20), 5))
    eng.run()
    eng.add(request("b", prompt(20), 5))
    eng.run()
    stats = eng.scheduler.stats()
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (40, 10)
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (40, 19)
    assert stats.blocks_total == 100 and stats.blocks_held == 0 and stats.blocks_cached > 0
    assert stats.steps_total == len(eng.steps)


def test_two_outstanding_steps_are_a_fault() -> None:
    eng = engine()
    eng.add(request("a", prompt(20), 5))
    eng.scheduler.schedule(0.0)
    eng.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="update"):
        eng.scheduler.schedule(0.0)
