"""Strips of narrow weights: every byte where ``native/cpu_products.h`` says, however weights come."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from headrace.runner.cpu.narrow_weights import STRIP, NarrowProducts

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="weights of the CPU")

# Less than a strip, whole ones, and one that is begun; more and less than what is turned at a time.
SHAPES = [(5, 128), (32, 128), (41, 384), (150, 1152)]
FORMS = [(16, 1, mx.float16), (16, 1, mx.bfloat16)] + [
    (bits, group, scale)
    for bits in (4, 8)
    for group in (32, 64, 128)
    for scale in (mx.float16, mx.bfloat16, mx.float32)
]


def weights_of(bits: int, group: int, scale: mx.Dtype, *shape: int) -> list[mx.array]:
    """Random weights as a checkpoint has them: one array, or words, scales and biases."""
    values = mx.random.normal(shape, key=mx.random.key(shape[-1]))
    if bits == 16:
        return [values.astype(scale)]
    words, scales, biases = mx.quantize(values, group_size=group, bits=bits)
    return [words, scales.astype(scale), biases.astype(scale)]


def in_bytes(array: mx.array) -> np.ndarray:
    """``[outputs, n]`` of any dtype -> uint8 ``[outputs, n, bytes]``."""
    return np.array(mx.contiguous(array).view(mx.uint8)).reshape(*array.shape, array.itemsize)


def expected(parts: list[mx.array], group: int) -> np.ndarray:
    """Strips of one matrix, each output's values put where they belong."""
    outputs = parts[0].shape[0]
    groups = parts[1].shape[1] if len(parts) > 1 else parts[0].shape[1]
    strips = []
    for first in range(0, outputs, STRIP):
        streams = []
        for part in parts:
            rows = in_bytes(part[first : first + STRIP])
            rows = np.pad(rows, [(0, STRIP - len(rows)), (0, 0), (0, 0)])
            # [16, n, bytes] -> [groups, n / groups, 16, bytes]
            streams.append(
                rows.reshape(STRIP, groups, -1, rows.shape[2]).transpose(1, 2, 0, 3).reshape(groups, -1)
            )
        strips.append(np.concatenate(streams, axis=1).reshape(-1))
    return np.stack(strips)


def laid_out(products: NarrowProducts, parts: list[mx.array], bits: int) -> mx.array:
    stacked = parts[0].ndim == 3
    if bits == 16:
        return (products.plain_stack if stacked else products.plain)(parts[0]).strips
    return (products.packed_stack if stacked else products.packed)(*parts, bits).strips


@pytest.mark.parametrize(("bits", "group", "scale"), FORMS)
def test_every_byte_is_in_its_place(products: NarrowProducts, bits: int, group: int, scale: mx.Dtype) -> None:
    for outputs, inputs in SHAPES:
        parts = weights_of(bits, group, scale, outputs, inputs)
        assert np.array_equal(np.array(laid_out(products, parts, bits)), expected(parts, group))
        parts = weights_of(bits, group, scale, 3, outputs, inputs)
        each = np.stack([expected([part[i] for part in parts], group) for i in range(3)])
        assert np.array_equal(np.array(laid_out(products, parts, bits)), each)


def test_weights_that_do_not_lie_in_one_piece(products: NarrowProducts) -> None:
    weight = weights_of(16, 1, mx.bfloat16, 6, 40, 33)[0]
    some = weight[::2]
    one_by_one = mx.stack([products.plain(weight[i]).strips for i in (0, 2, 4)])
    assert mx.array_equal(products.plain_stack(some).strips, one_by_one).item()
    turned = mx.contiguous(weight[0].T).T
    assert mx.array_equal(products.plain(turned).strips, one_by_one[0]).item()


def test_inputs_that_are_no_multiple_of_anything(products: NarrowProducts) -> None:
    parts = weights_of(16, 1, mx.float16, 19, 77)
    assert np.array_equal(np.array(products.plain(parts[0]).strips), expected(parts, 1))


@pytest.mark.parametrize("shape", [(41, 128), (3, 41, 128)])
def test_two_matrices_in_turns(products: NarrowProducts, shape: tuple[int, ...]) -> None:
    gate, up = (mx.random.normal(shape, key=mx.random.key(seed)).astype(mx.bfloat16) for seed in (1, 2))
    if len(shape) == 2:
        both = products.interleaved(products.plain(gate), products.plain(up))
        assert both is not None
        strips = products.plain(gate).strips, products.plain(up).strips
    else:
        both = products.interleaved_stacks(products.plain_stack(gate), products.plain_stack(up))
        strips = products.plain_stack(gate).strips, products.plain_stack(up).strips
    assert both.form.outputs == 82
    assert mx.array_equal(both.strips[..., 0::2, :], strips[0]).item()
    assert mx.array_equal(both.strips[..., 1::2, :], strips[1]).item()


def test_weights_of_another_size_are_refused(products: NarrowProducts) -> None:
    words, scales, biases = weights_of(4, 32, mx.float16, 32, 128)
    with pytest.raises(ValueError, match="form's size"):
        products.packed(words, scales, biases[:, :2], 4)
    with pytest.raises(ValueError, match="form's size"):
        products.packed(words[:16], scales, biases, 4)
    with pytest.raises(ValueError, match="one form"):
        products.interleaved_stacks(
            products.packed_stack(words[None], scales[None], biases[None], 4),
            products.packed_stack(words[None, :16], scales[None, :16], biases[None, :16], 4),
        )
