"""The KV pools: fixed arrays that hold every cached key and value, and their one owner.

Each attention layer has K and V, allocated once. Slots (block id * block_size + offset) are one axis of them;
which one depends on the device:

    head-major   [kv_heads, num_slots, head_dim]   CPU: a run of slots is a slice per head, read without a copy
    token-major  [num_slots, kv_heads, head_dim]   GPU: a token is one contiguous row, written at once

A layer with ``bits`` holds packed vectors: ``keys`` and ``values`` are uint32 codes with ``words`` in place of
``head_dim``, beside them scales and biases with ``groups`` in its place (see ``packing.py``).

Two ways to write. *In place* (``store.py``): a kernel of the GPU or a native operation of the CPU stores into
the arrays, which stay the same ones; writes and reads are ordered by marks. *Functional* (where neither is there,
or it fails its check): a scatter that MLX performs in place when the pool array has exactly one reference when
the step is started. So nobody but ``KVPool`` keeps these arrays across steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from headrace.core.step import BlockCopy
from headrace.runner.device_arrays import MARK_SHAPE
from headrace.runner.kv.packing import VectorPacking, scale_dtype
from headrace.runner.kv.store import Store, ordered


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer's KV as the model produces it, how it is held, and the layer group it belongs to.

    ``bits``: None holds vectors as they come, 8 or 4 packs them.
    """

    group: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    bits: int | None = None

    @property
    def key_packing(self) -> VectorPacking | None:
        return None if self.bits is None else VectorPacking.smallest(self.key_dim, self.bits)

    @property
    def value_packing(self) -> VectorPacking | None:
        return None if self.bits is None else VectorPacking.smallest(self.value_dim, self.bits)

    @property
    def bytes_per_token(self) -> int:
        """Of one position in the pool, scales, biases and padding included."""
        key, value = self.key_packing, self.value_packing
        if key is None or value is None:
            return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.size
        return self.kv_heads * (key.nbytes + value.nbytes)


# Scales and biases of one layer's keys or values; empty where they are not packed.
Affine = tuple[mx.array, ...]


