"""What substitutions share: where a module is put, when two results agree, and whether layers are only called."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.mlx_lm_adapter import SwitchLinear


def each_module(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """``named_modules``, of which none is held on to: what is replaced on the way is freed on the way."""
    found = model.named_modules()[::-1]
    while found:
        yield found.pop()


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at ``path``; one that is held in a list, too."""
    *parents, name = path.split(".")
    owner: Any = model
    for step in parents:
        owner = owner[int(step)] if isinstance(owner, list) else owner[step]
    if isinstance(owner, list):
        owner[int(name)] = module
    else:
        owner[name] = module


def show_as(module: nn.Module, inner: nn.Module) -> None:
    """Give ``module`` what a model's code may read of the ``inner`` that it stands for, such as use_sliding."""
    for name, value in vars(inner).items():
        if not name.startswith("_"):
            setattr(module, name, value)


def agree(expected: mx.array, got: mx.array, tolerance: float) -> bool:
    """Whether no value differs by ``tolerance`` of the largest expected one; False where one is not finite."""
    worst = mx.max(mx.abs(expected - got)) / (mx.max(mx.abs(expected)) + 1e-6)
    return bool((worst < tolerance).item())


def calls_only(model: nn.Module, kinds: tuple[type, ...]) -> bool:
    """Whether the model's code does no more with its layers of ``kinds`` than call them; ``model`` is used up.

    ``kinds``: of linear layers, embeddings and experts' linear layers.
    """
    for path, module in model.named_modules():
        if type(module) in kinds:
            put(model, path, _Experts(module) if type(module) is SwitchLinear else _Outline(module))
    try:
        model(mx.zeros((1, 2), mx.int32))
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


class _Outline(nn.Module):  # type: ignore[misc]
    """Gives results of the right shape and has nothing but calls."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._shape = tuple(inner.weight.shape)
        if type(inner) is nn.Embedding:
            self.as_linear = self._project

    def __call__(self, x: mx.array) -> mx.array:
        if mx.issubdtype(x.dtype, mx.integer):
            return mx.zeros((*x.shape, self._shape[1]))
        return self._project(x)

    def _project(self, x: mx.array) -> mx.array:
        return mx.zeros((*x.shape[:-1], self._shape[0]))


class _Experts(nn.Module):  # type: ignore[misc]
    """The same for a ``SwitchLinear``."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._outputs = int(inner.weight.shape[1])

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        shape = mx.broadcast_shapes(x.shape[:-2], indices.shape)
        return mx.zeros((*shape, x.shape[-2], self._outputs))
