"""ggml's quantized blocks -> MLX's packed form, without losing a bit of the quantized integers.

A row is a chain of blocks. In each of these types a value is ``scale * q + bias`` with one scale and bias per 32
values, which is MLX's affine packing with groups of 32: the integers are copied, scales and biases multiplied out.
Layouts are those of ggml's block structs; ``d`` and ``m`` are float16.

    Q4_0  d, 16 bytes: value i in the low, value i + 16 in the high half of byte i; bias -8 d
    Q4_1  d, m, 16 bytes as above; bias m
    Q5_0  d, 4 bytes with the fifth bits, 16 bytes; bias -16 d
    Q5_1  d, m, 4 bytes with the fifth bits, 16 bytes; bias m
    Q8_0  d, 32 signed bytes; stored + 128, bias -128 d
    Q4_K  256 values: d, dmin, 12 bytes with eight 6-bit scales and minima, 128 bytes
    Q5_K  the same with 32 bytes of fifth bits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# integers [blocks, values], scales and biases [blocks, groups]
Unpacked = tuple[Bytes, Floats, Floats]

GROUP: Final = 32


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of every block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _halves(quants: Bytes) -> Bytes:
    """Low halves of the bytes, then high halves, along the last axis."""
    return np.concatenate([quants & 0x0F, quants >> 4], axis=-1)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    return np.unpackbits(blocks[:, start : start + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Unpacked:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 2:]), scale, scale * -8


def _q4_1(blocks: Bytes) -> Unpacked:
    return _halves(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Unpacked:
    scale = _half(blocks, 0)
    return _halves(blocks[:, 6:]) | _fifth_bits(blocks, 2), scale, scale * -16


def _q5_1(blocks: Bytes) -> Unpacked:
    return _halves(blocks[:, 8:]) | _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Unpacked:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(0x80), scale, scale * -128


def _six_bit_pairs(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and biases [blocks, 8] of the K types: pairs 0-3 lie in 6 low bits, 4-7 are spread over the rest."""
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scale * scales, -minimum * minima


def _k_halves(quants: Bytes) -> Bytes:
    """128 bytes as 4 runs of 32: each run's low halves are one group, its high halves the next."""
    return _halves(quants.reshape(len(quants), 4, 32)).reshape(len(quants), 256)


def _q4_k(blocks: Bytes) -> Unpacked:
    return _k_halves(blocks[:, 16:]), *_six_bit_pairs(blocks)


def _q5_k(blocks: Bytes) -> Unpacked:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]
    high = ((fifth & 1) << 4).astype(np.uint8).reshape(len(blocks), 256)
    return _k_halves(blocks[:, 48:]) | high, *_six_bit_pairs(blocks)


# type -> (bits, bytes per block, unpack)
EXACT: Final[dict[str, tuple[int, int, Callable[[Bytes], Unpacked]]]] = {
    "Q4_0": (4, 18, _q4_0),
    "Q4_1": (4, 20, _q4_1),
    "Q5_0": (5, 22, _q5_0),
    "Q5_1": (5, 24, _q5_1),
    "Q8_0": (8, 34, _q8_0),
    "Q4_K": (4, 144, _q4_k),
    "Q5_K": (5, 176, _q5_k),
}


def packed_rows(kind: str, rows: Bytes, bits: int | None = None) -> tuple[npt.NDArray[np.uint32], Floats, Floats]:
    """Rows of ``kind`` [rows, bytes] as MLX words [rows, values * bits / 32], scales and biases [rows, groups].

    ``bits``: the type's own, or more.
    """
    own, block_bytes, unpack = EXACT[kind]
    bits = bits or own
    num_rows = len(rows)
    quants, scales, biases = unpack(rows.reshape(-1, block_bytes))
    width = quants.size // num_rows
    words = _pack(quants.reshape(num_rows, width), bits)
    return words, scales.reshape(num_rows, width // GROUP), biases.reshape(num_rows, width // GROUP)


def _pack(quants: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Integers below 2**bits as one little-endian stream of bits per row, in 32-bit words."""
    stream: Bytes
    if bits == 4:
        stream = quants[:, ::2] | (quants[:, 1::2] << np.uint8(4))
    elif bits == 8:
        stream = quants
    else:
        single = np.unpackbits(quants[:, :, None], axis=-1, count=bits, bitorder="little")
        stream = np.packbits(single.reshape(len(quants), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(stream).view(np.uint32)
