"""What takes the place of mlx-lm's shared attention: paged for our handles, the original otherwise."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from headrace.runner.attention.reference import paged_attention
from headrace.runner.layer_view import KVHandle, PagedMask
from headrace.runner.mlx_lm_adapter import bind_attention, original_attention


class AttentionDispatcher:
    """Callable with mlx-lm's signature; acts on the handle that a ``LayerView`` returned, not on ``cache``.

    ``wrapped`` is the original function: for models that run on mlx-lm's own caches.
    """

    def __init__(self) -> None:
        self.wrapped = original_attention()

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if not isinstance(keys, KVHandle):
            return self.wrapped(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        window = keys.view.group.window
        if isinstance(mask, PagedMask):
            window = mask.window
        elif isinstance(mask, mx.array):
            raise TypeError("the model brings its own attention mask")
        return paged_attention(queries, keys.view, scale, window, sinks)


def install() -> AttentionDispatcher:
    """Bind a dispatcher in all loaded mlx-lm model modules; call again after importing another one."""
    dispatcher = AttentionDispatcher()
    bind_attention(dispatcher)
    return dispatcher
