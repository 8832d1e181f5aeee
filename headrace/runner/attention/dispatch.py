"""What takes the place of mlx-lm's shared attention: paged for our handles, the original otherwise."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from headrace.runner.attention.reference import paged_attention
from headrace.runner.kv.view import KVHandle, LayerView, PagedMask
from headrace.runner.mlx_lm_adapter import bind_attention, original_attention


class AttentionKernel(Protocol):
    """Attention of the forwards it supports; the contract is ``paged_attention``'s."""

    def supports(self, queries: mx.array, view: LayerView) -> bool: ...

    def __call__(
        self,
        queries: mx.array,
        view: LayerView,
        scale: float,
        window: int | None,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
    ) -> mx.array: ...


class AttentionDispatcher:
    """Callable with mlx-lm's signature; acts on the handle that a ``LayerView`` returned, not on ``cache``.

    ``wrapped`` is the original function, for models that run on mlx-lm's own caches. The first of ``kernels`` that
    supports a forward takes it; the reference takes the rest.
    """

    def __init__(self, *kernels: AttentionKernel) -> None:
        self.wrapped = original_attention()
        self.kernels = kernels

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        *,
        softcap: float = 0.0,
    ) -> mx.array:
        """``softcap`` is not mlx-lm's: our own modules name it, and always with a handle."""
        if not isinstance(keys, KVHandle):
            return self.wrapped(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        window = keys.view.group.window
        if isinstance(mask, PagedMask):
            window = mask.window
        elif isinstance(mask, mx.array):
            raise TypeError("the model brings its own attention mask")
        for kernel in self.kernels:
            if kernel.supports(queries, keys.view):
                return kernel(queries, keys.view, scale, window, sinks, softcap)
        return paged_attention(queries, keys.view, scale, window, sinks, softcap)


def install(*kernels: AttentionKernel | None) -> AttentionDispatcher:
    """Bind a dispatcher in all loaded mlx-lm model modules; call again after importing another one."""
    dispatcher = AttentionDispatcher(*(kernel for kernel in kernels if kernel is not None))
    bind_attention(dispatcher)
    return dispatcher
