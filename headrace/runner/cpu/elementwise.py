"""Elementwise functions for MLX's CPU backend, where ``exp`` and ``tanh`` cost one libm call per value.

``fast_exp`` is arithmetic only: 2^n times a polynomial, with n = round(x·log2 e). Compiled, the loop becomes
vector instructions; SiLU of 32 x 1536 values takes a tenth of the time. The polynomial is the Taylor series of
2^f, degree 6, on |f| <= 1/2: its relative error is below 2e-7, that of float32 itself. It is summed as a tree:
MLX cuts a compiled function into one loop per eleven operations in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

_LOG2E = math.log2(math.e)
_COEFFICIENTS = tuple(math.log(2) ** k / math.factorial(k) for k in range(7))
# Adding and subtracting 1.5 * 2^23 rounds a float32 below 2^22 to an integer.
_ROUND = 12582912.0
MOST_SHAPES = 128


def fast_exp(x: mx.array) -> mx.array:
    """exp of float32 ``x``; results saturate at 2^±126."""
    y = mx.clip(x * _LOG2E, -126.0, 126.0)
    rounded = y + _ROUND
    f = y - (rounded - _ROUND)
    c0, c1, c2, c3, c4, c5, c6 = _COEFFICIENTS
    f2 = f * f
    p = ((c6 * f2 + (c5 * f + c4)) * (f2 * f2)) + ((c3 * f + c2) * f2 + (c1 * f + c0))
    # n is in the low bits of `rounded`; added to the exponent of p, whose own is 0 or -1
    return (p.view(mx.int32) + (rounded.view(mx.int32) << 23)).view(mx.float32)


class Compiled:
    """``mx.compile`` that forgets.

    MLX keeps about 35 KB for every combination of shapes that a compiled function has seen, as long as the
    function lives, and lengths of prompts come in thousands. After ``MOST_SHAPES`` the function is compiled anew:
    what is needed is traced again, the machine code behind it is kept.
    """

    def __init__(self, function: Callable[..., mx.array]) -> None:
        self._function = function
        self._compiled = mx.compile(function)
        self._seen: set[tuple[tuple[int, ...], ...]] = set()

    def __call__(self, *arrays: mx.array) -> mx.array:
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._seen:
            if len(self._seen) == MOST_SHAPES:
                self._compiled = mx.compile(self._function)
                self._seen.clear()
            self._seen.add(shapes)
        return self._compiled(*arrays)


_fast_exp = Compiled(fast_exp)
# Compiled functions are traced once per shape; a flat array padded to a multiple of this has few shapes.
_FLAT = 8192


def fast_exp_of_any_shape(x: mx.array) -> mx.array:
    """``fast_exp`` for shapes that change from step to step."""
    flat = x.reshape(-1)
    padding = -flat.size % _FLAT
    if padding:
        flat = mx.pad(flat, (0, padding))
    return _fast_exp(flat)[: x.size].reshape(x.shape)


@Compiled
def silu_gate(gate: mx.array, up: mx.array) -> mx.array:
    """``silu(gate) * up``, float32."""
    return gate * up / (1.0 + fast_exp(-gate))


@Compiled
def gelu_gate(gate: mx.array, up: mx.array) -> mx.array:
    """``gelu(gate) * up`` with the tanh approximation (Hendrycks & Gimpel 2016), float32.

    0.5 (1 + tanh z) is the logistic function of 2z.
    """
    z = 2.0 * math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    return gate * up / (1.0 + fast_exp(-z))
