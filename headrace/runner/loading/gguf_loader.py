"""Weights of GGUF files under mlx-lm's names, one tensor at a time.

Plain form: ggml's blocks are dequantized (by the ``gguf`` package, which knows every type) and cast. Packed form:
types whose integers MLX can hold are copied (``gguf_blocks``); the others are dequantized and packed with 8 bits.

Two things are stored differently from the checkpoints that mlx-lm expects, and are undone here:
- ``llama``, with experts (Mixtral) or without: rows of the q and k projections are interleaved for ggml's rotary
  layout, [heads, dim/2, 2] per head, and go back to [heads, 2, dim/2] (whole rows move, so packed rows move the
  same way);
- ``gemma3``: norm weights are stored with the 1 already added.

Matrices of experts are one tensor [experts, outputs, inputs], as in mlx-lm: its rows lie one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from headrace.checkpoint.gguf_file import GGUFTensor, read_gguf
from headrace.checkpoint.model_folder import ModelFiles
from headrace.errors import ModelFileError
from headrace.runner import mlx_lm_adapter
from headrace.runner.loading.gguf_blocks import EXACT, GROUP, packed_rows
from headrace.runner.loading.packing import Packing
from headrace.runner.loading.weight_piece import Piece

Array = npt.NDArray[Any]

PLAIN_TYPES: Final = ("F32", "F16", "BF16", "F64")
_NARROW_TYPES: Final = {"F16": mx.float16, "BF16": mx.bfloat16}
# Types whose scales and biases are numbers of float16 in the file, or 8, 16 or 128 times such a number.
_HALF_SCALES: Final = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
REPACKED_BITS: Final = 8
# Values handled at a time, so that a large embedding does not need its float32 form all at once.
TILE_VALUES: Final = 1 << 24

_OUTER: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
_MIXTRAL_LAYER: Final = {role: re.sub(r"^mlp\.", "block_sparse_moe.", path) for role, path in _LAYER.items()}
_GEMMA3_LAYER: Final = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYERS: Final = {"gemma3_text": _GEMMA3_LAYER, "mixtral": _MIXTRAL_LAYER}
_IGNORED: Final = ("rope_freqs.weight",)  # read into the configuration
_NAME: Final = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<role>[a-z0-9_]+)\.(?P<part>weight|bias)$")


def parameter_name(name: str, model_file: str) -> str:
    """mlx-lm's path of the GGUF tensor ``name``; ``name`` itself when it has none (then unexpected)."""
    match = _NAME.match(name)
    if match is None:
        return name
    roles = _LAYERS.get(model_file, _LAYER) if match["layer"] else _OUTER
    module = roles.get(match["role"])
    if module is None:
        return name
    prefix = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{prefix}{module}.{match['part']}"


def settle(files: ModelFiles, model: nn.Module) -> None:
    """Let the model adapt to which tensors exist (tied output weights); nothing is allocated."""
    mlx_lm_adapter.sanitize(model, {name: mx.zeros(tensor.shape) for name, tensor in _tensors(files).items()})


def packings(files: ModelFiles) -> dict[str, Packing]:
    """Packed modules in the packed form: every quantized matrix."""
    return {
        name.removesuffix(".weight"): Packing(
            EXACT[tensor.type][0] if tensor.type in EXACT else REPACKED_BITS, GROUP
        )
        for name, tensor in _tensors(files).items()
        if tensor.type not in PLAIN_TYPES
    }


def _packed_bits(tensor: GGUFTensor) -> int:
    return EXACT[tensor.type][0] if tensor.type in EXACT else REPACKED_BITS


def exact(files: ModelFiles) -> set[str]:
    """Paths of modules whose packed form has all the bits of the file."""
    return {name.removesuffix(".weight") for name, tensor in _tensors(files).items() if tensor.type in EXACT}


def sixteen_bits(files: ModelFiles) -> set[str]:
    """Paths of modules whose weights have 16 bits in the file."""
    return {
        name.removesuffix(".weight") for name, tensor in _tensors(files).items() if tensor.type in _NARROW_TYPES
    }


def pieces(
    files: ModelFiles,
    packed: Mapping[str, Packing],
    dtype: mx.Dtype,
    *,
    exact_scales: bool = False,
    narrow: Collection[str] = (),
) -> list[Piece]:
    """All parameters: modules in ``packed`` packed with scales in ``dtype``, the others plain in ``dtype``.

    ``exact_scales``: scales keep their bits instead, in float16 where they came so. ``narrow``: modules whose
    16-bit weights stay so.
    """
    made = []
    for name, tensor in _tensors(files).items():
        path = name.removesuffix(".weight")
        packing = packed.get(path)
        if packing is not None:
            scales = mx.float16 if exact_scales and tensor.type in _HALF_SCALES else dtype
            made.append(_packed_piece(files, name, tensor, packing, scales))
        else:
            made.append(
                _plain_piece(
                    files, name, tensor, _NARROW_TYPES.get(tensor.type, dtype) if path in narrow else dtype
                )
            )
    return made


