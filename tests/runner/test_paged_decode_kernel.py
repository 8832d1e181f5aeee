"""The decode kernel against the reference over a grid of shapes; needs a GPU."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from headrace.runner.attention.kernel_check import choose_kernel, random_case
from headrace.runner.attention.paged_decode import PagedDecodeKernel
from headrace.runner.attention.reference import paged_attention
from headrace.runner.kv_pool import LayerShape

pytestmark = pytest.mark.skipif(mx.default_device() != mx.gpu, reason="needs a GPU: MLX computes on the CPU here")

LENGTHS = [1, 2, 31, 32, 33, 64, 127, 128, 129, 300, 1025]


def compare(
    layer: LayerShape, heads: int, lengths: list[int], window: int | None = None, **options: object
) -> None:
    kernel = PagedDecodeKernel.for_device()
    assert kernel is not None
    queries, view = random_case(layer, heads, lengths, 32, window)
    assert kernel.supports(queries, view)
    sinks = options.get("sinks")
    expected = paged_attention(queries, view, layer.key_dim**-0.5, window, sinks).astype(mx.float32)  # type: ignore[arg-type]
    got = kernel(queries, view, layer.key_dim**-0.5, window, sinks).astype(mx.float32)  # type: ignore[arg-type]
    worst = np.abs(np.array(expected) - np.array(got)).max()
    assert worst < (2e-3 if layer.dtype == mx.float32 else 3e-2)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1), (16, 2), (16, 1), (28, 4)])
def test_head_sizes_and_groups(dim: int, heads: int, kv_heads: int) -> None:
    compare(LayerShape(0, kv_heads, dim, dim, mx.bfloat16), heads, LENGTHS)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dtypes(dtype: mx.Dtype) -> None:
    compare(LayerShape(0, 2, 128, 128, dtype), 8, LENGTHS)


@pytest.mark.parametrize("window", [1, 16, 100, 512])
def test_windows(window: int) -> None:
    compare(LayerShape(0, 2, 64, 64, mx.bfloat16), 8, LENGTHS, window)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_rows_and_splits(rows: int) -> None:
    compare(LayerShape(0, 2, 128, 128, mx.bfloat16), 8, [1 + 977 * i % 4096 for i in range(rows)])


def test_long_context_in_many_splits() -> None:
    compare(LayerShape(0, 8, 128, 128, mx.bfloat16), 32, [20000])


def test_sinks() -> None:
    compare(LayerShape(0, 2, 64, 64, mx.bfloat16), 8, LENGTHS, sinks=mx.random.normal((8,)).astype(mx.bfloat16))
    compare(LayerShape(0, 2, 64, 64, mx.bfloat16), 8, [33, 1], sinks=mx.random.normal((8,)).astype(mx.bfloat16))


def test_the_start_up_check_takes_the_kernel() -> None:
    choice = choose_kernel(LayerShape(0, 8, 128, 128, mx.bfloat16), 32, None, 32)
    assert choice.kernel is not None, choice.note
