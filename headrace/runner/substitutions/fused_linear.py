"""Module substitution: projections of one input computed as one product.

``q_proj, k_proj, v_proj`` of an attention and ``gate_proj, up_proj`` of a feed-forward layer read the same input;
one product of the stacked weights costs less than two or three. The modules are replaced by parts that share the
stacked projection: the first part that sees an input computes it, the others take their columns. So the model's
code runs unmodified, whatever it does with the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.substitutions.narrow_linear import NarrowLinear
from headrace.runner.substitutions.packed_linear import PackedLinear

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Shared:
    """The stacked projection of the input seen last, until the last part took its columns.

    ``owner`` is the part that holds the stacked linear, which may be substituted there.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        self.owner: FusedPart | None = None
        self._widths = list(widths)
        self._cuts = list(itertools.accumulate(widths[:-1]))
        self._parts = len(widths)
        self._input: mx.array | None = None
        self._taken = 0
        self._columns: list[mx.array] = []

    def part(self, index: int, x: mx.array) -> mx.array:
        if x is not self._input:
            assert self.owner is not None, "the first part is made first"
            stacked = self.owner.stacked
            if isinstance(stacked, NarrowLinear):
                self._columns = stacked.parts(x, self._widths)
            else:
                self._columns = list(mx.split(stacked(x), self._cuts, axis=-1))
            self._input, self._taken = x, 0
        columns = self._columns[index]
        self._taken += 1
        if self._taken == self._parts:
            self._input, self._columns = None, []
        return columns


class FusedPart(nn.Module):  # type: ignore[misc]
    """One of the projections; the first one owns the stacked weights."""

    def __init__(self, shared: _Shared, index: int, stacked: nn.Module | None = None) -> None:
        super().__init__()
        self._shared = shared
        self._index = index
        if stacked is not None:
            self.stacked = stacked
            shared.owner = self

    def __call__(self, x: mx.array) -> mx.array:
        return self._shared.part(self._index, x)


def fuse_projections(
    model: nn.Module, kinds: Sequence[type] = (nn.Linear, nn.QuantizedLinear, PackedLinear)
) -> int:
    """Fuse all groups of ``kinds`` in ``model``; returns how many. Weights are moved layer by layer."""
    count = 0
    for _, module in model.named_modules():
        children = module.children()
        for names in GROUPS:
            linears = [children.get(name) for name in names]
            stacked = _stack(linears) if type(linears[0]) in kinds else None
            if stacked is None:
                continue
            shared = _Shared([_outputs(linear) for linear in linears])
            for index, name in enumerate(names):
                setattr(module, name, FusedPart(shared, index, stacked if index == 0 else None))
            del linears
            children = module.children()
            mx.eval(stacked.parameters())
            count += 1
    return count


def _blank(linear: Any) -> nn.Module:
    """A module of the same kind without weights."""
    if isinstance(linear, nn.QuantizedLinear):
        blank = nn.QuantizedLinear(32, 32, bias=False, group_size=32, bits=8)
        blank.clear()
        blank.group_size, blank.bits, blank.mode = linear.group_size, linear.bits, linear.mode
        return blank
    blank = nn.Linear(1, 1, bias=False)
    blank.clear()
    return blank


def _outputs(linear: Any) -> int:
    if isinstance(linear, NarrowLinear):
        return linear.matrix.form.outputs
    if isinstance(linear, PackedLinear):
        return linear.dense.shape[0]
    return int(linear.weight.shape[0])


def _stack(linears: Sequence[Any]) -> nn.Module | None:
    """The linears as one, or None when they cannot be: kinds, packings or biases differ."""
    kind = type(linears[0])
    if any(type(linear) is not kind for linear in linears):
        return None
    if kind is NarrowLinear or kind is PackedLinear:
        joined: nn.Module | None = linears[0].joined(linears[1:])
        return joined
    if kind not in (nn.Linear, nn.QuantizedLinear):
        return None
    names = set(linears[0].parameters())
    if any(set(linear.parameters()) != names for linear in linears):
        return None
    if len({(linear.weight.shape[1], linear.weight.dtype) for linear in linears}) != 1:
        return None
    if kind is nn.QuantizedLinear and len({(one.group_size, one.bits, one.mode) for one in linears}) != 1:
        return None
    stacked = _blank(linears[0])
    for name in names:
        stacked[name] = mx.concatenate([linear[name] for linear in linears], axis=0)
    stacked.freeze()
    return stacked
