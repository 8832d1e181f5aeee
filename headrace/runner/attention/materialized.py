"""The view for a model whose code does arithmetic on keys, values or masks itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from headrace.runner.attention.reference import materialize, materialized_mask
from headrace.runner.kv.view import LayerView


class MaterializedView(LayerView):
    """A ``LayerView`` that hands out the rows' whole context as padded arrays, and a boolean mask."""

    __slots__ = ()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        super().update_and_fetch(keys, values)
        return materialize(self)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return materialized_mask(self, N, self.window_or(window_size))
