"""Tokens that decode steps start from: by the kernel (emulated) and by MLX's operations, for rows in any order."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from emulated_cuda import emulated

from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.forwards.token_feed import TokenFeed, fed_tokens, feed_of

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


def row(seq_id: int, token: int | None) -> ScheduledRow:
    """A decode row; ``token``: what the host knows, None where only the device does."""
    known = () if token is None else (token,)
    return ScheduledRow(seq_id, 5, 1, known, ((1,),), True, 6, 0, GREEDY, 5)


@pytest.mark.parametrize("emulate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_that_stayed_joined_left_and_changed_places(emulate: bool, tmp_path: Path) -> None:
    if emulate and shutil.which("g++") is None:
        pytest.skip("needs g++")
    feed = TokenFeed(emulated(tmp_path) if emulate else None)
    rng = random.Random(3)
    for count in (1, 2, 5, 40):
        sampled = [rng.randrange(1000) for _ in range(rng.randrange(1, 50))]
        newest = mx.array(sampled, mx.int32), {100 + index: index for index in range(len(sampled))}
        expected, rows = [], []
        for _ in range(count):
            place = rng.choice([None, rng.randrange(len(sampled))])
            expected.append(rng.randrange(1000) if place is None else sampled[place])
            rows.append(row(100 + place, None) if place is not None else row(7, expected[-1]))
        padded = count + rng.choice([0, 3])
        ints = feed_of(rows, padded, newest)
        for tokens in (feed(feed.source(newest), ints.array), fed_tokens(rows, padded, newest)):
            assert tokens.shape == (padded,) and tokens.dtype == mx.int32
            assert tokens.tolist() == expected + [0] * (padded - count)


def test_before_any_step_the_host_knows_all() -> None:
    feed = TokenFeed(None)
    rows = [row(1, 11), row(2, 12)]
    assert feed(feed.source(None), feed_of(rows, 4, None).array).tolist() == [11, 12, 0, 0]
    assert fed_tokens(rows, 2, None).tolist() == [11, 12]
    with pytest.raises(AssertionError, match="no step sampled it"):
        feed_of([row(3, None)], 1, None)


def test_all_of_the_newest_in_order_are_taken_as_they_are() -> None:
    newest = mx.array([4, 5, 6], mx.int32), {1: 0, 2: 1, 3: 2}
    assert fed_tokens([row(1, None), row(2, None), row(3, None)], 3, newest) is newest[0]
