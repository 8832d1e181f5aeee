"""Softmax-weighted sums over scores that arrive in tiles (online softmax, Milakov and Gimelshein 2018).

For every query the greatest score so far, the sum of exponentials relative to it and the weighted sum of values
are kept; a tile with a greater score rescales what was there. Everything is float32.
"""

from __future__ import annotations

import mlx.core as mx

from headrace.runner.cpu.elementwise import Compiled, fast_exp

# Score of a position that a query may not see: finite, so that a tile without a visible position stays finite.
# What such a tile adds is scaled to zero as soon as a visible position follows, and one always does.
HIDDEN = -1e30
# Tiles are widened to a multiple, so that few shapes of the compiled exponential exist.
_WIDTH = 64

# Arrays that something else shall be computed after.
Earlier = list[mx.array]


@Compiled
def _exp_below(scores: mx.array, top: mx.array) -> mx.array:
    return fast_exp(scores - top)


class OnlineSoftmax:
    """State for queries ``[..., R]``.

    Args:
        sinks: logits that take part in the sum without a value, broadcast against ``[..., R, 1]``.
    """

    def __init__(self, sinks: mx.array | None = None) -> None:
        self._top = None if sinks is None else sinks.astype(mx.float32)
        self._sum: mx.array | None = None
        self._out: mx.array | None = None

    def add(self, scores: mx.array, values: mx.array) -> None:
        """Take in float32 scores ``[..., R, T]``, ``HIDDEN`` where nobody may look, and ``values [..., T, D]``.

        A query must see something in one of its tiles.
        """
        width = scores.shape[-1]
        padding = -width % _WIDTH
        if padding:
            scores = mx.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(0, padding)], constant_values=HIDDEN)
        top = mx.max(scores, axis=-1, keepdims=True)
        if self._top is not None:
            top = mx.maximum(top, self._top)
        weights = _exp_below(scores, top)
        total = mx.sum(weights, axis=-1, keepdims=True)
        out = (weights[..., :width] if padding else weights) @ values
        if self._top is not None:
            correction = mx.exp(self._top - top)
            total = total + (correction if self._sum is None else self._sum * correction)
            if self._out is not None:
                out = out + self._out * correction
        self._top, self._sum, self._out = top, total, out

    @property
    def pending(self) -> Earlier:
        """What the next tile can be made to wait for: all that keeps this tile's weights alive."""
        assert self._out is not None and self._sum is not None
        return [self._out, self._sum]

    def result(self) -> mx.array:
        """``[..., R, D]``."""
        assert self._out is not None and self._sum is not None
        return self._out / self._sum


def capped(scores: mx.array, softcap: float) -> mx.array:
    """Soft-capped scores; 0: as they are."""
    return softcap * mx.tanh(scores / softcap) if softcap > 0 else scores


def after(x: mx.array, earlier: Earlier) -> mx.array:
    """``x``, not available before ``earlier`` is: MLX would evaluate tiles side by side and hold them all."""
    return mx.depends(x, earlier) if earlier else x
