"""Cases for the paged decode kernel, and what attention by its definition makes of them.

Shared by the CPU tests of both source forms and the grid that runs on a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import mlx.core as mx
import numpy as np

from headrace.runner.attention.random_pools import random_case
from headrace.runner.kv.packing import Packed, VectorPacking
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import LayerView

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
WIDTHS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (576, 512), (40, 72))
# Rows of one block and of several, at block edges and beside them, and one of several hundred positions.
RAGGED = ((1, 15, 16, 17), (33, 1, 130), (200,), (31, 32, 64, 65, 1), (300, 2))


@dataclass(frozen=True)
class Case:
    """One point of the grid; ``splits``: 1 runs the kernel that writes the result, more runs two."""

    dtype: str = "float32"
    widths: tuple[int, int] = (64, 64)
    ratio: int = 1
    kv_heads: int = 2
    bits: int | None = None
    window: int | None = None
    sinks: bool = False
    softcap: float = 0.0
    splits: int = 1
    lengths: tuple[int, ...] = RAGGED[0]
    block_size: int = 16

    @property
    def heads(self) -> int:
        return self.ratio * self.kv_heads

    @property
    def layer(self) -> LayerShape:
        return LayerShape(0, self.kv_heads, *self.widths, DTYPES[self.dtype], self.bits)

    @property
    def scale(self) -> float:
        return float(self.widths[0] ** -0.5)

    def __str__(self) -> str:
        packed = "" if self.bits is None else f"-int{self.bits}"
        extras = f"{'-sinks' if self.sinks else ''}{'-softcap' if self.softcap else ''}"
        window = "" if self.window is None else f"-window{self.window}"
        widths = "x".join(map(str, self.widths))
        lengths = ",".join(map(str, self.lengths))
        return (
            f"{self.dtype}-{widths}-{self.ratio}x{self.kv_heads}{packed}{window}{extras}-s{self.splits}-{lengths}"
        )


AXES: dict[str, tuple[object, ...]] = {
    "dtype": tuple(DTYPES),
    "widths": WIDTHS,
    "ratio": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
    "bits": (None, 8, 4),
    "window": (None, 1, 16, 100),
    "sinks": (False, True),
    "softcap": (0.0, 2.0),
    "splits": (1, 3, 7),
    "lengths": RAGGED,
}


def pairwise(axes: dict[str, tuple[object, ...]], seed: int = 0) -> Iterator[Case]:
    """Cases in which every pair of values of two axes occurs, found greedily."""
    rng = random.Random(seed)
    names = list(axes)
    missing = {
        (a, x, b, y) for a, b in combinations(names, 2) for x in range(len(axes[a])) for y in range(len(axes[b]))
    }
    while missing:
        best: dict[str, int] = {}
        covered: set[tuple[str, int, str, int]] = set()
        for a, x, b, y in rng.sample(sorted(missing), min(20, len(missing))):
            chosen = {name: rng.randrange(len(axes[name])) for name in names} | {a: x, b: y}
            found = {(p, chosen[p], q, chosen[q]) for p, q in combinations(names, 2)} & missing
            if len(found) > len(covered):
                best, covered = chosen, found
        missing -= covered
        case = replace(Case(), **{name: axes[name][at] for name, at in best.items()})  # type: ignore[arg-type]
        yield replace(case, kv_heads=1) if case.ratio > 8 or case.widths[0] > 256 else case


def build(case: Case, seed: int = 0) -> tuple[mx.array, LayerView, mx.array | None]:
    """Queries, a view and sinks of a case. What no row owns is NaN in the pool."""
    queries, view = random_case(case.layer, case.heads, case.lengths, case.block_size, case.window, seed=seed)
    _poison(view, case.lengths)
    sinks = (
        mx.array(np.random.default_rng(seed).normal(size=case.heads).astype(np.float32)) if case.sinks else None
    )
    return queries, view, sinks


def _poison(view: LayerView, lengths: tuple[int, ...]) -> None:
    """NaN into all slots that hold no row's position."""
    tables, size = np.array(view.group.tables), view.pool.block_size
    slots = view.pool.keys[0].shape[0]
    free = np.ones(slots, bool)
    for row, length in enumerate(lengths):
        free[slots_of(tables[row], np.arange(length - view.group.firsts[row]), size)] = False
    where = mx.array(free)[:, None, None]
    pool = view.pool
    if pool.key_affine[0]:
        pool.key_affine[0] = tuple(mx.where(where, mx.array(np.nan, x.dtype), x) for x in pool.key_affine[0])
        pool.value_affine[0] = tuple(mx.where(where, mx.array(np.nan, x.dtype), x) for x in pool.value_affine[0])
    else:
        pool.keys[0] = mx.where(where, mx.array(np.nan, pool.keys[0].dtype), pool.keys[0])
        pool.values[0] = mx.where(where, mx.array(np.nan, pool.values[0].dtype), pool.values[0])


