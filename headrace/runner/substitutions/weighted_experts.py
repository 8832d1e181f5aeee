"""Module substitution, CPU: blocks of experts whose results are weighted and added up where they are computed.

A block is a router, a ``SwitchGLU`` (``narrow_experts.py``) and perhaps experts that see every row; mlx-lm's own
keeps a result of the hidden width for every choice of every row, multiplies and adds, on one thread. How logits of
a router become choices and shares is not read from a block's code: of the ways below the first one that gives what
the block gives is taken, else the block stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.substitutions.modules import agree, each_module, put
from headrace.runner.substitutions.narrow_experts import NarrowSwitchGLU

Route = Callable[[mx.array], tuple[mx.array, mx.array]]
Shared = Callable[[mx.array], mx.array]

_ROUTERS = ("gate", "router")
_EXPERTS = ("switch_mlp", "experts")
_SHARED: tuple[tuple[str, ...], ...] = ((), ("shared_experts",), ("shared_expert", "shared_expert_gate"))
_CHOICES = ("top_k", "num_experts_per_tok")
_TOLERANCE = 1e-4
_ROWS = 16


class WeightedExperts(nn.Module):  # type: ignore[misc]
    """``shares · experts(x) [+ shared experts(x)]``; the parts are the replaced block's own."""

    def __init__(self, inner: Any, route: Route, experts: str, shared: Shared | None) -> None:
        super().__init__()
        for name, child in inner.children().items():
            self[name] = child
        self._route, self._experts, self._shared = route, experts, shared

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self[self._experts].weighted(x, *self._route(x))
        return y if self._shared is None else y + self._shared(x)


def substitute_weighted_experts(model: nn.Module) -> int:
    """Replace what matches; returns how many blocks were replaced."""
    count = 0
    for path, module in each_module(model):
        made = _weighted(module)
        if made is not None:
            put(model, path, made)
            count += 1
    return count


def _weighted(module: Any) -> WeightedExperts | None:
    parts = _parts(module)
    if parts is None:
        return None
    router, experts, shared = parts
    x = mx.random.normal((1, _ROWS, module[experts].width), key=mx.random.key(0))
    expected = module(x)
    for route in _routes(module, router):
        made = WeightedExperts(module, route, experts, shared)
        try:
            if agree(expected, made(x), _TOLERANCE):
                return made
        except (TypeError, ValueError):  # a router that gives something else
            continue
    return None


def _parts(module: Any) -> tuple[str, str, Shared | None] | None:
    """Names of router and experts, and what shared experts compute; None: not such a block."""
    for router in _ROUTERS:
        for experts in _EXPERTS:
            for shared in _SHARED:
                if set(module) == {router, experts, *shared} and type(module[experts]) is NarrowSwitchGLU:
                    return router, experts, _shared(module, shared)
    return None


def _shared(module: Any, names: tuple[str, ...]) -> Shared | None:
    if not names:
        return None
    inner = module[names[0]]
    if len(names) == 1:
        return inner  # type: ignore[no-any-return]
    gate = module[names[1]]
    return lambda x: mx.sigmoid(gate(x)) * inner(x)


def _routes(module: Any, router: str) -> list[Route]:
    """Ways from a block's input to choices and shares."""
    routes: list[Route] = [module[router]]
    choices = next((getattr(module, name) for name in _CHOICES if hasattr(module, name)), None)
    if isinstance(choices, int):
        routes += [partial(way, module[router], choices) for way in (_of_chosen, _of_all)]
    return routes


def _of_chosen(router: nn.Module, choices: int, x: mx.array) -> tuple[mx.array, mx.array]:
    """Shares are a softmax over the chosen experts."""
    logits = router(x)
    chosen = _largest(logits, choices)
    return chosen, mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True)


def _of_all(router: nn.Module, choices: int, x: mx.array) -> tuple[mx.array, mx.array]:
    """Shares are those of a softmax over all experts."""
    shares = mx.softmax(router(x), axis=-1, precise=True)
    chosen = _largest(shares, choices)
    return chosen, mx.take_along_axis(shares, chosen, axis=-1)


def _largest(values: mx.array, count: int) -> mx.array:
    return mx.argpartition(values, kth=-count, axis=-1)[..., -count:]
