"""Weights that stay narrow in a CPU's memory: how they are laid out, and products over them.

``native/cpu_products.h`` describes the layout: strips of sixteen outputs, each one stream along the inputs. It
takes the same number of bytes as the weights it is made from, up to a last strip that is filled with zeros.
Matrices of experts (``native/cpu_experts.h``) lie one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import mlx.core as mx

STRIP = 16
GROUPS = (32, 64, 128)
BITS = (4, 8)

ScaleName = Literal["float16", "bfloat16", "float32"]
_NAMES: dict[mx.Dtype, ScaleName] = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}


# Inputs, outputs, bits, group, dtype of scales: a form as the extension takes it.
FormWords = tuple[int, int, int, int, str]


@dataclass(frozen=True, slots=True)
class NarrowForm:
    """How one matrix is held.

    Attributes:
        bits: of a weight: 4 or 8 (affine, in groups along the inputs) or 16.
        group: inputs that share a scale and a bias; 1 with 16 bits.
        scale: dtype of scales and biases; with 16 bits that of the weights.
        inputs, outputs: of the matrix.
    """

    bits: int
    group: int
    scale: ScaleName
    inputs: int
    outputs: int

    @property
    def words(self) -> FormWords:
        return self.inputs, self.outputs, self.bits, self.group, self.scale


@dataclass(frozen=True, slots=True)
class NarrowMatrix:
    """A matrix [outputs, inputs]: its strips, uint8 ``[strips, bytes of a strip]``."""

    form: NarrowForm
    strips: mx.array


@dataclass(frozen=True, slots=True)
class NarrowStack:
    """A matrix [outputs, inputs] for each expert: their strips, uint8 ``[experts, strips, bytes of a strip]``."""

    form: NarrowForm
    strips: mx.array


@dataclass(frozen=True, slots=True)
class Activation:
    """What an expert computes of its gate and what that gates; ``alpha`` and ``limit`` only where clamped."""

    name: Literal["silu", "gelu", "clamped"]
    alpha: float = 0.0
    limit: float = 0.0


def takes_packing(bits: int, group: int, mode: str) -> bool:
    """Whether packed weights of this kind can be held as they are."""
    return mode == "affine" and bits in BITS and group in GROUPS


def takes_dtype(dtype: mx.Dtype) -> bool:
    """Whether plain weights of this dtype can be held as they are."""
    return dtype in (mx.float16, mx.bfloat16)


def stacked(matrices: Sequence[NarrowMatrix]) -> NarrowMatrix | None:
    """The matrices' outputs one after the other; None where they do not fit together."""
    first = matrices[0].form
    if any(_but_outputs(one.form) != _but_outputs(first) for one in matrices):
        return None
    if any(one.form.outputs % STRIP for one in matrices[:-1]):
        return None
    outputs = sum(one.form.outputs for one in matrices)
    form = NarrowForm(first.bits, first.group, first.scale, first.inputs, outputs)
    return NarrowMatrix(form, mx.concatenate([one.strips for one in matrices]))


def interleaved_biases(gate: mx.array, other: mx.array) -> mx.array:
    """Both ``[experts, outputs]``, as a mixture takes them beside ``interleaved_stacks``: float32."""
    parts = [_end_to_end(bias[..., None]).reshape(-1, STRIP) for bias in (gate, other)]
    return mx.stack(parts, axis=1).reshape(len(gate), -1).astype(mx.float32)


def _end_to_end(array: mx.array) -> mx.array:
    """``[experts, outputs, n]`` -> ``[experts * outputs, n]``, each expert's outputs filled up to whole strips."""
    missing = -array.shape[1] % STRIP
    if missing:
        array = mx.pad(array, [(0, 0), (0, missing), (0, 0)])
    return array.reshape(-1, array.shape[2])


