"""Packed (quantized) weights: which modules have them, how, and back to plain weights.

A packed module has ``weight`` (uint32 words), ``scales`` and, for affine packing, ``biases``, one per group of
values along the last axis. Bits and group size are read off the shapes, so a per-layer override in the
configuration and the files cannot disagree unnoticed.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from headrace.checkpoint.quantization import Quantization
from headrace.errors import ModelFileError

# (bits, group size) -> mode, where scales are bytes
_BYTE_SCALE_MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
_PARTS = ("scales", "biases", "global_scale")


@dataclass(frozen=True, slots=True)
class Packing:
    """MLX's parameters of one packed module."""

    bits: int
    group_size: int
    mode: str = "affine"
    global_scale: bool = False


def find_packings(model: nn.Module, weights: Mapping[str, mx.array], declared: Quantization) -> dict[str, Packing]:
    """Packings by module path, for every module of ``model`` whose weights come packed.

    Raises ModelFileError where shapes and the module's width give no valid packing.
    """
    found = {}
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") and f"{path}.scales" in weights:
            found[path] = _packing(path, module, weights, declared)
    return found


def _packing(path: str, module: nn.Module, weights: Mapping[str, mx.array], declared: Quantization) -> Packing:
    width = int(module.weight.shape[-1])
    words, scales = weights.get(f"{path}.weight"), weights[f"{path}.scales"]
    if words is None:
        raise ModelFileError(f"incomplete: tensor {path}.weight is missing, {path}.scales is there")
    groups, stored_bits = int(scales.shape[-1]), int(words.shape[-1]) * 32
    if not groups or width % groups or stored_bits % width or words.dtype != mx.uint32:
        raise ModelFileError(
            f"tensor {path}.weight: {words.shape[-1]} words and {groups} scales per row do not pack {width} values"
        )
    bits, group_size = stored_bits // width, width // groups
    if scales.dtype == mx.uint8:
        mode = _BYTE_SCALE_MODES.get((bits, group_size))
        if mode is None:
            raise ModelFileError(f"tensor {path}.scales: no packing of {bits} bits in groups of {group_size}")
        takes = "global_scale" in inspect.signature(module.to_quantized).parameters
        return Packing(bits, group_size, mode, takes and f"{path}.global_scale" in weights)
    if declared.mode != "affine" and path not in declared.overrides:
        raise ModelFileError(f"tensor {path}.scales: config.json says {declared.mode}, whose scales are bytes")
    return Packing(bits, group_size)


def parts_of(weights: Mapping[str, mx.array], path: str) -> list[str]:
    """Names of the arrays that a packed module has."""
    return [part for part in ("weight", *_PARTS) if f"{path}.{part}" in weights]


def install(model: nn.Module, packings: Mapping[str, Packing]) -> None:
    """Replace the modules in ``packings`` by their packed forms (parameters lazy)."""

    def choose(path: str, module: nn.Module) -> bool | dict[str, object]:
        packing = packings.get(path)
        if packing is None:
            return False
        chosen: dict[str, object] = {"bits": packing.bits, "group_size": packing.group_size, "mode": packing.mode}
        if packing.global_scale:
            chosen["global_scale"] = True
        return chosen

    try:
        nn.quantize(model, class_predicate=choose)
    except ValueError as error:
        raise ModelFileError(f"config.json: quantization: {error}") from None


def dequantized(
    weights: Mapping[str, mx.array], packings: Mapping[str, Packing], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """``weights`` with every packed module's arrays replaced by one plain ``weight``; lazy.

    ``dtype`` None: that of the scales, bfloat16 where scales are bytes.
    """
    plain = dict(weights)
    for path, packing in packings.items():
        words, scales = plain.pop(f"{path}.weight"), plain[f"{path}.scales"]
        parts = {part: plain.pop(f"{path}.{part}") for part in _PARTS if f"{path}.{part}" in plain}
        biases = parts.get("biases")
        target = dtype or (mx.bfloat16 if scales.dtype == mx.uint8 else scales.dtype)
        if target == mx.float32 and biases is not None:
            # scale * q + bias is computed in the dtype of the scales: rounding to 16 bits here would stay
            scales, biases = scales.astype(target), biases.astype(target)
        plain[f"{path}.weight"] = mx.dequantize(
            words,
            scales,
            biases,
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
            global_scale=parts.get("global_scale"),
            dtype=target,
        )
    return plain


def with_eight_bits(
    weights: Mapping[str, mx.array], packings: Mapping[str, Packing], among: Collection[str]
) -> tuple[dict[str, mx.array], dict[str, Packing]]:
    """Modules ``among`` these with 5 or 6 affine bits, or mxfp4, as 8 affine bits of the same values; lazy.

    An mxfp4 value is 0, ±0.5, ±1, ±1.5, ±2, ±3, ±4 or ±6 times a power of two: half of that power times a whole
    number from -12 to 12.
    """
    repacked, as_packed = dict(weights), dict(packings)
    for path in packings.keys() & set(among):
        packing = packings[path]
        words, scales = weights[f"{path}.weight"], weights[f"{path}.scales"]
        if packing.mode == "mxfp4":
            ones = mx.full(scales.shape, 127, mx.uint8)
            values = mx.dequantize(words, ones, None, packing.group_size, packing.bits, "mxfp4", dtype=mx.bfloat16)
            halves = 0.5 * (scales.astype(mx.uint16) << 7).view(mx.bfloat16)
            codes, parts = 2 * values + 12, (halves, -12 * halves)
        elif packing.mode == "affine" and packing.bits in (5, 6):
            one, zero = mx.ones(scales.shape, mx.bfloat16), mx.zeros(scales.shape, mx.bfloat16)
            codes = mx.dequantize(words, one, zero, packing.group_size, packing.bits)
            parts = scales, weights[f"{path}.biases"]
        else:
            continue
        repacked[f"{path}.weight"] = codes.astype(mx.uint8).view(mx.uint32)
        repacked[f"{path}.scales"], repacked[f"{path}.biases"] = parts
        as_packed[path] = Packing(8, packing.group_size)
    return repacked, as_packed
