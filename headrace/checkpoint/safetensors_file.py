"""Headers of safetensors files and the rule for which files of a folder count. No tensor data is read.

A safetensors file is an 8-byte little-endian header length, that many bytes of JSON (name -> dtype, shape,
data_offsets), then the data. Every number is checked against the file's size before it is used.

Which files count, so that adapters, older copies and consolidated files are never mixed in:
1. with ``model.safetensors.index.json`` (or one other ``*.safetensors.index.json``): exactly the files it names;
2. without: ``model.safetensors`` when it exists; else the complete set ``model-00001-of-0000N.safetensors``;
   else every ``model*.safetensors``;
3. else the only ``*.safetensors`` of the folder whose name does not speak of adapters.
Names that begin with ``.`` never count.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import ModelFileError

MAX_HEADER_BYTES: Final = 100_000_000
MAX_DIMENSIONS: Final = 16

# Bits of one value.
DTYPE_BITS: Final = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
}

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors$")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint: ``dtype`` is safetensors' name or ggml's type, ``nbytes`` its bytes there."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_tensor_table(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one file by name; raises ``ModelFileError`` naming the file and what is wrong with it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ModelFileError(f"{path.name}: incomplete: {size} bytes are too few for a safetensors header")
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ModelFileError(f"{path.name}: header length {length} is more than {MAX_HEADER_BYTES} bytes")
            if length > size - 8:
                raise ModelFileError(f"{path.name}: incomplete: header length {length}, file size {size} bytes")
            raw = file.read(length)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from None
    header = _decode_header(path.name, raw)
    data_bytes = size - 8 - length
    extents: list[tuple[int, int, str]] = []
    table: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info, start = _tensor(path.name, name, entry)
        extents.append((start, start + info.nbytes, name))
        table[name] = info
    _check_extents(path.name, extents, data_bytes)
    return table


def _decode_header(file: str, raw: bytes) -> dict[str, object]:
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise ModelFileError(f"{file}: the header is not JSON") from None
    if not isinstance(header, dict):
        raise ModelFileError(f"{file}: the header is not a JSON object")
    return header


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(file: str, name: str, entry: object) -> tuple[TensorInfo, int]:
    """The tensor and the start of its data, counted from the end of the header."""
    if not isinstance(entry, dict):
        raise ModelFileError(f"{file}: tensor {name}: its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise ModelFileError(f"{file}: tensor {name}: unknown dtype {dtype!r}")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(_is_count(length) for length in shape)
    ):
        raise ModelFileError(f"{file}: tensor {name}: shape is not a list of lengths")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise ModelFileError(f"{file}: tensor {name}: data_offsets is not a pair of positions")
    num_bits = DTYPE_BITS[dtype]
    for length in shape:
        num_bits *= length
    start, end = offsets
    if end - start != -(-num_bits // 8):
        raise ModelFileError(
            f"{file}: tensor {name}: {dtype} of shape {shape} needs {-(-num_bits // 8)} bytes, "
            f"data_offsets give {end - start}"
        )
    return TensorInfo(name, file, dtype, tuple(shape), end - start), start


def _check_extents(file: str, extents: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Extents tile the data: no overlap, none past the end, no hole."""
    position = 0
    for start, end, name in sorted(extents):
        if start < position:
            raise ModelFileError(f"{file}: tensor {name}: its data_offsets overlap another tensor's")
        if end > data_bytes:
            raise ModelFileError(
                f"{file}: incomplete: tensor {name} ends at byte {end} of the data, the file has {data_bytes}"
            )
        if start > position:
            raise ModelFileError(f"{file}: {start - position} bytes before tensor {name} belong to no tensor")
        position = end
    if position != data_bytes:
        raise ModelFileError(f"{file}: {data_bytes - position} bytes after the last tensor belong to no tensor")


# -- which files ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that count, in order; ``index`` maps tensor to file name when there is an index."""

    names: tuple[str, ...]
    index: dict[str, str] | None = None
    ignored: tuple[str, ...] = ()


def choose_files(folder: Path) -> WeightFiles:
    """Apply the rule above to ``folder``. Raises ``ModelFileError`` when none counts or it is unclear which."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    found = [name for name in names if name.endswith(".safetensors")]
    index_file = index_name(names)
    if index_file is not None:
        index = read_index(folder / index_file)
        chosen = sorted(set(index.values()))
        return WeightFiles(tuple(chosen), index, tuple(name for name in found if name not in chosen))
    chosen = choose_names(found)
    return WeightFiles(tuple(chosen), None, tuple(name for name in found if name not in chosen))


def index_name(names: list[str]) -> str | None:
    """The index among the names of a folder's files."""
    if "model.safetensors.index.json" in names:
        return "model.safetensors.index.json"
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indexes) > 1:
        raise ModelFileError(
            f"{', '.join(indexes)}: more than one index, none of them model.safetensors.index.json"
        )
    return indexes[0] if indexes else None


def choose_names(found: list[str]) -> list[str]:
    """Of the sorted names of all .safetensors files, those that count when there is no index."""
    if "model.safetensors" in found:
        return ["model.safetensors"]
    shards = [(match, name) for name in found if (match := _SHARD.match(name)) and match["stem"] == "model"]
    if shards:
        count = int(shards[0][0]["count"])
        present = {int(match["index"]) for match, _ in shards if int(match["count"]) == count}
        missing = sorted(set(range(1, count + 1)) - present) if count <= 100_000 else []
        if missing or len(present) != len(shards):
            raise ModelFileError(
                f"{shards[0][1]}: incomplete: {len(present)} of {count} shards are here"
                + (f", number {missing[0]} is missing" if missing else ", and others of another count")
            )
        return [name for _, name in shards]
    named = [name for name in found if name.startswith("model")]
    if named:
        return named
    others = [name for name in found if "adapter" not in name.lower()]
    if len(others) == 1:
        return others
    if not others:
        raise ModelFileError("model.safetensors: incomplete: the folder has no .safetensors file with weights")
    raise ModelFileError(
        f"{', '.join(others[:4])}: several weight files and no index; name the right one model.safetensors"
    )


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name of an index; file names are plain names inside the folder."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise ModelFileError(f"{path.name}: not JSON") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{path.name}: weight_map is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(".safetensors"):
            raise ModelFileError(f"{path.name}: weight_map gives tensor {tensor} the file name {name!r}")
    return weight_map


def is_plain_name(name: str) -> bool:
    """Whether ``name`` stays inside the folder it is looked up in: no separators, parents, NUL or empty names."""
    return bool(name) and name not in (".", "..") and not any(mark in name for mark in ("/", "\\", "\0"))


def read_folder_tensors(folder: Path, files: WeightFiles) -> dict[str, TensorInfo]:
    """All tensors of the files that count; with an index its tensors are all there, in the files it names."""
    tensors: dict[str, TensorInfo] = {}
    for name in files.names:
        if not (folder / name).exists():
            raise ModelFileError(f"{name}: incomplete: the index names this file, it is not in the folder")
        for tensor, info in read_tensor_table(folder / name).items():
            if files.index is not None and tensor in files.index and files.index[tensor] != name:
                continue
            if tensor in tensors:
                raise ModelFileError(f"{name}: tensor {tensor} is also in {tensors[tensor].file}")
            tensors[tensor] = info
    for tensor, name in (files.index or {}).items():
        if tensor not in tensors:
            raise ModelFileError(f"{name}: incomplete: tensor {tensor}, which the index puts there, is missing")
    return tensors