def slots_of(table: np.ndarray, positions: np.ndarray, size: int) -> np.ndarray:
    """Slots of positions counted from the table's first."""
    return table[positions // size] * size + positions % size  # type: ignore[no-any-return]


def definition(case: Case, queries: mx.array, view: LayerView, sinks: mx.array | None) -> np.ndarray:
    """``[B, H, value_dim]`` float64: softmax of scaled products, by its definition, of what the pool holds."""
    pool, layer = view.pool, case.layer
    keys = vectors(pool.keys[0], pool.key_affine[0], layer.key_packing)
    values = vectors(pool.values[0], pool.value_affine[0], layer.value_packing)
    asked = np.array(queries.astype(mx.float32), np.float64)[:, :, 0]
    tables, firsts = np.array(view.group.tables), view.group.firsts
    out = np.zeros((len(case.lengths), case.heads, layer.value_dim))
    for row, length in enumerate(case.lengths):
        oldest = 0 if case.window is None else max(0, length - case.window)
        slots = slots_of(tables[row], np.arange(oldest - firsts[row], length - firsts[row]), case.block_size)
        for kv_head in range(case.kv_heads):
            heads = slice(kv_head * case.ratio, (kv_head + 1) * case.ratio)
            scores = asked[row, heads] @ keys[slots, kv_head].T * case.scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            if sinks is not None:
                scores = np.concatenate([scores, np.array(sinks, np.float64)[heads, None]], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[row, heads] = weights[:, : len(slots)] @ values[slots, kv_head]
    return out


def vectors(array: mx.array, affine: tuple[mx.array, ...], packing: VectorPacking | None) -> np.ndarray:
    """``[slots, kv_heads, dim]`` float64 of a pool array; codes are unpacked here, not by MLX."""
    if packing is None:
        return np.array(array.astype(mx.float32), np.float64)
    packed = Packed(array, *affine)
    words = np.array(packed.codes)
    codes = (words[..., None] >> np.arange(0, 32, packing.bits, dtype=np.uint32)) & (2**packing.bits - 1)
    codes = codes.reshape(*words.shape[:-1], packing.groups, packing.group_size)
    scales, biases = (np.array(x.astype(mx.float32), np.float64)[..., None] for x in affine)
    x = codes * scales + biases
    return x.reshape(*words.shape[:-1], packing.padded_dim)[..., : packing.dim]  # type: ignore[no-any-return]


def fault(case: Case, got: np.ndarray, expected: np.ndarray) -> str | None:
    """What is wrong with an output, or None. 16-bit outputs are rounded once, to 8 or 11 bits."""
    relative, absolute = {"float32": (1e-4, 1e-4), "float16": (2e-3, 1e-3), "bfloat16": (8e-3, 2e-3)}[case.dtype]
    if not np.isfinite(got).all():
        return "not finite"
    excess = np.abs(got - expected) - relative * np.abs(expected)
    if excess.max() <= absolute:
        return None
    worst = np.unravel_index(excess.argmax(), excess.shape)
    return f"differs by {np.abs(got - expected).max():.3g}, most at row, head, element {tuple(map(int, worst))}"
