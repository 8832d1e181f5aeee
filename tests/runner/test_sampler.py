"""The sampler against a NumPy reference, row by row; draws against the distribution they must follow."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.sampling import sampler
from headrace.runner.sampling.batch import build_sampling_batch
from headrace.runner.sampling.sampler import CANDIDATES, argmax_in_parts, sample, token_logprobs

VOCAB = 2000


def row(
    params: SamplingParams, *, position: int = 10, history: tuple[int, ...] = (), prompt: int = 4
) -> ScheduledRow:
    return ScheduledRow(
        seq_id=0,
        start=position - 1,
        num_tokens=1,
        token_ids=(1,),
        block_tables=((1,),),
        samples=True,
        sample_position=position,
        seed=params.seed,
        params=params,
        num_prompt_tokens=prompt,
        history=history,
    )


def params(**fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 99, "temperature": 0.0, **fields})  # type: ignore[arg-type]


def logits_of(rows: int, *, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, VOCAB)).astype(np.float32) * spread


def draw(logits: np.ndarray, rows: list[ScheduledRow]) -> list[int]:
    batch = build_sampling_batch(rows, logits.shape[1], CANDIDATES)
    return np.array(sample(mx.array(logits), batch).tokens).tolist()


def kept_by_reference(logits: np.ndarray, p: SamplingParams) -> set[int]:
    """Tokens that survive temperature, then min-p, then top-k, then top-p, by definition."""
    x = logits.astype(np.float64) / p.temperature
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    alive = probs >= p.min_p * probs.max()
    order = np.argsort(-probs, kind="stable")
    if p.top_k > 0:
        allowed = set(order[: p.top_k].tolist())
        alive &= np.array([i in allowed for i in range(len(probs))])
    probs = np.where(alive, probs, 0)
    probs /= probs.sum()
    if p.top_p < 1:
        total, keep = 0.0, set()
        for i in order:
            if probs[i] <= 0 or total >= p.top_p:
                break
            keep.add(int(i))
            total += probs[i]
        return keep
    return {int(i) for i in np.flatnonzero(alive)}


def test_greedy_is_argmax() -> None:
    logits = logits_of(5)
    assert draw(logits, [row(params())] * 5) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1500},
        {"top_p": 0.3},
        {"top_p": 0.99, "temperature": 3.0},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1e-4, "temperature": 2.0},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    ],
)
def test_draws_stay_inside_what_truncation_keeps_and_reach_all_of_it(fields: dict[str, float]) -> None:
    p = params(**{"temperature": 1.0, **fields})
    logits = logits_of(1, seed=3)
    keep = kept_by_reference(logits[0], p)
    many = np.repeat(logits, 400, axis=0)
    drawn = draw(many, [row(params(**{"temperature": 1.0, **fields, "seed": seed})) for seed in range(400)])
    assert set(drawn) <= keep
    if len(keep) <= 4:
        assert set(drawn) == keep


def test_large_vocabulary_falls_back_to_a_full_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CANDIDATES", 8)
    p = params(temperature=1.0, top_p=0.9, seed=5)
    logits = logits_of(3, spread=0.1)
    for drawn, own in zip(draw(logits, [row(p)] * 3), logits, strict=True):
        assert drawn in kept_by_reference(own, p)


def test_draws_follow_the_softmax() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    rows = [row(params(temperature=1.0, seed=7), position=position) for position in range(20000)]
    counts = np.bincount(draw(np.repeat(logits, 20000, axis=0), rows), minlength=4) / 20000
    assert np.abs(counts - [0.5, 0.3, 0.15, 0.05]).max() < 0.015


@pytest.mark.parametrize("key", [15340575, 60266831, 0])
def test_the_largest_and_smallest_noise_are_finite(key: int) -> None:
    """The first two hash to all ones in the top 24 bits, 0 hashes to 0: no banned token is drawn even then."""
    scaled = mx.array([[-mx.inf, 100.0, -mx.inf, 50.0]])
    drawn = sampler.gumbel_argmax(scaled, mx.array([key], mx.uint32), mx.array([0], mx.uint32))
    assert drawn.tolist() == [1]
    first = sampler.gumbel_argmax(scaled, mx.array([key], mx.uint32), mx.array([1], mx.uint32))
    assert first.tolist() == [1]


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = logits_of(6, seed=9)
    mixed = [
        row(params(temperature=1.0, seed=3)),
        row(params()),
        row(params(temperature=0.7, top_p=0.9, seed=4)),
        row(params(temperature=1.3, seed=3), position=11),
        row(params(temperature=1.0, top_k=50, seed=1 << 60)),
        row(params(temperature=1.0, logit_bias={5: 3.0})),
    ]
    together = draw(logits, mixed)
    alone = [draw(logits[i : i + 1], [mixed[i]])[0] for i in range(6)]
    assert together == alone


def test_seed_and_position_change_the_draw() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    draws = {
        draw(logits, [row(params(temperature=1.0, seed=s), position=p)])[0] for s in range(8) for p in range(8)
    }
    assert len(draws) > 50


def test_tiny_temperature_is_greedy() -> None:
    logits = logits_of(3)
    assert draw(logits, [row(params(temperature=1e-5))] * 3) == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("top_p", [1e-320, 1e-46, 1e-40, 1e-20])
def test_tiny_top_p_keeps_the_most_likely_token(top_p: float) -> None:
    logits = logits_of(3)
    fields = ({}, {"top_k": 5}, {"min_p": 0.01})
    rows = [row(params(temperature=2.0, top_p=top_p, seed=7, **more)) for more in fields]
    assert draw(logits, rows) == logits.argmax(axis=1).tolist()


def test_bias_ban_and_allowed_tokens() -> None:
    logits = logits_of(4)
    best = logits.argmax(axis=1)
    rows = [
        row(params(logit_bias={int(best[0]): -100.0})),
        row(params(logit_bias={17: 100.0})),
        row(params(allowed_token_ids=(3, 4))),
        row(params(min_tokens=20, stop_token_ids=(int(best[3]),))),
    ]
    drawn = draw(logits, rows)
    second = np.argsort(-logits, axis=1)[:, 1]
    assert drawn == [second[0], 17, 3 if logits[2, 3] > logits[2, 4] else 4, second[3]]


def test_penalties_match_their_formulas() -> None:
    logits = logits_of(1)[0]
    history = (5, 6, 6, 7, 8, 8, 8)
    p = params(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=20)
    expected = logits.astype(np.float64)
    for token in set(history):
        expected[token] = expected[token] / 1.3 if expected[token] > 0 else expected[token] * 1.3
    for token in set(history[3:]):
        expected[token] -= 0.2 * history[3:].count(token) + 0.4
    batch = build_sampling_batch([row(p, history=history, prompt=3)], VOCAB, CANDIDATES)
    result = sample(mx.array(logits[None]), batch, mx.zeros(1, mx.int32))
    order = np.argsort(-expected)[:20]
    assert np.array(result.top_ids)[0].tolist() == order.tolist()
    total = np.log(np.exp(expected - expected.max()).sum()) + expected.max()
    assert np.allclose(np.array(result.top_logprobs)[0], expected[order] - total, atol=1e-4)


def test_the_newest_token_counts_even_when_only_the_device_knows_it() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    p = params(presence_penalty=1.0, logprobs=1)
    seen = row(p, history=(1, 2, 9), prompt=2)
    unseen = ScheduledRow(
        **{**{f: getattr(seen, f) for f in seen.__struct_fields__}, "token_ids": (), "history": (1, 2)}
    )
    batch = build_sampling_batch([seen, unseen], VOCAB, CANDIDATES)
    result = sample(mx.array(logits), batch, mx.array([9, 9]))
    found = token_logprobs(mx.array(logits), mx.array([9, 9]), 0)[0]
    assert np.array(result.tokens).tolist() == [0, 0]
    adjusted = sampler._edit(batch.edits, mx.array([9, 9]), mx.array(logits))  # type: ignore[arg-type]
    assert np.array(adjusted)[:, 9].tolist() == [-1.0, -1.0]
    assert found.shape == (2,)


def test_not_finite_rows_are_told_apart() -> None:
    logits = logits_of(3)
    logits[1] = np.nan
    batch = build_sampling_batch([row(params())] * 3, VOCAB, CANDIDATES)
    assert np.array(sample(mx.array(logits), batch).finite).tolist() == [True, False, True]


def test_logprobs_are_sorted_distinct_and_first_is_the_choice() -> None:
    logits = logits_of(2)
    logits[1, :50] = 20.0  # many equal: ordered by id
    batch = build_sampling_batch([row(params(logprobs=20))] * 2, VOCAB, CANDIDATES)
    result = sample(mx.array(logits), batch)
    ids = np.array(result.top_ids)
    assert ids[:, 0].tolist() == np.array(result.tokens).tolist()
    assert len(set(ids[1].tolist())) == 20 and ids[1].tolist() == list(range(20))
    assert (np.diff(np.array(result.top_logprobs), axis=1) <= 0).all()


@pytest.mark.parametrize("vocab", [1, 7, 1000, 49152, 32003])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_argmax_in_parts_is_argmax(rows: int, vocab: int) -> None:
    if rows * vocab > 1 << 23:
        pytest.skip("large enough already")
    logits = mx.round(mx.random.normal((rows, vocab), key=mx.random.key(vocab)) * 2)  # many equals
    assert mx.array_equal(argmax_in_parts(logits), mx.argmax(logits, axis=-1))
