"""Module substitution, CPU with float32 activations: RMS norms by a native operation.

The pattern is a class named so with ``weight`` and ``eps``, which multiplies by its weight or by one more (Gemma).
A module is replaced only after its replacement gave the same output on random input, and took no longer.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.cpu.operations import CpuOperations
from headrace.runner.timing import no_slower

_NAME = "RMSNorm"
_TOLERANCE = 1e-5
_TIMED_ROWS = 32


class NativeNorm(nn.Module):  # type: ignore[misc]
    """Norm of float32 by ``operations``; of anything else by the replaced module, which keeps the weight."""

    def __init__(self, inner: nn.Module, operations: CpuOperations, *, one_more: bool) -> None:
        super().__init__()
        self.inner = inner
        self._operations = operations
        self._factors: mx.array = 1.0 + inner.weight if one_more else inner.weight
        self._eps = float(inner.eps)

    @property
    def factors(self) -> mx.array:
        """What normed values are multiplied with."""
        return self._factors

    @property
    def eps(self) -> float:
        return self._eps

    @property
    def weight(self) -> mx.array:
        return self.inner.weight  # type: ignore[no-any-return]

    def __call__(self, x: mx.array) -> mx.array:
        if x.dtype != mx.float32:
            return self.inner(x)  # type: ignore[no-any-return]
        return self._operations.norm(x, self._factors, self._eps)


def substitute_norms(model: nn.Module, operations: CpuOperations) -> int:
    """Replace what matches; returns how many modules were replaced."""
    replaced = []
    forms: dict[tuple[type, int], bool | None] = {}
    for path, module in model.named_modules():
        if not type(module).__name__.endswith(_NAME) or not _plain(module):
            continue
        form = type(module), module.weight.size
        if form not in forms:
            forms[form] = _matching(module, operations)
        one_more = forms[form]
        if one_more is not None:
            replaced.append((path, NativeNorm(module, operations, one_more=one_more)))
    model.update_modules(nn.utils.tree_unflatten(replaced))
    return len(replaced)


def _plain(module: nn.Module) -> bool:
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
    return (
        isinstance(weight, mx.array) and weight.ndim == 1 and weight.dtype == mx.float32 and isinstance(eps, float)
    )


def _matching(module: nn.Module, operations: CpuOperations) -> bool | None:
    """``one_more`` of the replacement that computes what ``module`` does; None: there is none."""
    x = 3.0 * mx.random.normal((_TIMED_ROWS, 1, module.weight.size), key=mx.random.key(0))
    expected = module(x)
    bound = _TOLERANCE * mx.max(mx.abs(expected)) + 1e-6
    for one_more in (False, True):
        native = NativeNorm(module, operations, one_more=one_more)
        worst = mx.max(mx.abs(native(x) - expected))
        if bool((worst <= bound).item()):
            return one_more if no_slower(partial(native, x), partial(module, x)) else None
    return None
