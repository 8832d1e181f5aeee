"""In-place writes into pool arrays, by a kernel of our own that stores into its *inputs*.

A functional scatter is in place only while nothing else refers to the pool, so a step could be started no earlier
than the one before had been read. This kernel lifts that: the pools never change identity, and steps may queue.

MLX orders operations by the arrays they exchange, and a write into an input exchanges none. So every write returns
a *mark*, some int32 zeros: whoever must come after the write takes the mark as an input. Writes of one
layer form a chain through its mark; readers take the newest (kernels as an unused input, MLX's own gathers through
block tables to which the mark is added). What a write must not overtake is ordered otherwise: a slot is written
again only by a later step, behind the tokens or the marks of the earlier ones (docs/kv-cache.md).

On a GPU the kernel has CUDA and Metal forms of one source; the Metal form has not been run on Metal. On the CPU it
is a native operation (``cpu/operations.py``), which needs no other way than the attention that reads its pools.
Both are checked at load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from headrace.errors import one_line
from headrace.runner.cpu.operations import CpuOperations
from headrace.runner.device_arrays import MARK_SHAPE
from headrace.runner.kernels.language import CUDA_NAMES, METAL_NAMES, compact, cuda_kernel

log = logging.getLogger("headrace.runner")

THREADS = 128

# Constants W0, W1 …: elements per slot. Inputs: p0 …: pools [slots, W] (written), r0 …: rows [N, W], slots [N]
# int32, mark. Output: after [MARKS] int32, zeros. Grid: a block of THREADS threads per row.
_ARRAY = """
  {{
    WRITABLE({type})* to = (WRITABLE({type})*)(p{i}) + slot * W{i};
    for (int j = thread; j < W{i}; j += {threads}) to[j] = r{i}[row * W{i} + j];
  }}
"""
_BODY = """
  const long row = long(threadgroup_position_in_grid.x);
  const int thread = int(thread_position_in_threadgroup.x);
  const long slot = long(slots[row]);
{arrays}
  if (row == 0 && thread < MARKS) after[thread] = 0;
"""


def store_source(count: int) -> str:
    """The kernel's body for ``count`` pools whose elements are of type ``T``."""
    arrays = "".join(_ARRAY.format(i=i, type="T", threads=THREADS) for i in range(count))
    return _BODY.format(arrays=arrays)


class Store(Protocol):
    """Writes into pools in place; ``head_major``: of which order they are."""

    @property
    def head_major(self) -> bool: ...

    def write(
        self, pools: Sequence[mx.array], rows: Sequence[mx.array], slots: mx.array, mark: mx.array
    ) -> mx.array: ...


class CpuPoolStore:
    """Head-major pools, by the native operations of the CPU."""

    head_major = True

    def __init__(self, operations: CpuOperations) -> None:
        self._operations = operations

    @staticmethod
    def checked(operations: CpuOperations) -> CpuPoolStore | None:
        """The store if it does what it should."""
        store = CpuPoolStore(operations)
        if _works(store):
            return store
        log.warning("KV is not written in place, so steps wait for each other: it does not write what it should")
        return None

    def write(
        self, pools: Sequence[mx.array], rows: Sequence[mx.array], slots: mx.array, mark: mx.array
    ) -> mx.array:
        """Store ``rows[i] [B, heads, L, ...]`` at ``slots [B * L]`` of ``pools[i] [heads, S, ...]``; the mark."""
        return self._operations.store(list(pools), list(rows), slots, mark)


