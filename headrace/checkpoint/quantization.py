"""What a checkpoint's configuration says about packed weights: MLX's own spelling and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.errors import ModelFileError

# method -> (bits, group size, MLX mode)
_FIXED_METHODS: Final = {"mxfp4": (4, 32, "mxfp4"), "mxfp8": (8, 32, "mxfp8")}
_COMPRESSED: Final = {
    "nvfp4-pack-quantized": (4, 16, "nvfp4"),
    "mxfp4-pack-quantized": (4, 32, "mxfp4"),
    "pack-quantized": (4, 32, "affine"),
}
MODES: Final = ("affine", "mxfp4", "mxfp8", "nvfp4")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights are packed.

    Attributes:
        method: "mlx", or Hugging Face's quant_method, or "gguf".
        bits, group_size, mode: MLX's parameters of most layers (0 bits: differs from tensor to tensor).
        overrides: module path -> its own parameters, or False where it is not packed.
        packed_in_file: whether the files hold MLX's own packing. False: awq and GGUF, repacked at load; fp8,
            turned into plain weights by the model's own conversion at load.
    """

    method: str
    bits: int
    group_size: int
    mode: str = "affine"
    overrides: dict[str, Any] = field(default_factory=dict)
    packed_in_file: bool = True


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """The quantization that ``config`` declares, None for plain weights; raises ``ModelFileError``."""
    own = config.get("quantization")
    if isinstance(own, dict) and "quant_method" not in own and "quant_algo" not in own:
        return _mlx(own)
    foreign = config.get("quantization_config")
    if not isinstance(foreign, dict):
        return None
    if "quant_method" not in foreign and "bits" in foreign and "group_size" in foreign:
        return _mlx(foreign)
    return _foreign(foreign)


def _mlx(entry: Mapping[str, Any]) -> Quantization:
    bits, group_size, mode = entry.get("bits"), entry.get("group_size"), entry.get("mode", "affine")
    if not isinstance(bits, int) or not 1 <= bits <= 8:
        raise ModelFileError(f"config.json: quantization.bits is {bits!r}")
    if not isinstance(group_size, int) or not 1 <= group_size <= 1024:
        raise ModelFileError(f"config.json: quantization.group_size is {group_size!r}")
    if mode not in MODES:
        raise ModelFileError(f"config.json: quantization.mode {mode!r} is not one of {', '.join(MODES)}")
    overrides = {path: value for path, value in entry.items() if isinstance(value, (dict, bool))}
    return Quantization("mlx", bits, group_size, mode, overrides)


def _foreign(entry: Mapping[str, Any]) -> Quantization:
    method = entry.get("quant_method")
    if method in _FIXED_METHODS:
        bits, group_size, mode = _FIXED_METHODS[method]
        return Quantization(method, bits, group_size, mode)
    if method == "fp8":
        if entry.get("scale_fmt") == "ue8m0" and list(entry.get("weight_block_size") or ()) == [32, 32]:
            return Quantization("fp8", 8, 32, "mxfp8")
        return Quantization("fp8", 8, 0, packed_in_file=False)
    if method == "compressed-tensors":
        known = _COMPRESSED.get(str(entry.get("format")))
        if known is None:
            raise _unsupported(f"compressed-tensors format {entry.get('format')!r}", _COMPRESSED)
        return Quantization(method, *known)
    if method == "modelopt":
        settings = entry.get("quantization", entry)
        algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
        if algorithm != "NVFP4":
            raise _unsupported(f"modelopt quant_algo {algorithm!r}", ("NVFP4",))
        return Quantization(method, 4, int(settings.get("group_size", 16)), "nvfp4")
    if method == "awq":
        if entry.get("bits", 4) != 4 or str(entry.get("version", "gemm")).lower() != "gemm":
            raise _unsupported(f"awq with {entry.get('bits')} bits, {entry.get('version')}", ("4 bits gemm",))
        return Quantization(method, 4, int(entry.get("group_size", 128)), packed_in_file=False)
    supported = [*_FIXED_METHODS, "fp8", "compressed-tensors", "modelopt", "awq"]
    raise _unsupported(f"quant_method {method!r}", supported)


def _unsupported(what: str, known: Any) -> ModelFileError:
    return ModelFileError(f"config.json: quantization_config: {what} cannot be loaded, only {', '.join(known)}")
