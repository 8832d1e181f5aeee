"""The tokens a decode step starts from: known to the host, or sampled by the newest step and still on the device.

Steps are launched one ahead of the host, so most tokens have not been seen by it; rows that joined, left or moved
places since the newest step make it a selection. On CUDA that is one kernel of our own in the recorded step, fed
with what the host sends for the step anyway: an operation of MLX's that reads what the host has made waits for it
(``device_arrays.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.core.step import ScheduledRow
from headrace.runner.device_arrays import LEAST_ELEMENTS, on_device
from headrace.runner.kernels.language import cuda_kernel
from headrace.runner.kv.input_batch import HostInts

# The newest step's tokens and each sequence's place among them.
Newest = tuple[mx.array, Mapping[int, int]]
_THREADS = 32
# Constant: THREADS of a block. Inputs: newest [S], feed [2, B]: tokens of the host, then places in newest, -1 for
# the host's. Output: tokens [B], or more, the first ones set.
_BODY = """
  const int B = feed_shape[1];
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i < B) tokens[i] = feed[B + i] < 0 ? feed[i] : newest[feed[B + i]];
"""


def feed_of(rows: Sequence[ScheduledRow], padded: int, newest: Newest | None) -> HostInts:
    """``[2, padded]``: tokens that the host knows, and places in the newest step's, -1 where it knows them."""
    feed = np.zeros((2, padded), np.int32)
    feed[1] = -1
    for index, row in enumerate(rows):
        if row.token_ids:
            feed[0, index] = row.token_ids[0]
        else:
            assert newest is not None, "a row's token is on the device, but no step sampled it"
            feed[1, index] = newest[1][row.seq_id]
    return HostInts(feed)


def fed_tokens(rows: Sequence[ScheduledRow], padded: int, newest: Newest | None) -> mx.array:
    """``[padded]`` int32 tokens, by MLX's operations."""
    host, source = feed_of(rows, padded, newest).values
    if newest is None or (source < 0).all():
        return mx.array(host)
    if len(newest[0]) == padded and (source == np.arange(padded)).all():
        return newest[0]
    taken = newest[0][mx.array(np.maximum(source, 0))]
    return mx.where(mx.array(source >= 0), taken, mx.array(host))


class TokenFeed:
    """Tokens of recorded steps; make one and keep it.

    Args:
        make: ``cuda_kernel``; None: by MLX's operations.
    """

    def __init__(self, make: Callable[..., Any] | None) -> None:
        self._kernel = make and make(
            name="feed_tokens", input_names=["newest", "feed"], output_names=["tokens"], source=_BODY
        )
        self._none = on_device(mx.zeros(LEAST_ELEMENTS, mx.int32))

    @staticmethod
    def for_device() -> TokenFeed:
        on_cuda = mx.default_device() == mx.gpu and not mx.metal.is_available()
        return TokenFeed(cuda_kernel if on_cuda else None)

    def source(self, newest: Newest | None) -> mx.array:
        """What places in a feed count in; never empty."""
        return self._none if newest is None else newest[0]

    def __call__(self, newest: mx.array, feed: mx.array) -> mx.array:
        """``[B]`` tokens of ``newest [S]`` and ``feed [2, B]``, both int32."""
        rows = feed.shape[1]
        if self._kernel is None:
            return mx.where(feed[1] < 0, feed[0], newest[mx.maximum(feed[1], 0)])
        padded = max(rows, LEAST_ELEMENTS)
        tokens: mx.array = self._kernel(
            inputs=[newest, feed],
            template=[("THREADS", _THREADS)],
            grid=(-(-rows // _THREADS) * _THREADS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=[(padded,)],
            output_dtypes=[mx.int32],
        )[0]
        return tokens[:rows]
