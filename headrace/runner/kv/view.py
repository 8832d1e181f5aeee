"""Views over the KV pools that speak mlx-lm's cache protocol, so that its model files run unmodified.

A model gets one ``LayerView`` per entry of its cache list. ``update_and_fetch`` writes the new keys and values
into the pool and returns two handles; attention (see ``attention/dispatch.py``) reads the pool through the
handle. A model whose code does arithmetic on keys or masks itself gets ``attention/materialized.py``'s view: the
same write, then the rows' whole context gathered into padded arrays and a boolean mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from headrace.runner.device_arrays import sent_together
from headrace.runner.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class RowBundle:
    """Rows of one query each and similar, short context, which a slicing reader gathers together instead.

    Attributes:
        rows: indices of the rows, on the host and as ``[b]``.
        tables: ``[b, W]`` int32 block ids, padded with the row's own last block.
        visible: ``[b, W * block_size]`` bool: which slots of those blocks the row's query sees.
    """

    rows: Sequence[int]
    index: mx.array
    tables: mx.array
    visible: mx.array


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where the rows of one forward live in one layer group.

    Attributes:
        window: positions seen, own included; None: all.
        slots: ``[B * L]`` int32, where this forward's tokens are written.
        runs: per row, ``(first slot, last slot + 1)`` pieces in position order that cover the positions
            ``firsts[row]`` … end of the row; for readers that slice.
        bundles: rows that are gathered together, for readers that slice; they have runs too.
        firsts: per row, position of the first slot in ``runs`` (and in ``tables``).
        tables: ``[B, num_blocks]`` int32 block ids for readers that gather, padded with the null block.
        bases: ``[B]`` int32 position of the first slot in ``tables``.
    """

    window: int | None
    slots: mx.array
    runs: Sequence[Sequence[tuple[int, int]]] = ()
    firsts: Sequence[int] = ()
    bundles: Sequence[RowBundle] = ()
    tables: mx.array | None = None
    bases: mx.array | None = None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything attention needs to know about one forward ``[B, L]``.

    Attributes:
        offsets: ``[B]`` int32, position of each row's first token.
        ends: ``[B]`` int32, positions in each row's context after this forward's write.
        starts: ``offsets`` on the host; empty for a compiled forward.
        lengths: per row, tokens that are not padding, on the host; empty for a compiled forward.
        groups: one per layer group.
    """

    offsets: mx.array
    ends: mx.array
    starts: Sequence[int]
    lengths: Sequence[int]
    groups: Sequence[GroupBatch]


def on_device(batch: ForwardBatch) -> ForwardBatch:
    """A gathering reader's batch whose arrays, which every layer reads, are in the device's own memory."""
    arrays = [batch.offsets, batch.ends]
    for group in batch.groups:
        assert group.tables is not None and group.bases is not None
        arrays += [group.slots, group.tables, group.bases]
    offsets, ends, *rest = sent_together(arrays)
    groups = [
        replace(group, slots=slots, tables=tables, bases=bases)
        for group, slots, tables, bases in zip(batch.groups, rest[::3], rest[1::3], rest[2::3], strict=True)
    ]
    return replace(batch, offsets=offsets, ends=ends, groups=groups)


class PagedMask:
    """Stands for "causal, inside the row's own context"; only the dispatcher understands it."""

    __slots__ = ("window",)

    def __init__(self, window: int | None) -> None:
        self.window = window


class KVHandle:
    """What ``update_and_fetch`` returns for K and V: a reference to a layer's rows in the pool."""

    __slots__ = ("view",)

    def __init__(self, view: LayerView) -> None:
        self.view = view


class LayerView:
    """One layer's cache in one forward, over the pool. Cheap: made anew for each forward.

    ``new``: this forward's keys and values ``[B, kv_heads, L, dim]``, once they have been written; of a prompt
    there may be more rows and positions, which repeat others (``attention/rotate_store.py``).
    """

    __slots__ = ("batch", "layer", "new", "pool")

    def __init__(self, pool: KVPool, layer: int, batch: ForwardBatch) -> None:
        self.pool = pool
        self.layer = layer
        self.batch = batch
        self.new: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        return self.batch.offsets

    @property
    def group(self) -> GroupBatch:
        return self.batch.groups[self.pool.layers[self.layer].group]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write this forward's keys and values ``[B, kv_heads, L, dim]``; hand out the context."""
        self.pool.write(self.layer, self.group.slots, keys, values)
        self.new = keys, values
        handle = KVHandle(self)
        return handle, handle

    def keys_and_values(self) -> Any:
        handle = KVHandle(self)
        return handle, handle

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of this layer for ``N`` new tokens (argument names are mlx-lm's)."""
        return PagedMask(self.window_or(window_size))

    def window_or(self, window_size: int | None) -> int | None:
        """The layer group's window, else the one that the model's code names."""
        return self.group.window if self.group.window is not None else window_size
