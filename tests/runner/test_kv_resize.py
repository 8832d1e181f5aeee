"""A pool in smaller or larger arrays holds what it held, at the places the moves say."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from headrace.runner.kv.pool import KVPool, LayerShape

SIZE = 4


def filled(bits: int | None, head_major: bool) -> KVPool:
    layers = [LayerShape(0, 2, 32, 32, mx.float32, bits), LayerShape(1, 1, 32, 64, mx.float32, bits)]
    pool = KVPool(layers, [9, 5], SIZE, head_major=head_major)
    key = mx.random.key(3)
    state = []
    for array in pool.state:
        key, own = mx.random.split(key)
        state.append((mx.random.uniform(shape=array.shape, key=own) * 1000).astype(array.dtype))
    pool.state = state
    mx.eval(pool.state)
    return pool


def block(array: mx.array, number: int, head_major: bool) -> np.ndarray:
    span = slice(number * SIZE, (number + 1) * SIZE)
    return np.array(array[:, span] if head_major else array[span])


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("head_major", [True, False])
def test_blocks_are_where_the_moves_say(bits: int | None, head_major: bool) -> None:
    pool = filled(bits, head_major)
    before = [mx.array(array) for array in pool.state]
    moves = ({8: 2, 6: 3}, {})
    pool.resize([5, 7], moves)
    groups = [0, 1, 0, 1] + ([0, 0, 1, 1] * 2 if bits else [])
    assert len(groups) == len(pool.state)
    for old, new, group in zip(before, pool.state, groups, strict=True):
        slots = new.shape[1 if head_major else 0]
        assert slots == [5, 7][group] * SIZE
        if group == 0:
            kept = {0: 0, 1: 1, 4: 4, **moves[0]}
        else:
            kept = {number: number for number in range(5)}
            assert not block(new, 6, head_major).any()
        for source, target in kept.items():
            assert np.array_equal(block(old, source, head_major), block(new, target, head_major))
