"""What headers alone tell about a model, as the plain data that ``model inspect`` prints."""

from __future__ import annotations

import math
from typing import Any, Final

from headrace.checkpoint.config import text_fields
from headrace.checkpoint.hub import read_record
from headrace.checkpoint.model_folder import ModelFiles
from headrace.checkpoint.safetensors_file import TensorInfo

_CONTEXT_FIELDS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)
_COMPANIONS: Final = (".json", ".jinja", ".txt", ".model")
_PLAIN_TYPES: Final = ("F32", "F16", "BF16", "F64")
# Tensors that belong to the packing of another one and are no parameters themselves.
_PACKING_PARTS: Final = (
    "scales",
    "biases",
    "qzeros",
    "g_idx",
    "global_scale",
    "weight_scale",
    "weight_scale_2",
    "weight_scale_inv",
    "input_scale",
)


def describe_files(files: ModelFiles) -> dict[str, Any]:
    """Source, files and family: everything that needs neither MLX nor weights."""
    folder = files.path if files.kind == "folder" else files.path.parent
    record = read_record(folder)
    return {
        "source": record.get("source"),
        "revision": record.get("revision"),
        "path": str(files.path),
        "kind": files.kind,
        "files": [{"name": name, "bytes": size} for name, size in _sizes(files).items()],
        "weights_bytes": files.weights_bytes,
        "family": _family(files),
    }


def _sizes(files: ModelFiles) -> dict[str, int]:
    if files.kind == "gguf":
        return files.weight_files
    others = {
        path.name: path.stat().st_size
        for path in sorted(files.path.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix in _COMPANIONS
    }
    return {**others, **files.weight_files}


def _family(files: ModelFiles) -> dict[str, Any]:
    config, text = files.config, text_fields(files.config)
    return {
        "type": config["model_type"],
        "architectures": list(config.get("architectures") or []),
        "definition": files.model_file,
        "dtype": text.get("dtype") or text.get("torch_dtype") or files.dtypes[0],
        "stored_as": list(files.dtypes),
        "max_context": max_context(files),
        "parameters": count_parameters(files),
        "layers": text.get("num_hidden_layers"),
        "vocab_size": text.get("vocab_size"),
        "quantization": _quantization(files),
        "vision": "vision_config" in config,
        "audio": "audio_config" in config,
        "mtp": bool(text.get("num_nextn_predict_layers")) or any(".mtp." in f".{name}" for name in files.tensors),
    }


def max_context(files: ModelFiles) -> int | None:
    """The context length that the configuration states, None when it states none."""
    fields = text_fields(files.config)
    return next((fields[name] for name in _CONTEXT_FIELDS if isinstance(fields.get(name), int)), None)


def _quantization(files: ModelFiles) -> dict[str, Any] | None:
    declared = files.quantization
    if declared is None:
        return None
    common = {
        "method": declared.method,
        "bits": declared.bits or None,
        "group_size": declared.group_size or None,
        "bits_per_weight": round(8 * files.weights_bytes / max(1, count_parameters(files)), 2),
    }
    if declared.method == "gguf":
        return common | {"types": [dtype for dtype in files.dtypes if dtype not in _PLAIN_TYPES]}
    return common | {"mode": declared.mode, "overrides": len(declared.overrides)}


def count_parameters(files: ModelFiles) -> int:
    """Number of weights, packed ones unpacked; scales and other parts of a packing do not count."""
    return sum(_values(files, name, tensor) for name, tensor in files.tensors.items())


def _values(files: ModelFiles, name: str, tensor: TensorInfo) -> int:
    stored = math.prod(tensor.shape)
    declared = files.quantization
    if files.kind == "gguf" or declared is None:
        return stored
    module, _, part = name.rpartition(".")
    if part in _PACKING_PARTS or part.endswith("_scales"):
        return 0
    if part == "qweight":
        return stored * 32 // declared.bits
    if part.endswith("_blocks") or part == "weight_packed":
        return tensor.nbytes * 8 // declared.bits
    if tensor.dtype == "U32" and f"{module}.scales" in files.tensors:
        override = declared.overrides.get(module)
        bits = override.get("bits", declared.bits) if isinstance(override, dict) else declared.bits
        return stored * 32 // int(bits)
    return stored
