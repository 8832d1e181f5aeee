"""Module substitution, CPU: linear layers and embeddings over weights that stay narrow in memory.

A layer that was loaded packed (affine, 4 or 8 bits) or with 16 bits is laid out anew, one at a time, and computes
with float32 activations (``cpu/narrow_weights.py``). The first of every form and shape must give what the module
that it replaces gives. Feed-forward layers with a SiLU gate become one product for gate and up, with the gate
computed where the sums are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import StartupError
from headrace.runner.cpu.narrow_weights import (
    NarrowForm,
    NarrowMatrix,
    NarrowProducts,
    stacked,
    takes_dtype,
    takes_packing,
)
from headrace.runner.substitutions.modules import agree, each_module, put

KINDS = (nn.Linear, nn.Embedding)
_PACKED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
_MLP = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = 1e-3
# Outputs from either end that are compared: the weights of all of a vocabulary would be a gigabyte in float32.
_COMPARED = 1024


class NarrowLinear(nn.Module):  # type: ignore[misc]
    """``x · wᵀ + bias``, float32."""

    def __init__(self, matrix: NarrowMatrix, products: NarrowProducts, bias: mx.array | None = None) -> None:
        super().__init__()
        self.strips = matrix.strips
        if bias is not None:
            self.bias = bias.astype(mx.float32)
        self._form = matrix.form
        self._products = products

    @property
    def matrix(self) -> NarrowMatrix:
        return NarrowMatrix(self._form, self.strips)

    @property
    def products(self) -> NarrowProducts:
        return self._products

    def __call__(self, x: mx.array) -> mx.array:
        return self._products.product(x, self.matrix, self.get("bias"))

    def parts(self, x: mx.array, widths: Sequence[int]) -> list[mx.array]:
        """The result cut into arrays of these widths, all but the last of them whole strips."""
        return self._products.parts(x, self.matrix, self.get("bias"), widths)

    def joined(self, others: Sequence[NarrowLinear]) -> NarrowLinear | None:
        """This layer and the others, which see the same input, as one; None where they do not fit together."""
        layers = [self, *others]
        matrix = stacked([layer.matrix for layer in layers])
        biases = [layer.bias for layer in layers if "bias" in layer]
        if matrix is None or len(biases) not in (0, len(layers)):
            return None
        return NarrowLinear(matrix, self._products, mx.concatenate(biases) if biases else None)


class NarrowEmbedding(nn.Module):  # type: ignore[misc]
    """An embedding, and its projection where it is tied to the output; float32."""

    def __init__(self, matrix: NarrowMatrix, products: NarrowProducts) -> None:
        super().__init__()
        self.strips = matrix.strips
        self._form = matrix.form
        self._products = products

    @property
    def matrix(self) -> NarrowMatrix:
        return NarrowMatrix(self._form, self.strips)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._products.rows(tokens, self.matrix)

    def as_linear(self, x: mx.array) -> mx.array:
        return self._products.product(x, self.matrix)


class NarrowGatedMLP(nn.Module):  # type: ignore[misc]
    """``down(silu(gate(x)) * up(x))`` with gate and up in one matrix."""

    def __init__(self, gate_up: NarrowMatrix, down: NarrowLinear, products: NarrowProducts) -> None:
        super().__init__()
        self.strips = gate_up.strips
        self.down_proj = down
        self._form = gate_up.form
        self._products = products

    @property
    def matrix(self) -> NarrowMatrix:
        """Strips of gate and up in turns."""
        return NarrowMatrix(self._form, self.strips)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._products.gated(x, self.matrix))


def substitute_narrow(model: nn.Module, products: NarrowProducts) -> int:
    """Replace what can stay narrow; returns how many modules were replaced. Weights move one layer at a time.

    Raises StartupError when a product over a model's own weights is wrong.
    """
    checked: set[tuple[type, NarrowForm, bool]] = set()
    count = 0
    for path, module in each_module(model):
        made = _narrow(module, products)
        if made is None:
            continue
        mx.eval(made.parameters())
        form = type(module), made.matrix.form, "bias" in module
        if form not in checked:
            _check(path, module, made)
            checked.add(form)
        put(model, path, made)
        count += 1
    for path, module in each_module(model):
        fused = _fused(module, products)
        if fused is not None:
            mx.eval(fused.parameters())
            put(model, path, fused)
    return count


def _narrow(module: Any, products: NarrowProducts) -> NarrowLinear | NarrowEmbedding | None:
    kind = type(module)
    if kind in _PACKED and takes_packing(module.bits, module.group_size, module.mode):
        matrix = products.packed(module.weight, module.scales, module.biases, module.bits)
    elif kind in KINDS and takes_dtype(module.weight.dtype):
        matrix = products.plain(module.weight)
    else:
        return None
    if kind in (nn.Embedding, nn.QuantizedEmbedding):
        return NarrowEmbedding(matrix, products)
    return NarrowLinear(matrix, products, module.get("bias"))


def _check(path: str, module: Any, made: NarrowLinear | NarrowEmbedding) -> None:
    """A few rows through both; embeddings also give some tokens' rows."""
    form = made.matrix.form
    x = mx.random.normal((3, form.inputs), key=mx.random.key(0))
    index = mx.arange(form.outputs)
    if form.outputs > 2 * _COMPARED:
        index = mx.concatenate([index[:_COMPARED], index[-_COMPARED:]])
    if isinstance(made, NarrowLinear):
        pairs = [(_reference(module, x, index), made(x)[:, index])]
    else:
        tokens = mx.array([[0, form.outputs - 1, form.outputs // 2]])
        pairs = [
            (_widened(module, tokens), made(tokens)),
            (_reference(module, x, index), made.as_linear(x)[:, index]),
        ]
    for expected, got in pairs:
        if not agree(expected, got, _TOLERANCE):
            raise StartupError(f"products over narrow weights are wrong in {path}: start with --dequantize")


def _reference(module: Any, x: mx.array, index: mx.array) -> mx.array:
    """Results of the outputs ``index``."""
    result = x @ _widened(module, index).T
    return result + module.bias[index].astype(mx.float32) if "bias" in module else result


def _widened(module: Any, index: mx.array) -> mx.array:
    """Weights of some outputs as MLX widens them, float32."""
    if type(module) in KINDS:
        return module.weight[index].astype(mx.float32)  # type: ignore[no-any-return]
    scales, biases = (module[name][index].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(module.weight[index], scales, biases, group_size=module.group_size, bits=module.bits)


def _fused(module: Any, products: NarrowProducts) -> NarrowGatedMLP | None:
    """The module as a gated product, where that is what it computes."""
    children = module.children()
    if set(children) != set(_MLP) or not all(type(children[name]) is NarrowLinear for name in _MLP):
        return None
    gate, up, down = (children[name] for name in _MLP)
    if "bias" in gate or "bias" in up:
        return None
    matrix = products.interleaved(gate.matrix, up.matrix)
    if matrix is None:
        return None
    made = NarrowGatedMLP(matrix, down, products)
    x = mx.random.normal((2, matrix.form.inputs), key=mx.random.key(0))
    return made if agree(module(x), made(x), _TOLERANCE) else None
