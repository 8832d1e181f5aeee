"""Module substitution, CPU with float32 activations: gated feed-forward layers with a fast activation.

The pattern is ``down(act(gate(x)) * up(x))`` with act SiLU or tanh-GELU, whatever the class is called; the gate
is a native operation where there is one, else a compiled function. A module is replaced only after it gave the
same output on random input as its replacement does with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.cpu.elementwise import gelu_gate, silu_gate
from headrace.runner.cpu.operations import CpuOperations
from headrace.runner.substitutions.narrow_linear import NarrowLinear
from headrace.runner.timing import no_slower

Gate = Callable[[mx.array, mx.array], mx.array]
_NAMES = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = 1e-4


class GatedMLP(nn.Module):  # type: ignore[misc]
    """``down(gate(x) gated with up(x))``; the projections are the replaced module's own."""

    def __init__(self, inner: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (inner[name] for name in _NAMES)
        self._gate = gate

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self._gate(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


def substitute_gated_mlps(model: nn.Module, operations: CpuOperations | None = None) -> int:
    """Replace what matches; returns how many modules were replaced."""
    found = [(path, module) for path, module in model.named_modules() if _matches(module)]
    replaced = []
    gates: dict[type, Gate | None] = {}
    for path, module in found:
        kind = type(module)
        if kind not in gates:
            gates[kind] = _equal_gate(module, operations)
        gate = gates[kind]
        if gate is not None:
            replaced.append((path, GatedMLP(module, gate)))
    model.update_modules(nn.utils.tree_unflatten(replaced))
    return len(replaced)


def _matches(module: nn.Module) -> bool:
    children = module.children()
    kinds = (nn.Linear, NarrowLinear)
    return set(children) == set(_NAMES) and all(isinstance(children[name], kinds) for name in _NAMES)


def _equal_gate(module: nn.Module, operations: CpuOperations | None) -> Gate | None:
    """The gate with which a ``GatedMLP`` computes what ``module`` does; a native one where it pays."""
    if isinstance(module.gate_proj, NarrowLinear):
        inputs = module.gate_proj.matrix.form.inputs
    elif module.gate_proj.weight.dtype == mx.float32:
        inputs = module.gate_proj.weight.shape[1]
    else:
        return None
    x = mx.random.normal((2, inputs), key=mx.random.key(0))
    expected = module(x)
    scale = mx.max(mx.abs(expected)) + 1e-6
    gates: list[Gate] = [silu_gate, gelu_gate]
    if operations is not None:
        gates = [partial(operations.gate, gelu=gelu) for gelu in (False, True)] + gates
    for place, gate in enumerate(gates):
        worst = mx.max(mx.abs(GatedMLP(module, gate)(x) - expected)) / scale
        if bool((worst < _TOLERANCE).item()) and (place >= len(gates) - 2 or _pays(gate, gates[place + 2])):
            return gate
    return None


def _pays(native: Gate, other: Gate) -> bool:
    a, b = mx.random.normal((2, 32, 1, 1536), key=mx.random.key(1))
    return no_slower(lambda: native(a, b), lambda: other(a, b))
