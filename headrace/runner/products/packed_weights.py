"""Matrices as MLX packs them (affine): what kernels over them need to know, and the way back to plain weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

# What kernels take (``packed_rows_source.py``).
BITS = (4, 8)
GROUPS = (32, 64, 128)


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """``[..., N, K]`` weights: scale * code + bias, one scale and bias per ``group`` positions of the last axis.

    Attributes:
        words: uint32 ``[..., N, K * bits / 32]``, first codes in the lowest bits.
        scales: ``[..., N, K / group]``.
        biases: like ``scales``.
    """

    words: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group: int

    @staticmethod
    def of(module: Any) -> PackedWeights | None:
        """Those of a packed module; None where its packing is of another kind."""
        if getattr(module, "mode", None) != "affine" or not takes_packing(module.bits, module.group_size):
            return None
        return PackedWeights(module.weight, module.scales, module.biases, module.bits, module.group_size)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weights."""
        *outer, words = self.words.shape
        return *outer, words * 32 // self.bits

    @property
    def dtype(self) -> mx.Dtype:
        """Of scales and of the weights that they give."""
        return self.scales.dtype

    def unpacked(self) -> mx.array:
        """The plain weights; lazy."""
        return mx.dequantize(
            self.words, self.scales, self.biases, group_size=self.group, bits=self.bits, dtype=self.dtype
        )

    def __getitem__(self, index: int | mx.array) -> PackedWeights:
        """Some of the first axis."""
        return replace(self, words=self.words[index], scales=self.scales[index], biases=self.biases[index])


def wide(weights: mx.array | PackedWeights) -> mx.array:
    """The float32 values that ``weights`` stand for, nothing rounded to 16 bits; lazy."""
    if isinstance(weights, mx.array):
        return weights.astype(mx.float32)
    scales, biases = weights.scales.astype(mx.float32), weights.biases.astype(mx.float32)
    return mx.dequantize(weights.words, scales, biases, group_size=weights.group, bits=weights.bits)


def takes_packing(bits: int, group: int) -> bool:
    """Whether kernels take affine weights packed like this."""
    return bits in BITS and group in GROUPS
