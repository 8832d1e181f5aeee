"""Cases for the paged prefill kernel, and what attention by its definition makes of them.

Shared by the CPU tests of its source and the grid that runs on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from kernel_cases import DTYPES, slots_of, vectors

from headrace.runner.attention.random_pools import random_prompts
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import LayerView


@dataclass(frozen=True)
class Prompts:
    """One forward: row i has ``lengths[i]`` queries behind ``starts[i]`` positions.

    ``tiles`` of 16 rows per warp and ``splits`` of the context; 0: as the kernel chooses.
    """

    dtype: str = "bfloat16"
    widths: tuple[int, int] = (64, 64)
    ratio: int = 4
    kv_heads: int = 1
    starts: tuple[int, ...] = (37,)
    lengths: tuple[int, ...] = (9,)
    block_size: int = 16
    window: int | None = None
    sinks: bool = False
    softcap: float = 0.0
    bits: int | None = None
    tiles: int = 0
    splits: int = 0

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
        window = "" if self.window is None else f"-window{self.window}"
        extras = f"{'-sinks' if self.sinks else ''}{'-softcap' if self.softcap else ''}"
        rows = ",".join(f"{length}@{start}" for start, length in zip(self.starts, self.lengths, strict=True))
        widths = "x".join(map(str, self.widths))
        form = f"t{self.tiles}s{self.splits}b{self.block_size}"
        return f"{self.dtype}-{widths}-{self.ratio}x{self.kv_heads}{packed}{window}{extras}-{form}-{rows}"


def build(case: Prompts, seed: int = 0) -> tuple[mx.array, LayerView, mx.array | None]:
    """Queries, a view and sinks of a case. What no row owns is NaN in the pool."""
    queries, view = random_prompts(
        case.layer, case.heads, case.starts, case.lengths, case.block_size, case.window, seed=seed
    )
    tables, pool = np.array(view.group.tables), view.pool
    free = np.ones(pool.keys[0].shape[0], bool)
    for row, (start, length, first) in enumerate(zip(case.starts, case.lengths, view.group.firsts, strict=True)):
        free[slots_of(tables[row], np.arange(start + length - first), case.block_size)] = False
    where = mx.array(free)[:, None, None]

    def poisoned(x: mx.array) -> mx.array:
        return mx.where(where, mx.array(np.nan, x.dtype), x)

    if case.bits is None:
        pool.keys[0], pool.values[0] = poisoned(pool.keys[0]), poisoned(pool.values[0])
    else:
        pool.key_affine[0] = tuple(poisoned(x) for x in pool.key_affine[0])
        pool.value_affine[0] = tuple(poisoned(x) for x in pool.value_affine[0])
    sinks = np.random.default_rng(seed).normal(size=case.heads).astype(np.float32)
    return queries, view, mx.array(sinks) if case.sinks else None


def definition(case: Prompts, queries: mx.array, view: LayerView, sinks: mx.array | None) -> list[np.ndarray]:
    """Per row ``[H, length, value_dim]`` float64: softmax of scaled products of what the pool holds."""
    pool, layer, group = view.pool, case.layer, view.group
    keys = vectors(pool.keys[0], pool.key_affine[0], layer.key_packing)
    values = vectors(pool.values[0], pool.value_affine[0], layer.value_packing)
    asked = np.array(queries.astype(mx.float32), np.float64)
    tables, outputs = np.array(group.tables), []
    for row, (start, length) in enumerate(zip(case.starts, case.lengths, strict=True)):
        first = group.firsts[row]
        positions = np.arange(first, start + length)
        slots = slots_of(tables[row], positions - first, case.block_size)
        query = start + np.arange(length)[:, None]
        hidden = positions > query
        if case.window is not None:
            hidden |= positions <= query - case.window
        out = np.zeros((case.heads, length, layer.value_dim))
        for head in range(case.heads):
            scores = asked[row, head, :length] @ keys[slots, head // case.ratio].T * case.scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            scores = np.where(hidden, -np.inf, scores)
            if sinks is not None:
                sink = np.full((length, 1), float(np.array(sinks)[head]))
                scores = np.concatenate([scores, sink], axis=1)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[head] = weights[:, : len(slots)] @ values[slots, head // case.ratio]
        outputs.append(out)
    return outputs


def fault(case: Prompts, got: mx.array, expected: list[np.ndarray]) -> str | None:
    """What is wrong with an output ``[B, H, L, value_dim]``; None: it is right, and zero for pads.

    Weights are rounded to the type, relative to the largest of a row, and the output once more.
    """
    relative, absolute = {"float16": (3e-3, 2e-3), "bfloat16": (1.2e-2, 1.2e-2)}[case.dtype]
    found = np.array(got.astype(mx.float32), np.float64)
    if not np.isfinite(found).all():
        return "not finite"
    for row, (wanted, length) in enumerate(zip(expected, case.lengths, strict=True)):
        if np.abs(found[row, :, length:]).max(initial=0.0) > 0:
            return f"pads of row {row} are not zero"
        excess = np.abs(found[row, :, :length] - wanted) - relative * np.abs(wanted)
        if excess.max() > absolute:
            worst = np.unravel_index(excess.argmax(), excess.shape)
            place = row, *map(int, worst)
            return f"differs by {excess.max():.3g} more than allowed, at row, head, query, element {place}"
    return None
