"""Every use that Headrace makes of mlx-lm's internals, in one place.

mlx-lm gives model definitions. What we rely on beyond calling them is listed here, one function each, and
checked by ``tests/runner/test_mlx_lm_contract.py`` against the pinned version:

- a model's ``make_cache`` (or its layer count) tells which cache each layer wants;
- every ``mlx_lm.models.*`` module that attends through the shared function holds it under the name
  ``scaled_dot_product_attention``, looked up at call time, so rebinding the name redirects attention.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as _base
from mlx_lm.models import cache as _cache

ATTENTION_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class CacheKind:
    """What one entry of a model's cache list is.

    Attributes:
        kind: "full" (every position), "sliding" (a window), "recurrent" (fixed-size state) or "other".
        window: positions seen, own included, for "sliding".
        name: mlx-lm's class name, for messages.
    """

    kind: Literal["full", "sliding", "recurrent", "other"]
    window: int | None
    name: str


def cache_kinds(model: nn.Module) -> tuple[CacheKind, ...]:
    """One ``CacheKind`` per entry of the cache list that ``model`` expects."""
    return tuple(_kind_of(entry) for entry in _cache.make_prompt_cache(model))


def _kind_of(entry: Any) -> CacheKind:
    name = type(entry).__name__
    if type(entry) is _cache.KVCache:
        return CacheKind("full", None, name)
    if type(entry) is _cache.RotatingKVCache and entry.keep == 0:
        return CacheKind("sliding", int(entry.max_size), name)
    if type(entry) is _cache.ArraysCache:
        return CacheKind("recurrent", None, name)
    return CacheKind("other", None, name)


def one_sequence_cache(model: nn.Module) -> list[Any]:
    """mlx-lm's own cache for one sequence: the reference that tests and self-checks compare with."""
    return list(_cache.make_prompt_cache(model))


def bind_attention(dispatcher: Callable[..., mx.array]) -> int:
    """Rebind the attention function in every loaded mlx-lm model module; returns how many were rebound.

    The modules look the name up in their globals at each call, so this redirects already built models too.
    """
    count = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and hasattr(module, ATTENTION_NAME):
            setattr(module, ATTENTION_NAME, dispatcher)
            count += 1
    return count


def original_attention() -> Callable[..., mx.array]:
    """The shared attention function as mlx-lm defines it (of a module nobody rebinds twice)."""
    function = getattr(_base, ATTENTION_NAME)
    return getattr(function, "wrapped", function)  # type: ignore[no-any-return]
