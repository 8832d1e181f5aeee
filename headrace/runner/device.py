"""The device MLX computes on, and its memory as the plan needs it.

Metal: ``mx.device_info()`` gives the recommended working set; memory is shared with the CPU. CUDA: the driver's
free and total memory. CPU: main memory as cgroups bound it. The Metal part has not been run on a Mac yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import mlx.core as mx

from headrace.core.machine import read_memory

DeviceKind = Literal["metal", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class Device:
    """What the runner computes on.

    Attributes:
        kind: "metal", "cuda" or "cpu".
        name: for people.
        total_bytes: memory of the device (of the machine where it is shared).
        working_set_bytes: what one process should use at most.
        free_bytes: what is free now.
    """

    kind: DeviceKind
    name: str
    total_bytes: int
    working_set_bytes: int
    free_bytes: int

    @property
    def block_size(self) -> int:
        """Token positions per KV block that suit this device."""
        return 16 if self.kind == "cpu" else 32


def read_device() -> Device:
    """The default device of MLX and its memory now."""
    info = mx.device_info()
    name = str(info.get("device_name", "unknown"))
    memory = read_memory()
    if mx.default_device() == mx.cpu:
        return Device("cpu", name, memory.total_bytes, memory.total_bytes, memory.available_bytes)
    if mx.metal.is_available():
        working_set = int(info["max_recommended_working_set_size"])
        return Device("metal", name, int(info["memory_size"]), working_set, memory.available_bytes)
    total = int(info["total_memory"])
    return Device("cuda", name, total, total, int(info.get("free_memory", total)))
