"""Whether mixtures of experts over narrow weights are right on this CPU, and how fast; ``products.py`` asks.

The check compares with float64 over packed and 16-bit matrices, with every activation, weighted and not, and rows
alone with rows in company, which must be equal. The measurement takes mixtures of one row, of sixteen and of 256,
and the unmodified module with the same weights in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.runner.cpu.narrow_weights import (
    Activation,
    NarrowProducts,
    NarrowStack,
    interleaved_biases,
)
from headrace.runner.mlx_lm_adapter import SwitchGLU
from headrace.runner.timing import best_of_each

Doubles = npt.NDArray[Any]

SILU = Activation("silu")
ACTIVATIONS = (SILU, Activation("gelu"), Activation("clamped", 1.702, 7.0))
# Of a mixture with rounded x, and of float32 sums, as a share of the largest result.
_TOLERANCE = 1e-3


def check(products: NarrowProducts) -> str:
    """What is wrong, or nothing."""
    source = np.random.default_rng(6)
    experts, width, hidden, choices, rows = 5, 64, 41, 2, 23
    x = 2 * source.standard_normal((rows, width)).astype(np.float32)
    chosen = source.integers(0, experts, (rows, choices))
    shares = source.random((rows, choices)).astype(np.float32)
    for bits in (16, 4):
        inner = 64 if bits == 4 else hidden
        stacks, weights = zip(
            *(
                _sample(products, source, experts, *shape, bits)
                for shape in ((inner, width), (inner, width), (width, inner))
            ),
            strict=True,
        )
        biases = tuple(
            source.standard_normal((experts, size)).astype(np.float32) for size in (inner, inner, width)
        )
        for activation in ACTIVATIONS:
            for biased in (None, biases):
                expected = reference(x, chosen, weights, activation, biased)
                given = _given(products, stacks, biased)
                fault = _fault(products, (x, chosen, shares), given, activation, expected)
                if fault:
                    return (
                        f"experts of {bits} bits, {activation.name}{'' if biased is None else ', biases'}: {fault}"
                    )
    return ""


def reference(
    x: Doubles, chosen: Doubles, weights: Any, activation: Activation, biases: Any | None = None
) -> Doubles:
    """``[rows, choices, D]`` in float64: gate, up and down ``weights``, ``biases`` likewise or None."""
    gate, up, down = (matrix[chosen].astype(np.float64) for matrix in weights)
    gate_bias, up_bias, down_bias = (0, 0, 0) if biases is None else (bias[chosen] for bias in biases)
    g = np.einsum("rcfd,rd->rcf", gate, x) + gate_bias
    u = np.einsum("rcfd,rd->rcf", up, x) + up_bias
    if activation.name == "clamped":
        g, u = np.minimum(g, activation.limit), np.clip(u, -activation.limit, activation.limit) + 1
        scaled = activation.alpha * g
    elif activation.name == "gelu":
        scaled = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    else:
        scaled = g
    inner = g / (1 + np.exp(-np.clip(scaled, -700, 700))) * u
    result: Doubles = np.einsum("rcdf,rcf->rcd", down, inner) + down_bias
    return result


def _given(
    products: NarrowProducts, stacks: Any, biases: Any | None
) -> tuple[NarrowStack, NarrowStack, tuple[mx.array, mx.array] | None]:
    gate, up, down = stacks
    both = None
    if biases is not None:
        both = interleaved_biases(*map(mx.array, biases[:2])), mx.array(biases[2])
    return products.interleaved_stacks(gate, up), down, both


def _fault(
    products: NarrowProducts,
    rows: tuple[Doubles, Doubles, Doubles],
    given: tuple[NarrowStack, NarrowStack, tuple[mx.array, mx.array] | None],
    activation: Activation,
    expected: Doubles,
) -> str:
    gate_up, down, biases = given

    def run(some: slice, weighted: bool) -> Doubles:
        x, chosen, shares = (mx.array(part[some]) for part in rows)
        weights = shares if weighted else None
        return np.array(products.mixture(x, chosen, gate_up, down, activation, shares=weights, biases=biases))

    whole = slice(None)
    summed = np.einsum("rcd,rc->rd", expected, rows[2])
    for weighted, right in ((False, expected), (True, summed)):
        got = run(whole, weighted)
        if not np.max(np.abs(got - right)) < _TOLERANCE * np.max(np.abs(right)):
            return "wrong"
        if any(not np.array_equal(run(slice(i, i + 1), weighted), got[i : i + 1]) for i in (0, 11, 22)):
            return "a row depends on the others"
    return ""


def _sample(
    products: NarrowProducts, source: np.random.Generator, experts: int, outputs: int, inputs: int, bits: int
) -> tuple[NarrowStack, Doubles]:
    """Random matrices, and their values in float64."""
    values = mx.array((0.3 * source.standard_normal((experts, outputs, inputs))).astype(np.float32))
    if bits == 16:
        plain = values.astype(mx.bfloat16)
        return products.plain_stack(plain), np.array(plain.astype(mx.float32), dtype=np.float64)
    words, scales, biases = mx.quantize(values, group_size=32, bits=bits)
    weights = mx.dequantize(words, scales, biases, group_size=32, bits=bits)
    return products.packed_stack(words, scales, biases, bits), np.array(weights, dtype=np.float64)


# -- faster? -------------------------------------------------------------------------------------------


def rates(products: NarrowProducts, numbers: tuple[int, ...]) -> tuple[float, ...]:
    """For each number of rows, how many times as fast as the module; of 4 and 16 bits the slower."""
    experts, choices, width, hidden = 16, 4, 512, 256
    module = SwitchGLU(width, hidden, experts)
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    packed = [products.packed_stack(*mx.quantize(layer.weight, group_size=32, bits=4), 4) for layer in layers]
    plain = [products.plain_stack(layer.weight.astype(mx.bfloat16)) for layer in layers]
    forms = [(products.interleaved_stacks(gate, up), down) for gate, up, down in (packed, plain)]
    mx.eval(module.parameters(), *(stack.strips for form in forms for stack in form))
    found = []
    for rows in numbers:
        x = mx.random.normal((rows, width), key=mx.random.key(2))
        chosen = mx.argsort(mx.random.normal((rows, experts), key=mx.random.key(3)), axis=-1)[:, :choices]
        mx.eval(x, chosen)
        runs: list[Callable[[], mx.array]] = [partial(module, x, chosen)]
        runs += [partial(products.mixture, x, chosen, gate_up, down, SILU) for gate_up, down in forms]
        best = best_of_each(runs, 3, 1)
        found.append(best[0] / max(best[1:]))
    return tuple(found)
