"""Headers of GGUF files: metadata and tensor table, checked against the file's size.

A GGUF file is ``magic, version, tensor count, metadata count``, then the metadata (key, type, value), then the
tensor table (name, dimensions, type, offset), then, from the next multiple of ``general.alignment``, the data.
This parser exists because the ``gguf`` package's reader takes seconds on a vocabulary of 262,144 tokens.
Every count is compared with the bytes that are left before anything is built from it, so a header cannot make us
allocate more than a small multiple of the file's own size.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import ModelFileError

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_DIMENSIONS: Final = 4
MAX_ARRAY_ITEMS: Final = 1 << 24
MAX_ARRAY_DEPTH: Final = 3
MAX_NAME_BYTES: Final = 65535

# Value type id -> struct format of one little-endian scalar.
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING: Final = 8
_ARRAY: Final = 9

# Tensor type id -> (name, values per block, bytes per block), as ggml lays them out.
TENSOR_TYPES: Final = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: ``shape`` is outermost first (rows before columns), ``offset`` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A checked header. Metadata scalars are Python values, arrays are lists."""

    path: Path
    size: int
    version: int
    metadata: dict[str, object]
    tensors: tuple[GGUFTensor, ...]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, object]:
    """Metadata of the file at ``path``; raises ``ModelFileError`` for anything that is not a sound GGUF file."""
    return read_gguf(path).metadata


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Metadata and tensor table of the file at ``path``; no tensor data is read.

    Raises ``ModelFileError`` naming the file and the field at fault.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # to open a pipe would wait for whoever writes
        raise ModelFileError(f"{path.name}: not a GGUF file, but a folder, a pipe or a device")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelFileError(f"{path.name}: incomplete: {size} bytes are too few for a GGUF header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, size, data)
    except OSError as error:
        raise ModelFileError(f"{path.name}: cannot be read: {error.strerror or error}") from None


def _parse(path: Path, size: int, data: mmap.mmap) -> GGUFFile:
    if data[:4] != MAGIC:
        raise ModelFileError(f"{path.name}: not a GGUF file (starts with {data[:4]!r})")
    cursor = _Cursor(path.name, data, size, 4)
    version = cursor.unsigned32("version")
    if version not in VERSIONS:
        order = " (big-endian files are not supported)" if version & 0xFFFF == 0 else ""
        raise ModelFileError(f"{path.name}: GGUF version {version} is not supported, only 2 and 3{order}")
    num_tensors = cursor.count("tensor count", 8 + 4 + 4 + 8)
    num_pairs = cursor.count("metadata count", 8 + 4 + 1)
    metadata: dict[str, object] = {}
    for index in range(num_pairs):
        key = cursor.name(f"metadata key {index}")
        if key in metadata:
            raise ModelFileError(f"{path.name}: metadata key {key!r} appears twice")
        metadata[key] = cursor.value(key, cursor.unsigned32(key))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ModelFileError(f"{path.name}: general.alignment is {alignment!r}, not a power of two")
    entries = [cursor.tensor(index) for index in range(num_tensors)]
    start = -(-cursor.position // alignment) * alignment
    tensors = tuple(
        GGUFTensor(entry.name, entry.shape, entry.type, entry.offset + start, entry.nbytes) for entry in entries
    )
    _check_extents(path.name, size, tensors)
    return GGUFFile(path, size, version, metadata, tensors)


def _check_extents(file: str, size: int, tensors: tuple[GGUFTensor, ...]) -> None:
    """Names are unique, extents lie inside the file and do not overlap."""
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise ModelFileError(f"{file}: a tensor name appears twice in the tensor table")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise ModelFileError(f"{file}: tensor {tensor.name} overlaps the one before it")
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise ModelFileError(
                f"{file}: incomplete: tensor {tensor.name} ends at byte {end}, the file has {size} bytes"
            )


class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, file: str, data: mmap.mmap, size: int, position: int) -> None:
        self.file = file
        self.data = data
        self.size = size
        self.position = position

    def need(self, field: str, nbytes: int) -> None:
        left = self.size - self.position
        if nbytes > left:
            raise ModelFileError(f"{self.file}: incomplete: {field} needs {nbytes} bytes, {left} are left")

    def scalar(self, field: str, layout: str) -> int | float | bool:
        self.need(field, struct.calcsize(layout))
        value: int | float | bool
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def unsigned32(self, field: str) -> int:
        return int(self.scalar(field, "<I"))

    def unsigned64(self, field: str) -> int:
        return int(self.scalar(field, "<Q"))

    def count(self, field: str, item_bytes: int) -> int:
        """A count of items that take at least ``item_bytes`` each: no more than fit into the rest of the file."""
        count = self.unsigned64(field)
        self.need(f"{field} {count}", count * item_bytes)
        return count

    def name(self, field: str) -> str:
        length = self.unsigned64(field)
        if length > MAX_NAME_BYTES:
            raise ModelFileError(f"{self.file}: {field} has {length} bytes, {MAX_NAME_BYTES} are allowed")
        self.need(field, length)
        raw = self.data[self.position : self.position + length]
        self.position += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"{self.file}: {field} is not UTF-8") from None

    def value(self, key: str, kind: int, depth: int = 0) -> object:
        if kind == _STRING:
            return self.strings(key, 1)[0]
        if kind in _SCALARS:
            return self.scalar(key, _SCALARS[kind])
        if kind != _ARRAY:
            raise ModelFileError(f"{self.file}: metadata {key!r} has unknown value type {kind}")
        if depth >= MAX_ARRAY_DEPTH:
            raise ModelFileError(f"{self.file}: metadata {key!r} nests arrays more than {MAX_ARRAY_DEPTH} deep")
        return self.array(key, self.unsigned32(key), depth)

    def array(self, key: str, kind: int, depth: int) -> list[object]:
        layout = _SCALARS.get(kind)
        item_bytes = struct.calcsize(layout) if layout else {_STRING: 8, _ARRAY: 12}.get(kind, 1)
        count = self.count(key, item_bytes)
        if count > MAX_ARRAY_ITEMS:
            raise ModelFileError(f"{self.file}: metadata {key!r} has {count} items, {MAX_ARRAY_ITEMS} are allowed")
        if kind == _STRING:
            return list(self.strings(key, count))
        if layout is None:
            return [self.value(key, kind, depth + 1) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{layout[1]}", self.data, self.position)
        self.position += count * item_bytes
        return list(values)

    def strings(self, key: str, count: int) -> list[str]:
        """``count`` strings. Bytes that are not UTF-8 come as lone surrogates, so that distinct tokens stay so."""
        data, position, size = self.data, self.position, self.size
        length_at = struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            if start > size:
                raise ModelFileError(f"{self.file}: incomplete: metadata {key!r} runs past the end of the file")
            position = start + length_at(data, start - 8)[0]
            if position > size:
                raise ModelFileError(f"{self.file}: incomplete: metadata {key!r} runs past the end of the file")
            found.append(data[start:position].decode("utf-8", "surrogateescape"))
        self.position = position
        return found

    def tensor(self, index: int) -> GGUFTensor:
        """One entry of the tensor table; its offset still counts from the start of the data."""
        name = self.name(f"tensor {index}")
        num_dimensions = self.unsigned32(name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ModelFileError(f"{self.file}: tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self.unsigned64(name) for _ in range(num_dimensions)]))
        kind = self.unsigned32(name)
        offset = self.unsigned64(name)
        if kind not in TENSOR_TYPES:
            raise ModelFileError(f"{self.file}: tensor {name} has unknown type {kind}")
        type_name, block_values, block_bytes = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % block_values:
            raise ModelFileError(f"{self.file}: tensor {name} of shape {shape} cannot hold {type_name} blocks")
        num_values = 1
        for length in shape:
            num_values *= length
        return GGUFTensor(name, shape, type_name, offset, num_values // block_values * block_bytes)
