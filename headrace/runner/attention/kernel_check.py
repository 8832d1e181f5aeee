"""At start on a device: is the decode kernel right here, and is it faster than the reference?

Random pools of the model's own layer shapes, rows of different lengths through shuffled block tables. The
kernel is used when its outputs match the reference's and it takes less time; otherwise the reference is, and the
reason is logged and shown. Kernels only read, so a wrong one harms nothing before it is found.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from headrace.runner.attention.paged_decode import PagedDecodeKernel
from headrace.runner.attention.reference import paged_attention
from headrace.runner.kv_pool import KVPool, LayerShape
from headrace.runner.layer_view import ForwardBatch, GroupBatch, LayerView

# Largest difference of an output of unit scale, by bytes of the dtype.
TOLERANCE = {4: 2e-3, 2: 3e-2}


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel to use, or None for the reference; ``note`` says which and why."""

    kernel: PagedDecodeKernel | None
    note: str


def choose_kernel(layer: LayerShape, heads: int, window: int | None, block_size: int) -> KernelChoice:
    """Check and time the device's kernel on one layer's shape with ``heads`` query heads."""
    if layer.bits is not None:
        return KernelChoice(None, "reference attention: the kernel does not read packed KV")
    try:
        kernel = PagedDecodeKernel.for_device()
        if kernel is None:
            return KernelChoice(None, "reference attention: no kernel for this device")
        lengths = [1, block_size, block_size + 1, 5 * block_size - 3, 900, 33, 700, 1]
        queries, view = random_case(layer, heads, lengths, block_size, window)
        if not kernel.supports(queries, view):
            return KernelChoice(
                None, f"reference attention: head size {layer.key_dim} is not one the kernel takes"
            )
        scale = layer.key_dim**-0.5
        expected = paged_attention(queries, view, scale, window).astype(mx.float32)
        got = kernel(queries, view, scale, window).astype(mx.float32)
        worst = float(np.array(mx.max(mx.abs(expected - got))))
        if not worst <= TOLERANCE.get(layer.dtype.size, 3e-2):
            return KernelChoice(None, f"reference attention: the kernel's outputs differ by {worst:.3g} here")
        own = _seconds(lambda: kernel(queries, view, scale, window))
        reference = _seconds(lambda: paged_attention(queries, view, scale, window))
    except Exception as error:
        # Whatever a compiler or driver says about a kernel, the reference can serve.
        return KernelChoice(None, f"reference attention: the kernel failed: {str(error).splitlines()[0][:160]}")
    if own > reference:
        return KernelChoice(
            None, f"reference attention: faster here ({reference * 1e6:.0f} against {own * 1e6:.0f} us)"
        )
    return KernelChoice(kernel, f"paged decode kernel ({own * 1e6:.0f} us, reference {reference * 1e6:.0f} us)")


def random_case(
    layer: LayerShape,
    heads: int,
    lengths: list[int],
    block_size: int,
    window: int | None,
    *,
    seed: int = 0,
) -> tuple[mx.array, LayerView]:
    """Queries ``[B, heads, 1, D]`` and a view of a random pool whose rows have ``lengths`` positions."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // block_size) for length in lengths]
    shape = LayerShape(0, layer.kv_heads, layer.key_dim, layer.value_dim, layer.dtype)
    pool = KVPool([shape], [sum(counts) + 1], block_size, head_major=False)
    keys = mx.random.split(mx.random.key(seed), 3)
    pool.keys[0] = mx.random.normal(pool.keys[0].shape, layer.dtype, key=keys[0])
    pool.values[0] = mx.random.normal(pool.values[0].shape, layer.dtype, key=keys[1])
    ids = rng.permutation(np.arange(1, sum(counts) + 1)).astype(np.int32)
    tables = np.zeros((len(lengths), max(counts)), np.int32)
    for row, count in enumerate(counts):
        tables[row, :count], ids = ids[:count], ids[count:]
    ends = mx.array(lengths, mx.int32)
    group = GroupBatch(
        window,
        mx.zeros(len(lengths), mx.int32),
        firsts=[0] * len(lengths),
        tables=mx.array(tables),
        bases=mx.zeros(len(lengths), mx.int32),
    )
    batch = ForwardBatch(
        offsets=ends - 1, ends=ends, starts=[n - 1 for n in lengths], lengths=[1] * len(lengths), groups=[group]
    )
    queries = mx.random.normal((len(lengths), heads, 1, layer.key_dim), layer.dtype, key=keys[2])
    return queries, LayerView(pool, 0, batch)


def _seconds(run: Callable[[], mx.array], rounds: int = 5, repeat: int = 20) -> float:
    mx.eval([run() for _ in range(3)])
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval([run() for _ in range(repeat)])
        best = min(best, (time.perf_counter() - start) / repeat)
    return best