def _packed_form(words: mx.array, scales: mx.array, bits: int) -> NarrowForm:
    inputs = words.shape[-1] * 32 // bits
    return NarrowForm(bits, inputs // scales.shape[-1], _NAMES[scales.dtype], inputs, scales.shape[-2])


def _but_outputs(form: NarrowForm) -> tuple[int, int, str, int]:
    return form.bits, form.group, form.scale, form.inputs


class NarrowProducts:
    """The native operations; ``module`` is the extension built from ``native/cpu_products.cpp``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def native(self) -> Any:
        """The extension module, for operations that are made of several products (``native_block.py``)."""
        return self._module

    @property
    def threads(self) -> int:
        """Threads that share a product."""
        return int(self._module.threads())

    def plain(self, weight: mx.array) -> NarrowMatrix:
        """From ``[outputs, inputs]`` with 16 bits; lazy, as all that is laid out."""
        outputs, inputs = weight.shape
        form = NarrowForm(16, 1, _NAMES[weight.dtype], inputs, outputs)
        return NarrowMatrix(form, self._strips(form, weight))

    def packed(self, words: mx.array, scales: mx.array, biases: mx.array, bits: int) -> NarrowMatrix:
        """From MLX's affine packing.

        ``words [outputs, inputs * bits / 32]``, ``scales`` and ``biases`` ``[outputs, groups]``.
        """
        form = _packed_form(words, scales, bits)
        return NarrowMatrix(form, self._strips(form, words, scales, biases.astype(scales.dtype)))

    def plain_stack(self, weight: mx.array) -> NarrowStack:
        """From ``[experts, outputs, inputs]`` with 16 bits."""
        _, outputs, inputs = weight.shape
        form = NarrowForm(16, 1, _NAMES[weight.dtype], inputs, outputs)
        return NarrowStack(form, self._strips(form, weight))

    def packed_stack(self, words: mx.array, scales: mx.array, biases: mx.array, bits: int) -> NarrowStack:
        """From MLX's affine packing, each array with a first axis of experts."""
        form = _packed_form(words, scales, bits)
        return NarrowStack(form, self._strips(form, words, scales, biases.astype(scales.dtype)))

    def interleaved(self, gate: NarrowMatrix, other: NarrowMatrix) -> NarrowMatrix | None:
        """For a gated product: strips of both in turns; None where they do not fit together."""
        if gate.form != other.form:
            return None
        form = replace(gate.form, outputs=2 * gate.form.outputs)
        return NarrowMatrix(form, self._module.interleaved(gate.strips, other.strips))

    def interleaved_stacks(self, gate: NarrowStack, other: NarrowStack) -> NarrowStack:
        """For a mixture: strips of both, which have the same form, in turns."""
        form = replace(gate.form, outputs=2 * gate.form.outputs)
        return NarrowStack(form, self._module.interleaved(gate.strips, other.strips))

    def _strips(
        self, form: NarrowForm, weights: mx.array, scales: mx.array | None = None, biases: mx.array | None = None
    ) -> mx.array:
        strips: mx.array = self._module.strips(
            weights, scales, biases, inputs=form.inputs, bits=form.bits, group=form.group, scale=form.scale
        )
        return strips

    def product(self, x: mx.array, matrix: NarrowMatrix, bias: mx.array | None = None) -> mx.array:
        """float32 ``x [..., inputs] · matrixᵀ + bias``: ``[..., outputs]``."""
        return self._product(x, matrix, bias)[0]

    def parts(
        self, x: mx.array, matrix: NarrowMatrix, bias: mx.array | None, widths: Sequence[int]
    ) -> list[mx.array]:
        """The product cut into arrays of these widths, all but the last of them multiples of ``STRIP``."""
        return self._product(x, matrix, bias, widths=list(widths))

    def gated(self, x: mx.array, matrix: NarrowMatrix) -> mx.array:
        """``silu(x · gateᵀ) * (x · otherᵀ)`` of an ``interleaved`` matrix: ``[..., outputs / 2]``."""
        return self._product(x, matrix, None, gated=True)[0]

    def _product(self, x: mx.array, matrix: NarrowMatrix, bias: mx.array | None, **further: Any) -> list[mx.array]:
        form = matrix.form
        results: list[mx.array] = self._module.product(
            x,
            matrix.strips,
            bias,
            outputs=form.outputs,
            bits=form.bits,
            group=form.group,
            scale=form.scale,
            **further,
        )
        return results

    def rows(self, index: mx.array, matrix: NarrowMatrix) -> mx.array:
        """Weights of the outputs ``index [...]``, float32 ``[..., inputs]``."""
        form = matrix.form
        result: mx.array = self._module.rows(
            index,
            matrix.strips,
            inputs=form.inputs,
            outputs=form.outputs,
            bits=form.bits,
            group=form.group,
            scale=form.scale,
        )
        return result

    def expert_products(
        self, x: mx.array, chosen: mx.array, stack: NarrowStack, bias: mx.array | None = None
    ) -> mx.array:
        """``chosen [..., choices]`` -> ``[..., choices, outputs]``, by the matrix of the expert that was chosen.

        x: ``[..., inputs]``, or ``[..., choices, inputs]``; bias: float32 ``[experts, outputs]``.
        """
        form = stack.form
        result: mx.array = self._module.expert_products(
            x,
            chosen,
            stack.strips,
            bias,
            experts=len(stack.strips),
            outputs=form.outputs,
            bits=form.bits,
            group=form.group,
            scale=form.scale,
        )
        return result

    def mixture(
        self,
        x: mx.array,
        chosen: mx.array,
        gate_up: NarrowStack,
        down: NarrowStack,
        activation: Activation,
        *,
        shares: mx.array | None = None,
        biases: tuple[mx.array, mx.array] | None = None,
    ) -> mx.array:
        """``down(activation(gate(x), up(x)))`` of the experts in ``chosen [..., choices]``.

        Args:
            x: ``[..., inputs]``.
            chosen: of each row.
            gate_up: from ``interleaved_stacks``.
            down: back to ``inputs``.
            activation: between them.
            shares: ``[..., choices]`` that results are weighted with and added up by; None: they are not.
            biases: from ``interleaved_biases``, and float32 ``[experts, inputs]`` of down.

        Returns ``[..., choices, inputs]``, with shares ``[..., inputs]``.
        """
        first_bias, down_bias = (None, None) if biases is None else biases
        result: mx.array = self._module.mixture(
            x,
            chosen,
            gate_up.strips,
            down.strips,
            shares,
            first_bias,
            down_bias,
            experts=len(down.strips),
            hidden=down.form.inputs,
            forms=tuple((one.form.bits, one.form.group, one.form.scale) for one in (gate_up, down)),
            activation=activation.name,
            alpha=activation.alpha,
            limit=activation.limit,
        )
        return result
