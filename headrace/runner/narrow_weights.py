"""Weights that stay narrow in a CPU's memory: how they are laid out, and products over them.

``native/cpu_products.h`` describes the layout: strips of sixteen outputs, each one stream along the inputs. It
takes the same number of bytes as the weights it is made from, up to a last strip that is filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

STRIP = 16
GROUPS = (32, 64, 128)
BITS = (4, 8)

ScaleName = Literal["float16", "bfloat16", "float32"]
_NAMES: dict[mx.Dtype, ScaleName] = {mx.float16: "float16", mx.bfloat16: "bfloat16", mx.float32: "float32"}


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


@dataclass(frozen=True, slots=True)
class NarrowMatrix:
    """A matrix [outputs, inputs]: its strips, uint8 ``[strips, bytes of a strip]``."""

    form: NarrowForm
    strips: mx.array


def takes_packing(bits: int, group: int, mode: str) -> bool:
    """Whether packed weights of this kind can be held as they are."""
    return mode == "affine" and bits in BITS and group in GROUPS


def takes_dtype(dtype: mx.Dtype) -> bool:
    """Whether plain weights of this dtype can be held as they are."""
    return dtype in (mx.float16, mx.bfloat16)


def narrow_plain(weight: mx.array) -> NarrowMatrix:
    """From ``[outputs, inputs]`` with 16 bits; lazy."""
    outputs, inputs = weight.shape
    strips = _in_strips(weight).transpose(0, 2, 1)
    form = NarrowForm(16, 1, _NAMES[weight.dtype], inputs, outputs)
    return NarrowMatrix(form, _bytes(strips).reshape(len(strips), -1))


def narrow_packed(words: mx.array, scales: mx.array, biases: mx.array, bits: int) -> NarrowMatrix:
    """From MLX's affine packing, lazy.

    ``words [outputs, inputs * bits / 32]``, ``scales`` and ``biases`` ``[outputs, groups]``.
    """
    outputs, groups = scales.shape
    inputs = words.shape[1] * 32 // bits
    parts = [_in_strips(words).reshape(-1, STRIP, groups, words.shape[1] // groups).transpose(0, 2, 3, 1)]
    parts += [_in_strips(part).transpose(0, 2, 1) for part in (scales, biases.astype(scales.dtype))]
    strips = mx.concatenate([_bytes(part).reshape(len(part), groups, -1) for part in parts], axis=-1)
    form = NarrowForm(bits, inputs // groups, _NAMES[scales.dtype], inputs, outputs)
    return NarrowMatrix(form, strips.reshape(len(strips), -1))


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


def interleaved(gate: NarrowMatrix, other: NarrowMatrix) -> NarrowMatrix | None:
    """For a gated product: strips of both in turns; None where they do not fit together."""
    if gate.form != other.form:
        return None
    form = NarrowForm(gate.form.bits, gate.form.group, gate.form.scale, gate.form.inputs, 2 * gate.form.outputs)
    pairs = mx.stack([gate.strips, other.strips], axis=1)
    return NarrowMatrix(form, pairs.reshape(-1, pairs.shape[-1]))


def _but_outputs(form: NarrowForm) -> tuple[int, int, str, int]:
    return form.bits, form.group, form.scale, form.inputs


def _in_strips(matrix: mx.array) -> mx.array:
    """``[outputs, n]`` -> ``[strips, 16, n]``, filled up with zeros."""
    missing = -matrix.shape[0] % STRIP
    if missing:
        matrix = mx.pad(matrix, [(0, missing), (0, 0)])
    return matrix.reshape(-1, STRIP, matrix.shape[1])


def _bytes(array: mx.array) -> mx.array:
    return mx.contiguous(array).view(mx.uint8)


class NarrowProducts:
    """The native operations; ``module`` is the extension built from ``native/cpu_products.cpp``."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def threads(self) -> int:
        """Threads that share a product."""
        return int(self._module.threads())

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
