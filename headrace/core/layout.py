"""Shape of a model's KV memory as the engine core sees it: layer groups, blocks, bytes. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one block pool and one block table per sequence.

    Attributes:
        name: "full", "sliding_1024" …
        num_layers: attention layers in the group.
        bytes_per_token: KV bytes of one position in all layers of the group, scales and padding included.
        window: positions that a query sees, its own included (None: all of them). A block whose last position
            is at or before ``position - window`` is never read again.
    """

    name: str
    num_layers: int
    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layer groups of a model; the first is a full-attention group where the model has one."""

    block_size: int
    groups: tuple[LayerGroup, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(group.bytes_per_token for group in self.groups)

    def block_bytes(self, group: int) -> int:
        return self.groups[group].bytes_per_token * self.block_size
