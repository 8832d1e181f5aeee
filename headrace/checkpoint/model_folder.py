"""What lies at a model's path, checked before anything is loaded: ``describe(path) -> ModelFiles``.

Every fault is a ``ModelFileError``: one line that names the file and the field. File names are given without the
folder, except where the path itself is at fault.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.checkpoint import families
from headrace.checkpoint.config import positive_int, read_config, read_json_object, text_fields
from headrace.checkpoint.gguf_config import config_of
from headrace.checkpoint.gguf_file import read_gguf
from headrace.checkpoint.hub import staging_folder
from headrace.checkpoint.quantization import Quantization, read_quantization
from headrace.checkpoint.safetensors_file import TensorInfo, choose_files, read_folder_tensors
from headrace.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's files, described from headers alone.

    Attributes:
        path: the folder, or the ``.gguf`` file.
        kind: "folder" or "gguf".
        config: config.json, normalised (``headrace.checkpoint.config``); for GGUF built from its metadata.
        model_file: mlx-lm's name of the model definition.
        tensors: name -> description; the names are those in the files.
        weight_files: file name -> size in bytes, of the files that hold ``tensors``.
        quantization: how weights are packed, or None.
        warnings: one line each, for people.
    """

    path: Path
    kind: Literal["folder", "gguf"]
    config: dict[str, Any]
    model_file: str
    tensors: dict[str, TensorInfo]
    weight_files: dict[str, int]
    quantization: Quantization | None
    warnings: tuple[str, ...] = ()

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors as they lie in the files."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Types of the tensors, the one with the most bytes first."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.nbytes
        return tuple(dtype for dtype, _ in sizes.most_common())


def describe(path: str | os.PathLike[str]) -> ModelFiles:
    """Read and check the headers of the model at ``path`` (a folder or a ``.gguf`` file). Loads no weights."""
    path = Path(path).expanduser()
    try:
        if not path.exists():
            if path.name and staging_folder(path).exists():
                raise ModelFileError(f"{path}: incomplete: its download did not finish; run `model acquire` again")
            raise ModelFileError(f"{path}: no such file or folder")
        if path.is_dir():
            return _describe_folder(path)
    except OSError as error:
        name = os.path.basename(error.filename) if error.filename else str(path)
        raise ModelFileError(f"{name}: cannot be read: {error.strerror}") from None
    if not path.is_file():  # to open a pipe would wait for whoever writes
        raise ModelFileError(f"{path.name}: a model is a folder or a .gguf file, this is a pipe or a device")
    with_magic = path.suffix.lower() == ".gguf" or _starts_with_gguf(path)
    if not with_magic:
        raise ModelFileError(f"{path.name}: a model is a folder or a .gguf file, this is another kind of file")
    return _describe_gguf(path)


def _starts_with_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from None


def _describe_folder(folder: Path) -> ModelFiles:
    if not any(folder.iterdir()):
        raise ModelFileError(f"{folder.name}: the folder is empty")
    config = read_config(folder)
    model_file = families.model_file(config)
    files = choose_files(folder)
    if config.get("model_file") is not None:
        raise ModelFileError("config.json: model_file asks to run code from the checkpoint, which is not done")
    _add_separate_quantization(folder, config)
    quantization = read_quantization(config)
    tensors = read_folder_tensors(folder, files)
    warnings = [f"{name} is not part of the model and is ignored" for name in files.ignored]
    _check_counts(config)
    _check_tokenizer(folder)
    _settle_tied_embeddings(config, tensors)
    sizes = {name: (folder / name).stat().st_size for name in files.names}
    return ModelFiles(folder, "folder", config, model_file, tensors, sizes, quantization, tuple(warnings))


def _describe_gguf(path: Path) -> ModelFiles:
    header = read_gguf(path)
    config = config_of(header)
    tensors = {
        tensor.name: TensorInfo(tensor.name, path.name, tensor.type, tensor.shape, tensor.nbytes)
        for tensor in header.tensors
    }
    if not isinstance(header.metadata.get("tokenizer.ggml.tokens"), list):
        raise ModelFileError(f"{path.name}: metadata tokenizer.ggml.tokens is missing: no tokenizer")
    packed = [tensor for tensor in tensors.values() if tensor.dtype not in ("F32", "F16", "BF16", "F64")]
    quantization = Quantization("gguf", 0, 32, packed_in_file=False) if packed else None
    model_file = families.model_file(config)
    return ModelFiles(path, "gguf", config, model_file, tensors, {path.name: header.size}, quantization)


def _add_separate_quantization(folder: Path, config: dict[str, Any]) -> None:
    """NVIDIA ModelOpt writes its settings beside config.json."""
    separate = folder / "hf_quant_config.json"
    if "quantization" not in config and "quantization_config" not in config and separate.exists():
        settings = read_json_object(separate)
        config["quantization_config"] = {"quant_method": "modelopt", **settings}


def _check_counts(config: dict[str, Any]) -> None:
    """Fields that everything else relies on are positive integers where they are present."""
    text = text_fields(config)
    for field in ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size"):
        if not isinstance(text.get(field), list):  # a few architectures give one value per layer
            positive_int(text, field)


def _check_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [name for name in ("tokenizer.model", "tiktoken.model", "vocab.json") if (folder / name).exists()]
        hint = f" ({others[0]} alone is not enough: save it as tokenizer.json with transformers)" if others else ""
        raise ModelFileError(f"tokenizer.json: missing from the model folder{hint}")
    if path.stat().st_size == 0:
        raise ModelFileError("tokenizer.json: incomplete: 0 bytes")


def _settle_tied_embeddings(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> None:
    """Where the flag is missing, an output matrix in the files means that it is not tied to the embeddings.

    A bare decoder (an embedding model's checkpoint) has no output matrix, whatever the flag says.
    """
    text = config.get("text_config")
    level: dict[str, Any] = text if isinstance(text, dict) else config
    flag = level.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if flag is False and "embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
        config["tie_word_embeddings"] = level["tie_word_embeddings"] = True
    if flag is None and any(name.split(".")[-2:] == ["lm_head", "weight"] for name in tensors):
        config["tie_word_embeddings"] = False
        level["tie_word_embeddings"] = False
