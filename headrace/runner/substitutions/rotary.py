"""Module substitution, CPU with float32 activations: rotary position embeddings from tables made once a forward.

MLX's CPU backend computes angles, sines and cosines anew for queries and keys of every layer, and combines them in
a dozen passes. All variants that rotate halves, whatever frequencies and factors they have, map x = [x1 | x2] at a
position to

    [x1 * c - x2 * s | x1 * s + x2 * c],     so that [1 | 0] gives [c | s].

So the tables are read off the replaced module itself, once per forward, and one native operation applies them,
or one compiled loop where there is none. A module is replaced only after it gave the same output on random input
as its replacement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.cpu.operations import CpuOperations
from headrace.runner.timing import no_slower

_NAME = re.compile("rope|rotary", re.IGNORECASE)
_TOLERANCE = 1e-5
_CHECKED_POSITIONS = (0, 1, 7, 300, 1_000, 5_000, 100_000)

Offset = int | mx.array
Halves = tuple[mx.array, mx.array]


def _rotate(x1: mx.array, x2: mx.array, cosine: mx.array, sine: mx.array) -> Halves:
    return x1 * cosine - x2 * sine, x1 * sine + x2 * cosine


_rotate_compiled = mx.compile(_rotate, shapeless=True)


class _Tables:
    """Cosines and sines of the positions seen last; shared by all modules that rotate alike."""

    def __init__(self, rotary: nn.Module, dims: int) -> None:
        self.rotary = rotary
        self.dims = dims
        self._offset: Offset | None = None
        self._shape = (0, 0)
        self._tables: Halves | None = None

    def of(self, offset: Offset, rows: int, length: int) -> Halves:
        """``[rows, 1, length, dims / 2]`` each.

        A forward hands the same offset to all of its layers; an array among them is never changed in place.
        """
        if self._tables is None or not self._known(offset) or (rows, length) != self._shape:
            self._tables = self._read_off(offset, rows, length)
            self._offset, self._shape = offset, (rows, length)
        return self._tables

    def _known(self, offset: Offset) -> bool:
        if isinstance(offset, int) and isinstance(self._offset, int):
            return offset == self._offset
        return offset is self._offset

    def _read_off(self, offset: Offset, rows: int, length: int) -> Halves:
        half = self.dims // 2
        unit = mx.broadcast_to(mx.arange(self.dims) < half, (rows, 1, length, self.dims)).astype(mx.float32)
        turned = self.rotary(unit, offset=offset)
        return mx.contiguous(turned[..., :half]), mx.contiguous(turned[..., half:])


class TableRotary(nn.Module):  # type: ignore[misc]
    """Rotates float32 ``[B, H, L, dims]`` by tables, anything else as the replaced module does."""

    def __init__(self, inner: nn.Module, tables: _Tables, operations: CpuOperations | None = None) -> None:
        super().__init__()
        self.inner = inner
        self._tables = tables
        self._operations = operations

    @property
    def dims(self) -> int:
        """Width of a head that it rotates."""
        return self._tables.dims

    def tables_of(self, offset: Offset, rows: int, length: int) -> Halves:
        """Cosines and sines ``[rows, 1, length, dims / 2]`` of a forward's positions."""
        return self._tables.of(offset, rows, length)

    def __call__(self, x: mx.array, offset: Offset = 0) -> mx.array:
        tables = self._tables
        if x.ndim != 4 or x.shape[-1] != tables.dims or x.dtype != mx.float32:
            return self.inner(x, offset=offset)  # type: ignore[no-any-return]
        half = tables.dims // 2
        cosine, sine = tables.of(offset, x.shape[0], x.shape[2])
        if self._operations is not None:
            return self._operations.rotate(x, cosine, sine)
        return mx.concatenate([*_rotate_compiled(x[..., :half], x[..., half:], cosine, sine)], axis=-1)


def substitute_rotary(model: nn.Module, operations: CpuOperations | None = None) -> int:
    """Replace what matches; returns how many modules were replaced."""
    known: list[tuple[mx.array, _Tables]] = []
    replaced = []
    for path, module in model.named_modules():
        dims = getattr(module, "dims", getattr(module, "dim", None))
        if not _NAME.search(type(module).__name__) or not isinstance(dims, int) or dims % 2:
            continue
        sample = _sample(module, dims)
        if sample is None:
            continue
        tables = next((one for other, one in known if _equal(other, sample, one, module)), None)
        if tables is None:
            tables = _Tables(module, dims)
            if not _rotates_halves(TableRotary(module, tables)):
                continue
            if operations is not None and not _pays(TableRotary(module, tables, operations)):
                operations = None
            known.append((sample, tables))
        replaced.append((path, TableRotary(module, tables, operations)))
    model.update_modules(nn.utils.tree_unflatten(replaced))
    return len(replaced)


def _sample(module: nn.Module, dims: int) -> mx.array | None:
    """What a module does at positions near and far; None when it is called in another way."""
    try:
        return mx.stack([module(mx.ones((1, 1, 3, dims)), offset=first) for first in _CHECKED_POSITIONS])
    except (TypeError, ValueError):
        return None


def _equal(sample: mx.array, other: mx.array, tables: _Tables, module: nn.Module) -> bool:
    return type(tables.rotary) is type(module) and bool(mx.array_equal(sample, other))


def _pays(native: TableRotary) -> bool:
    """Whether the native operation is right and no slower than the compiled loop."""
    plain = TableRotary(native.inner, native._tables)
    x, offset = mx.random.normal((32, 4, 1, native._tables.dims), key=mx.random.key(1)), mx.arange(32)
    return _rotates_halves(native) and no_slower(lambda: native(x, offset), lambda: plain(x, offset))


def _rotates_halves(replacement: TableRotary) -> bool:
    module = replacement.inner
    x = mx.random.normal((2, 3, 5, replacement._tables.dims), key=mx.random.key(0))
    offsets: Sequence[Offset] = (*_CHECKED_POSITIONS, mx.array([3, 4_000]))
    for offset in offsets:
        expected = module(x, offset=offset)
        worst = mx.max(mx.abs(replacement(x, offset=offset) - expected))
        if not bool((worst <= _TOLERANCE * mx.max(mx.abs(expected))).item()):
            return False
    return True
