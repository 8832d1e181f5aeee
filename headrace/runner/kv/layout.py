"""From a built model to its KV layout: which cache every layer wants, and the shapes it will write.

The shapes come from the model itself: one lazy forward over one token through probe caches that note what
arrives. Nothing of that forward is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.core.layout import KVLayout, LayerGroup
from headrace.errors import StartupError
from headrace.runner.kv.packing import BITS, GROUP_SIZES
from headrace.runner.kv.pool import LayerShape
from headrace.runner.mlx_lm_adapter import CacheKind, cache_kinds


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """A model's attention layers and the layout the scheduler works with."""

    layers: tuple[LayerShape, ...]
    layout: KVLayout

    def unpacked(self) -> ModelLayout:
        """The same with vectors held as they come."""
        layers = tuple(replace(layer, bits=None) for layer in self.layers)
        groups = tuple(
            replace(group, bytes_per_token=_bytes_per_token(layers, index))
            for index, group in enumerate(self.layout.groups)
        )
        return ModelLayout(layers, KVLayout(self.layout.block_size, groups))


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


def read_layout(model: nn.Module, block_size: int, kv_cache_dtype: str = "auto") -> ModelLayout:
    """Probe ``model``; ``kv_cache_dtype``: "auto", "int8" or "int4".

    Raises:
        StartupError: a layer's cache is of a kind that cannot be paged, or does not get smaller when packed.
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
    layers = tuple(
        _held_as(kv_cache_dtype, _shape(probe, windows.index(kind.window)), index)
        for index, (probe, kind) in enumerate(zip(probes, kinds, strict=True))
    )
    groups = tuple(
        LayerGroup(
            name="full" if window is None else f"sliding_{window}",
            num_layers=sum(layer.group == index for layer in layers),
            bytes_per_token=_bytes_per_token(layers, index),
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
        # A layer that never writes (it reads another layer's cache): one value per slot keeps indices aligned.
        return LayerShape(group, 1, 1, 1, mx.float32)
    keys, values = probe.seen
    return LayerShape(group, keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype)


def _held_as(kv_cache_dtype: str, shape: LayerShape, index: int) -> LayerShape:
    """``shape`` with the bits that were asked for; a layer without KV of its own stays as it is."""
    if kv_cache_dtype == "auto" or shape.key_dim == 1:
        return shape
    packed = replace(shape, bits=BITS[kv_cache_dtype])
    if packed.bytes_per_token >= shape.bytes_per_token:
        raise StartupError(
            f"--kv-cache-dtype {kv_cache_dtype} saves nothing: layer {index} has heads of {shape.key_dim} and "
            f"{shape.value_dim} elements, {shape.bytes_per_token} bytes a token as they are and "
            f"{packed.bytes_per_token} packed in groups of {GROUP_SIZES[-1]} or more; leave it out"
        )
    return packed


def _bytes_per_token(layers: Sequence[LayerShape], group: int) -> int:
    return sum(layer.bytes_per_token for layer in layers if layer.group == group)
