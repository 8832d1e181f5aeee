"""Which requests are in a step right now, kept where it survives the worker's death.

A worker that is killed or crashes in native code cannot say what it was doing. So before each launch the engine
loop writes the ids of the requests in flight into a small file; the gateway reads it after the death, and the
requests named there are the suspects. A write happens only when the set changes, so steady decoding costs
nothing.

File: 8 bytes (length, CRC-32 of the payload, little-endian), then the ids, newline-separated UTF-8.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Set
from pathlib import Path

_HEADER = struct.Struct("<II")


class StepRecord:
    """Writer's side; owned by the engine loop."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._written: frozenset[str] | None = None

    def write(self, request_ids: Set[str]) -> None:
        if request_ids == self._written:
            return
        self._written = frozenset(request_ids)
        payload = "\n".join(sorted(request_ids)).encode()
        os.pwrite(self._fd, _HEADER.pack(len(payload), zlib.crc32(payload)) + payload, 0)

    def close(self) -> None:
        os.close(self._fd)


def read_step_record(path: str | Path) -> frozenset[str] | None:
    """Ids last written; None when there is no record or it was torn by the death itself."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return None
    if len(data) < _HEADER.size:
        return None
    length, checksum = _HEADER.unpack_from(data)
    payload = data[_HEADER.size : _HEADER.size + length]
    if len(payload) != length or zlib.crc32(payload) != checksum:
        return None
    return frozenset(payload.decode().split("\n")) if payload else frozenset()
