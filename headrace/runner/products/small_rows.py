"""Products of few rows with a large matrix, and what a decoder block does before and after them, in one.

A decode step multiplies 1 to some hundred rows with every weight matrix. It is bound by reading weights and, on a
fast GPU, by the host's cost per operation (measured on an H200: 15 to 36 us for a library product, 8 to 10 for a
kernel of our own). So one kernel streams the weights once and takes the neighbours along:

    y = x W^T + bias           x may be RMS-normalized first,
                               y may be the gated halves SiLU(gate) * up, or have a residual added

``Product`` says which of these, ``plain_product`` computes it with MLX's product. ``kernel_products.py`` does by
kernels, ``choice.py`` by whichever way is right and quickest. Weights may be plain, packed
(``packed_rows_source.py``) or both: then kernels read the packed ones, MLX the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from headrace.runner.products.packed_weights import PackedWeights
from headrace.runner.products.row_operations import MLX_ROWS, RowOperations
from headrace.runner.products.tiling import Staged, Tiling

MAX_ROWS = 128
KINDS = (mx.bfloat16, mx.float16)
# What is done beside the product, outputs, inner dimension, whether there is a bias, how weights are held.
Form = tuple[str, int, int, bool, str]
# How a kernel cuts a product; None: MLX's product instead.
Way = Tiling | Staged | None
# From so many rows on, weights are unpacked for MLX's product. That over packed ones is then another kernel, which
# MLX compiles when it is first called, for half a minute on an H200.
LEAST_UNPACKED = 8


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights ``[N, K]`` of a linear layer, plain or packed or both, and its bias ``[N]``."""

    weight: mx.array | None
    bias: mx.array | None = None
    packed: PackedWeights | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inner dimension."""
        found = self.held.shape
        return found[0], found[1]

    @property
    def dtype(self) -> mx.Dtype:
        """Of the weights' values."""
        return self.held.dtype

    @property
    def held(self) -> mx.array | PackedWeights:
        """The plain weights where there are some, else the packed ones."""
        found = self.packed if self.weight is None else self.weight
        assert found is not None, "weights are one or the other"
        return found


@dataclass(frozen=True, slots=True)
class Norm:
    """Weights ``[K]`` and epsilon of an RMS norm."""

    weight: mx.array
    eps: float


@dataclass(frozen=True, slots=True)
class Product:
    """``norm(x) @ weight.T + bias``, gated or with a residual.

    Attributes:
        residual: B * N values in any shape, added to the product of an ``x`` of B rows, which then has that shape.
        gated: the first half of the outputs is the gate's: ``SiLU(first half) * second half``.
        tiling: how the kernel cuts it; None: the usual way for its shape.
    """

    dense: Dense
    norm: Norm | None = None
    residual: mx.array | None = None
    gated: bool = False
    tiling: Way = None

    @property
    def form(self) -> Form:
        """What products share that are measured together."""
        parts = {"norm": self.norm is not None, "residual": self.residual is not None, "gate": self.gated}
        outputs, inner = self.dense.shape
        kind = "+".join(name for name, on in parts.items() if on) or "product"
        return kind, outputs, inner, self.dense.bias is not None, _held_text(self.dense)


# ``[B, ...]`` with K values a row -> ``[B, N]``, ``[B, N / 2]`` where gated, or the shape of the residual.
Products = Callable[[mx.array, Product], mx.array]


def plain_product(x: mx.array, product: Product, beside: RowOperations = MLX_ROWS) -> mx.array:
    """``Products`` by MLX's product, for any number of rows and any type; over packed weights where there are no
    others. ``beside``: what norms and gates."""
    dense, norm, residual = product.dense, product.norm, product.residual
    x = _flat(x)
    if norm is not None:
        x = beside.rms_norm(x, norm.weight, norm.eps)
    if residual is not None and dense.weight is not None and dense.bias is None and not product.gated:
        y = mx.addmm(_flat(residual), x, dense.weight.T)
        return y if y.shape == residual.shape else y.reshape(residual.shape)
    y = linear(x, dense)
    if product.gated:
        y = beside.silu_gate(y)
    return y if residual is None else y.reshape(residual.shape) + residual


def _flat(x: mx.array) -> mx.array:
    """``[B, ...]`` as ``[B, K]``; a view of the same shape would cost the host as much as another."""
    return x if x.ndim == 2 else x.reshape(x.shape[0], -1)


def linear(x: mx.array, dense: Dense) -> mx.array:
    """``x [..., K] @ weight.T + bias`` by MLX's product."""
    packed, weight = dense.packed, dense.weight
    if weight is None and packed is not None and x.size // x.shape[-1] >= LEAST_UNPACKED:
        weight = packed.unpacked()
    if weight is not None:
        return x @ weight.T if dense.bias is None else mx.addmm(dense.bias, x, weight.T)
    assert packed is not None, "weights are one or the other"
    y = mx.quantized_matmul(
        x, packed.words, packed.scales, packed.biases, group_size=packed.group, bits=packed.bits
    )
    return y if dense.bias is None else y + dense.bias


def unpacking_product(x: mx.array, product: Product) -> mx.array:
    """``plain_product`` of packed weights that are unpacked for it."""
    packed = product.dense.packed
    assert packed is not None, "there is something to unpack"
    return plain_product(x, replace(product, dense=Dense(packed.unpacked(), product.dense.bias)))


def takes(rows: int, dtype: mx.Dtype, dense: Dense, *, gated: bool = False) -> bool:
    """Whether the kernel can compute this product at all."""
    outputs, inner = dense.shape
    return (
        dtype in KINDS
        and dtype == dense.dtype
        and (dense.bias is None or dense.bias.dtype == dtype)
        and 1 <= rows <= MAX_ROWS
        and inner % 32 == 0
        and outputs % (32 if gated else 16) == 0
    )


def _held_text(dense: Dense) -> str:
    """How weights are held, for people and for telling forms apart."""
    packed = [] if dense.packed is None else [f"{dense.packed.bits} bits by {dense.packed.group}"]
    return " and ".join([*packed, *([] if dense.weight is None else ["16 bits"])])


def largest_difference(got: mx.array, expected: mx.array) -> float:
    """Largest difference over the largest value; NaN stays, equal zeros differ by 0."""
    expected = expected.astype(mx.float32)
    worst = mx.max(mx.abs(got.astype(mx.float32) - expected))
    # A layer of zeros is a layer too: 0 / 0 would read as a fault of every way there is.
    return float(np.array(mx.where(worst == 0, 0.0, worst / mx.max(mx.abs(expected)))))