class PoolStore:
    """The compiled kernels of one GPU; make one and keep it.

    Args:
        make: ``cuda_kernel`` or ``mx.fast.metal_kernel``.
        header: the matching names of ``kernels/language.py``.
    """

    head_major = False

    def __init__(self, make: Callable[..., Any], header: str) -> None:
        self._kernels = {
            count: make(
                name=f"pool_store_{count}",
                input_names=[
                    *(f"p{i}" for i in range(count)),
                    *(f"r{i}" for i in range(count)),
                    "slots",
                    "mark",
                ],
                output_names=["after"],
                source=compact(store_source(count)),
                header=header,
            )
            for count in (2, 4)
        }

    @staticmethod
    def for_device() -> PoolStore | None:
        """The store of the default device, unchecked; None where there is none."""
        if mx.default_device() != mx.gpu:
            return None
        if mx.metal.is_available():
            return PoolStore(mx.fast.metal_kernel, METAL_NAMES)
        return PoolStore(cuda_kernel, CUDA_NAMES)

    @staticmethod
    def checked() -> PoolStore | None:
        """The store of the default device if it writes in place, writes only what it should, and is ordered."""
        try:
            store = PoolStore.for_device()
            if store is None or _works(store):
                return store
            fault = "it does not write what it should"
        except Exception as error:
            # Whatever a compiler or driver says about a kernel, functional writes can serve.
            fault = one_line(error)
        log.warning("KV is not written in place, so steps wait for each other: %s", fault)
        return None

    def write(
        self, pools: Sequence[mx.array], rows: Sequence[mx.array], slots: mx.array, mark: mx.array
    ) -> mx.array:
        """Store ``rows[i] [N, ...]`` at ``slots [N]`` of ``pools[i] [S, ...]``; the mark of the write.

        Pools are 2 or 4 of one dtype, contiguous; nothing is written until the mark is evaluated.
        """
        widths = [int(np.prod(pool.shape[1:])) for pool in pools]
        after: mx.array = self._kernels[len(pools)](
            inputs=[*pools, *rows, slots, mark],
            template=[
                ("T", pools[0].dtype),
                ("MARKS", MARK_SHAPE[0]),
                *((f"W{i}", width) for i, width in enumerate(widths)),
            ],
            grid=(slots.shape[0] * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[MARK_SHAPE],
            output_dtypes=[mx.int32],
        )[0]
        return after


def ordered(tables: mx.array, mark: mx.array | None) -> mx.array:
    """Block tables for an MLX gather that must come after the write of ``mark``."""
    return tables if mark is None else tables + mark[:1]


def _works(store: Store) -> bool:
    """Write twice, read through MLX in the same evaluation, and look at the whole pool afterwards."""
    # Two heads, 40 slots; by token, a row of the first axis is all heads of a slot.
    pools = [mx.full((40, 2, 8), value, mx.float16) for value in (0.5, 0.25)]
    rows = [mx.arange(3 * 16).reshape(3, 2, 8).astype(mx.float16) + value for value in (1, 100)]
    given = [new.swapaxes(0, 1)[None] for new in rows] if store.head_major else rows
    if store.head_major:
        pools = [mx.contiguous(pool.swapaxes(0, 1)) for pool in pools]
    mx.eval(pools)

    def by_token(pool: mx.array, slots: mx.array) -> mx.array:
        return pool[:, slots].swapaxes(0, 1) if store.head_major else pool[slots]

    mark = mx.zeros(MARK_SHAPE, mx.int32)
    first, second = mx.array([7, 0, 39], mx.int32), mx.array([8, 7, 1], mx.int32)
    mark = store.write(pools, given, first, mark)
    early = by_token(pools[0], ordered(first, mark))
    mx.eval(early, mark)
    mark = store.write(pools, given, second, mark)
    late = by_token(pools[1], ordered(second, mark))
    mx.eval(late)
    expected = [np.full((40, 2, 8), value, np.float16) for value in (0.5, 0.25)]
    for slots in (first, second):
        for pool, new in zip(expected, rows, strict=True):
            pool[np.array(slots)] = np.array(new)
    everything = mx.arange(40)
    return (
        all(
            np.array_equal(np.array(by_token(pool, everything)), wanted)
            for pool, wanted in zip(pools, expected, strict=True)
        )
        and np.array_equal(np.array(early), np.array(rows[0]))
        and np.array_equal(np.array(late), np.array(rows[1]))
    )
