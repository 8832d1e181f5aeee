"""The KV pools: fixed arrays that hold every cached key and value, and their one owner.

Each attention layer has two arrays, K and V, allocated once. Slots (block id * block_size + offset) are one
axis of them; which one depends on the device:

    head-major   [kv_heads, num_slots, head_dim]   CPU: a run of slots is a slice per head, read without a copy
    token-major  [num_slots, kv_heads, head_dim]   GPU: a token is one contiguous row, written at once

A write is a functional scatter that MLX performs in place when the pool array has exactly one reference when
the step is started. So nobody but ``KVPool`` keeps these arrays across steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.core.step import BlockCopy


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's KV as the model produces it, and the layer group it belongs to."""

    group: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype

    @property
    def bytes_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size


class KVPool:
    """Owner of all K and V arrays of a model.

    Args:
        layers: one shape per attention layer, in the order of the model's cache list.
        num_blocks: blocks per layer group, the null block included.
        block_size: token positions per block.
        head_major: see the module docstring.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        head_major: bool,
    ) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size
        self.head_major = head_major
        self.keys = [self._allocate(layer, layer.key_dim, num_blocks) for layer in layers]
        self.values = [self._allocate(layer, layer.value_dim, num_blocks) for layer in layers]

    def _allocate(self, layer: LayerShape, dim: int, num_blocks: Sequence[int]) -> mx.array:
        slots = num_blocks[layer.group] * self.block_size
        shape = (layer.kv_heads, slots, dim) if self.head_major else (slots, layer.kv_heads, dim)
        return mx.zeros(shape, layer.dtype)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.keys, *self.values))

    @property
    def state(self) -> list[mx.array]:
        """All arrays, K then V, for a compiled step that takes and returns them."""
        return [*self.keys, *self.values]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        count = len(self.layers)
        self.keys, self.values = arrays[:count], arrays[count:]

    def write(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Store new keys and values.

        Args:
            layer: index of the attention layer.
            slots: ``[B * L]`` target slots, row by row; pads point into the null block.
            keys: ``[B, kv_heads, L, key_dim]``.
            values: ``[B, kv_heads, L, value_dim]``.
        """
        if self.head_major:
            self.keys[layer][:, slots] = _by_head(keys)
            self.values[layer][:, slots] = _by_head(values)
        else:
            self.keys[layer][slots] = _by_token(keys)
            self.values[layer][slots] = _by_token(values)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks inside their layer groups (copy-on-write), in order, in all layers of the group."""
        for batch in _independent(copies):
            for group in {copy.group for copy in batch}:
                sources = self._slots_of([copy.source for copy in batch if copy.group == group])
                targets = self._slots_of([copy.target for copy in batch if copy.group == group])
                for index, layer in enumerate(self.layers):
                    if layer.group == group:
                        self._copy_slots(index, sources, targets)

    def _copy_slots(self, layer: int, sources: mx.array, targets: mx.array) -> None:
        for arrays in (self.keys, self.values):
            if self.head_major:
                arrays[layer][:, targets] = arrays[layer][:, sources]
            else:
                arrays[layer][targets] = arrays[layer][sources]

    def _slots_of(self, blocks: Sequence[int]) -> mx.array:
        size = self.block_size
        return mx.array([block * size + offset for block in blocks for offset in range(size)])


def _independent(copies: Sequence[BlockCopy]) -> list[list[BlockCopy]]:
    """Split ``copies`` so that no batch touches a block that the same batch writes."""
    batches: list[list[BlockCopy]] = [[]]
    written: set[tuple[int, int]] = set()
    for copy in copies:
        if (copy.group, copy.source) in written or (copy.group, copy.target) in written:
            batches.append([])
            written = set()
        batches[-1].append(copy)
        written.add((copy.group, copy.target))
    return batches


def _by_head(x: mx.array) -> mx.array:
    """``[B, kv_heads, L, D]`` -> ``[kv_heads, B * L, D]``."""
    batch, heads, length, dim = x.shape
    return x.swapaxes(0, 1).reshape(heads, batch * length, dim)


def _by_token(x: mx.array) -> mx.array:
    """``[B, kv_heads, L, D]`` -> ``[B * L, kv_heads, D]``."""
    batch, heads, length, dim = x.shape
    return x.swapaxes(1, 2).reshape(batch * length, heads, dim)
