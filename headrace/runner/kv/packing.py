"""How one key or value vector is packed: codes of 8 or 4 bits, a scale and a bias per group of elements.

The layout is that of ``mx.quantize`` along the head size: x ~ scale * code + bias, codes in uint32 words from the
lowest bits up. A head size that the group does not divide is padded with zeros, which the sizes here count.
Scales and biases take 16 bits each: bfloat16 beside bfloat16 keys, else float16 (more digits; a value that
float16 cannot hold becomes infinite, and the row fails instead of saying something else).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

GROUP_SIZES = (64, 32)
BITS = {"int8": 8, "int4": 4}
_SCALE_BYTES = 2


class Packed(NamedTuple):
    """Arrays of packed vectors: ``[..., words]`` uint32, ``[..., groups]`` and ``[..., groups]`` of 16 bits."""

    codes: mx.array
    scales: mx.array
    biases: mx.array


@dataclass(frozen=True, slots=True)
class VectorPacking:
    """Packing of vectors of ``dim`` elements.

    Attributes:
        dim: elements that mean something.
        bits: of a code, 8 or 4.
        group_size: elements that share a scale and a bias.
    """

    dim: int
    bits: int
    group_size: int

    @staticmethod
    def smallest(dim: int, bits: int) -> VectorPacking:
        """The group size that takes fewest bytes, the larger of two that take the same."""
        return min((VectorPacking(dim, bits, size) for size in GROUP_SIZES), key=lambda packing: packing.nbytes)

    @property
    def groups(self) -> int:
        return -(-self.dim // self.group_size)

    @property
    def padded_dim(self) -> int:
        return self.groups * self.group_size

    @property
    def words(self) -> int:
        """uint32 words of codes per vector."""
        return self.padded_dim * self.bits // 32

    @property
    def nbytes(self) -> int:
        """Bytes of one vector, scales and biases included."""
        return 4 * self.words + 2 * _SCALE_BYTES * self.groups

    def pack(self, x: mx.array) -> Packed:
        """``x [..., dim]``, packed."""
        padding = self.padded_dim - self.dim
        if padding:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        codes, scales, biases = mx.quantize(x, group_size=self.group_size, bits=self.bits)
        dtype = scale_dtype(x.dtype)
        return Packed(codes, scales.astype(dtype), biases.astype(dtype))

    def unpack(self, packed: Packed, dtype: mx.Dtype) -> mx.array:
        """``[..., dim]`` of ``dtype``."""
        x = mx.dequantize(
            packed.codes,
            packed.scales.astype(dtype),
            packed.biases.astype(dtype),
            group_size=self.group_size,
            bits=self.bits,
        )
        return x if self.padded_dim == self.dim else x[..., : self.dim]


def scale_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Of scales and biases beside vectors of ``dtype``."""
    return mx.bfloat16 if dtype == mx.bfloat16 else mx.float16