class KVPool:
    """Owner of all K and V arrays of a model.

    Args:
        layers: one shape per attention layer, in the order of the model's cache list.
        num_blocks: blocks per layer group, the null block included.
        block_size: token positions per block.
        head_major: see the module docstring.
        store: writes in place; None: writes are functional.

    Attributes:
        keys: per layer, vectors or codes; ``values`` likewise.
        key_affine: per layer, ``(scales, biases)`` or nothing; ``value_affine`` likewise.
        marks: per layer, the mark of its newest write where writes are in place, else empty.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        head_major: bool,
        store: Store | None = None,
    ) -> None:
        assert store is None or store.head_major == head_major, "the store is for pools of another order"
        self.layers = tuple(layers)
        self._store = store
        self.marks = [] if store is None else [mx.zeros(MARK_SHAPE, mx.int32) for _ in layers]
        self.block_size = block_size
        self.head_major = head_major
        self.keys: list[mx.array] = []
        self.values: list[mx.array] = []
        self.key_affine: list[Affine] = []
        self.value_affine: list[Affine] = []
        for layer in layers:
            slots = num_blocks[layer.group] * block_size
            array, affine = self._allocate(layer, layer.key_dim, layer.key_packing, slots)
            self.keys.append(array)
            self.key_affine.append(affine)
            array, affine = self._allocate(layer, layer.value_dim, layer.value_packing, slots)
            self.values.append(array)
            self.value_affine.append(affine)

    def _allocate(
        self, layer: LayerShape, dim: int, packing: VectorPacking | None, slots: int
    ) -> tuple[mx.array, Affine]:
        def zeros(width: int, dtype: mx.Dtype) -> mx.array:
            shape = (layer.kv_heads, slots, width) if self.head_major else (slots, layer.kv_heads, width)
            return mx.zeros(shape, dtype)

        if packing is None:
            return zeros(dim, layer.dtype), ()
        dtype = scale_dtype(layer.dtype)
        return zeros(packing.words, mx.uint32), (zeros(packing.groups, dtype), zeros(packing.groups, dtype))

    def resize(self, num_blocks: Sequence[int], moves: Sequence[Mapping[int, int]]) -> None:
        """Put everything into arrays of ``num_blocks`` blocks per group, the null block included.

        ``moves``: per group, blocks to be found at another place (old id -> new id). Array by array, each
        evaluated before the next one: the peak is one array. No step may be outstanding.
        """
        for index, layer in enumerate(self.layers):
            slots = num_blocks[layer.group] * self.block_size
            sources = self._slots_of(list(moves[layer.group].keys()))
            targets = self._slots_of(list(moves[layer.group].values()))
            self.keys[index] = self._moved(self.keys[index], slots, sources, targets)
            self.values[index] = self._moved(self.values[index], slots, sources, targets)
            for affine in (self.key_affine, self.value_affine):
                affine[index] = tuple(self._moved(array, slots, sources, targets) for array in affine[index])

    def _moved(self, array: mx.array, slots: int, sources: mx.array, targets: mx.array) -> mx.array:
        axis = 1 if self.head_major else 0
        kept = min(slots, array.shape[axis])
        shape = list(array.shape)
        shape[axis] = slots
        moved = mx.zeros(shape, array.dtype)
        if self.head_major:
            moved[:, :kept] = array[:, :kept]
            if sources.size:
                moved[:, targets] = array[:, sources]
        else:
            moved[:kept] = array[:kept]
            if sources.size:
                moved[targets] = array[sources]
        mx.eval(moved)
        return moved

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def in_place(self) -> bool:
        """Whether writes are in place, so that steps may be started before earlier ones have been read."""
        return self._store is not None

    def written(self, layer: int, arrays: Sequence[mx.array]) -> list[mx.array]:
        """``arrays`` of the layer for MLX's operations that must see what was written to it; nothing is copied."""
        return mx.depends(list(arrays), [self.marks[layer]]) if self.in_place else list(arrays)

    def ordered(self, layer: int, tables: mx.array) -> mx.array:
        """``tables`` for a gather by MLX that must see what was written to the layer."""
        return ordered(tables, self.marks[layer] if self.in_place else None)

    @property
    def changes(self) -> list[mx.array]:
        """What a forward changes, for a compiled one to return: the marks, or all arrays."""
        return list(self.marks) if self.in_place else self.state

    @changes.setter
    def changes(self, arrays: list[mx.array]) -> None:
        if self.in_place:
            self.marks = list(arrays)
        else:
            self.state = arrays

    @property
    def state(self) -> list[mx.array]:
        """All arrays of the pools: K, V, then what belongs to packed ones."""
        affine = [array for arrays in (*self.key_affine, *self.value_affine) for array in arrays]
        return [*self.keys, *self.values, *affine]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        count = len(self.layers)
        self.keys, self.values = arrays[:count], arrays[count : 2 * count]
        rest = iter(arrays[2 * count :])
        self.key_affine = [tuple(next(rest) for _ in affine) for affine in self.key_affine]
        self.value_affine = [tuple(next(rest) for _ in affine) for affine in self.value_affine]

    def write(self, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """Store new keys and values, packed where the layer is.

        Args:
            layer: index of the attention layer.
            slots: ``[B * L]`` target slots, row by row; pads point into the null block.
            keys: ``[B, kv_heads, L, key_dim]``.
            values: ``[B, kv_heads, L, value_dim]``.
        """
        shape = self.layers[layer]
        if self._store is not None:
            if not self.head_major:
                keys, values = _by_token(keys), _by_token(values)
            self._write_in_place(self._store, layer, slots, keys, values)
            return
        order = _by_head if self.head_major else _by_token
        for arrays, packing, x in (
            ((self.keys[layer], *self.key_affine[layer]), shape.key_packing, order(keys)),
            ((self.values[layer], *self.value_affine[layer]), shape.value_packing, order(values)),
        ):
            for array, new in zip(arrays, (x,) if packing is None else packing.pack(x), strict=True):
                if self.head_major:
                    array[:, slots] = new
                else:
                    array[slots] = new

    def _write_in_place(self, store: Store, layer: int, slots: mx.array, keys: mx.array, values: mx.array) -> None:
        """``keys`` and ``values``: ``[B * L, kv_heads, dim]``; head-major: ``[B, kv_heads, L, dim]``."""
        shape = self.layers[layer]
        if shape.key_packing is None or shape.value_packing is None:
            new = [keys.astype(shape.dtype), values.astype(shape.dtype)]
            self._store_rows(store, layer, (self.keys[layer], self.values[layer]), new, slots)
            return
        key, value = shape.key_packing.pack(keys), shape.value_packing.pack(values)
        self._store_rows(store, layer, (self.keys[layer], self.values[layer]), (key.codes, value.codes), slots)
        affine = (*self.key_affine[layer], *self.value_affine[layer])
        self._store_rows(store, layer, affine, (*key[1:], *value[1:]), slots)

    def _store_rows(
        self,
        store: Store,
        layer: int,
        pools: Sequence[mx.array],
        rows: Sequence[mx.array],
        slots: mx.array,
    ) -> None:
        self.marks[layer] = store.write(pools, rows, slots, self.marks[layer])

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks inside their layer groups (copy-on-write), in order, in all layers of the group.

        Functional writes wait for the running step: a pool that is still being read when it is written would be
        copied as a whole.
        """
        for batch in _independent(copies):
            if self._store is not None:
                self._copy_in_place(self._store, batch)
                continue
            moved: list[tuple[mx.array, mx.array, mx.array]] = []
            for group in {copy.group for copy in batch}:
                sources = self._slots_of([copy.source for copy in batch if copy.group == group])
                targets = self._slots_of([copy.target for copy in batch if copy.group == group])
                for array in self._arrays_of(group):
                    moved.append((array, targets, array[:, sources] if self.head_major else array[sources]))
            mx.eval([blocks for _, _, blocks in moved])
            for array, targets, blocks in moved:
                if self.head_major:
                    array[:, targets] = blocks
                else:
                    array[targets] = blocks

    def _copy_in_place(self, store: Store, copies: Sequence[BlockCopy]) -> None:
        for group in {copy.group for copy in copies}:
            sources = self._slots_of([copy.source for copy in copies if copy.group == group])
            targets = self._slots_of([copy.target for copy in copies if copy.group == group])
            for index in (index for index, layer in enumerate(self.layers) if layer.group == group):
                taken = self.ordered(index, sources)
                pools: list[tuple[mx.array, ...]] = [(self.keys[index], self.values[index])]
                if self.key_affine[index]:
                    pools.append((*self.key_affine[index], *self.value_affine[index]))
                if self.head_major:
                    rows = [[pool[None, :, taken] for pool in some] for some in pools]
                else:
                    rows = [[pool[taken] for pool in some] for some in pools]
                for some, new in zip(pools, rows, strict=True):
                    self._store_rows(store, index, some, new, targets)

    def _arrays_of(self, group: int) -> list[mx.array]:
        return [
            array
            for index, layer in enumerate(self.layers)
            if layer.group == group
            for array in (
                self.keys[index],
                self.values[index],
                *self.key_affine[index],
                *self.value_affine[index],
            )
        ]

    def _slots_of(self, blocks: Sequence[int]) -> mx.array:
        size = self.block_size
        return mx.array([block * size + offset for block in blocks for offset in range(size)], mx.int32)


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