def _tensors(files: ModelFiles) -> dict[str, GGUFTensor]:
    header = read_gguf(files.path)
    return {
        parameter_name(tensor.name, files.model_file): tensor
        for tensor in header.tensors
        if tensor.name not in _IGNORED
    }


def _plain_piece(files: ModelFiles, name: str, tensor: GGUFTensor, dtype: mx.Dtype) -> Piece:
    num_values = int(np.prod(tensor.shape))
    added = 1.0 if files.model_file == "gemma3_text" and name.endswith("norm.weight") else 0.0

    def make() -> dict[str, mx.array]:
        rows = _raw_rows(files, tensor)
        step = max(1, TILE_VALUES // tensor.shape[-1])
        tiles = []
        for start in range(0, len(rows), step):
            tile = (mx.array(_dequantized(tensor, rows[start : start + step])) - added).astype(dtype)
            mx.eval(tile)
            tiles.append(tile)
        whole = (tiles[0] if len(tiles) == 1 else mx.concatenate(tiles)).reshape(tensor.shape)
        return {name: _reordered(files, name, whole)}

    return Piece({name: tensor.shape}, num_values * dtype.size, make)


def _packed_piece(files: ModelFiles, name: str, tensor: GGUFTensor, packing: Packing, dtype: mx.Dtype) -> Piece:
    module = name.removesuffix(".weight")
    *outer, width = tensor.shape
    rows = math.prod(outer)
    shapes: dict[str, tuple[int, ...]] = {
        name: (*outer, width * packing.bits // 32),
        f"{module}.scales": (*outer, width // GROUP),
        f"{module}.biases": (*outer, width // GROUP),
    }

    def make() -> dict[str, mx.array]:
        raw = _raw_rows(files, tensor)
        step = max(1, TILE_VALUES // width)
        tiles = [_packed_tile(tensor, raw[start : start + step], packing, dtype) for start in range(0, rows, step)]
        parts = [mx.concatenate(list(column)) for column in zip(*tiles, strict=True)]
        return {
            path: _reordered(files, name, part.reshape(shape))
            for (path, shape), part in zip(shapes.items(), parts, strict=True)
        }

    nbytes = rows * (width * packing.bits // 8 + 2 * (width // GROUP) * dtype.size)
    return Piece(shapes, nbytes, make)


def _packed_tile(tensor: GGUFTensor, raw: Array, packing: Packing, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    if tensor.type in EXACT:
        words, scales, biases = (mx.array(part) for part in packed_rows(tensor.type, raw, packing.bits))
    else:
        values = mx.array(_dequantized(tensor, raw))
        words, scales, biases = mx.quantize(values, group_size=packing.group_size, bits=packing.bits)
    tile = (words, scales.astype(dtype), biases.astype(dtype))
    mx.eval(tile)
    return tile


def _raw_rows(files: ModelFiles, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes, [rows, bytes per row], mapped from the file."""
    num_rows = int(np.prod(tensor.shape[:-1])) if len(tensor.shape) > 1 else 1
    try:
        mapped = np.memmap(files.path, np.uint8, "r", tensor.offset, (num_rows, tensor.nbytes // num_rows))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{files.path.name}: tensor {tensor.name} cannot be read: {error}") from None
    return mapped


def _dequantized(tensor: GGUFTensor, raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values: npt.NDArray[np.float32] = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[tensor.type])
    except (NotImplementedError, KeyError):
        raise ModelFileError(f"tensor {tensor.name}: type {tensor.type} cannot be dequantized") from None
    return values


def _reordered(files: ModelFiles, name: str, array: mx.array) -> mx.array:
    """Rows (the first axis) in the order that mlx-lm's rotary layout wants."""
    if files.model_file in ("llama", "mixtral") and ".self_attn." in name:
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if heads is not None:
            return _uninterleaved(array, int(files.config[heads]))
    return array


def _uninterleaved(array: mx.array, num_heads: int) -> mx.array:
    rest = array.shape[1:]
    split = array.reshape(num_heads, array.shape[0] // num_heads // 2, 2, *rest)
    return split.swapaxes(1, 2).reshape(array.shape)
