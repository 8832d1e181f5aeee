"""From a built model to its KV layout: which cache every layer wants, and the shapes it will write.

The shapes come from the model itself: one lazy forward over one token through probe caches that note what
arrives. Nothing of that forward is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.core.layout import KVLayout, LayerGroup
from headrace.errors import StartupError
from headrace.runner.kv_pool import LayerShape
from headrace.runner.mlx_lm_adapter import CacheKind, cache_kinds


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A model's attention layers and the layout the scheduler works with."""

    layers: tuple[LayerShape, ...]
    layout: KVLayout


class _ProbeCache:
    """Notes the shapes that one layer writes; speaks mlx-lm's cache protocol for a first token."""

    offset = 0

    def __init__(self) -> None:
        self.seen: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.seen = (keys, values)
        return keys, values

    def make_mask(self, *args: Any, **kwargs: Any) -> None:
        return None


def read_layout(model: nn.Module, block_size: int) -> ModelLayout:
    """Probe ``model``.

    Raises:
        StartupError: a layer's cache is of a kind that cannot be paged.
    """
    kinds = cache_kinds(model)
    unsupported = sorted({kind.name for kind in kinds if kind.kind not in ("full", "sliding")})
    if unsupported:
        raise StartupError(
            f"this model's layers use {', '.join(unsupported)}, which cannot be paged yet: "
            "only full and sliding-window attention are served"
        )
    probes = [_ProbeCache() for _ in kinds]
    model(mx.zeros((1, 1), mx.int32), cache=probes)
    windows = _windows(kinds)
    layers = tuple(_shape(probe, windows.index(kind.window)) for probe, kind in zip(probes, kinds, strict=True))
    groups = tuple(
        LayerGroup(
            name="full" if window is None else f"sliding_{window}",
            num_layers=sum(layer.group == index for layer in layers),
            bytes_per_token=sum(layer.bytes_per_token for layer in layers if layer.group == index),
            window=window,
        )
        for index, window in enumerate(windows)
    )
    return ModelLayout(layers, KVLayout(block_size, groups))


def _windows(kinds: Sequence[CacheKind]) -> list[int | None]:
    """The layer groups' windows, full attention first, then from the widest."""
    sliding = sorted({kind.window for kind in kinds if kind.window is not None}, reverse=True)
    full: list[int | None] = [None] if any(kind.window is None for kind in kinds) else []
    return [*full, *sliding]


def _shape(probe: _ProbeCache, group: int) -> LayerShape:
    if probe.seen is None:
        # A layer that never writes (it reads another layer's cache): one slot of one value keeps indices aligned.
        return LayerShape(group, 1, 1, 1, mx.float32)
    keys, values = probe.seen
    return LayerShape(group, keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype)
