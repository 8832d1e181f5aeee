"""Paged attention of the CPU by a native operation (``native/cpu_attention.cpp``), in place of ``slices.py``.

It takes whole forwards, decode and prefill, over head-major pools of any form, and reads keys and values where
they are, through block tables. See the native source for how the work is cut and why a row's result does not
depend on other rows.
"""

from __future__ import annotations

import mlx.core as mx

from headrace.runner.cpu.operations import CpuOperations
from headrace.runner.kv.view import LayerView

# Spans of contexts that wait to be merged (kPartialFloats), and what each thread works in.
_WAITING_BYTES, _THREAD_BYTES = 16 << 20, 1 << 20


def scratch_bytes(threads: int) -> int:
    """What native attention holds at once beside its result, at most: a line of the memory plan."""
    return _WAITING_BYTES + threads * _THREAD_BYTES


class NativeAttention:
    """Attention by ``operations``; see ``paged_attention`` for the contract."""

    def __init__(self, operations: CpuOperations) -> None:
        self.operations = operations
        self._nothing = mx.zeros((0,), mx.float32)
        self._unmarked = mx.zeros((1,), mx.int32)

    def supports(self, queries: mx.array, view: LayerView) -> bool:
        """Whether this forward is one for it: over a head-major pool, through block tables."""
        pool = view.pool
        return (
            pool.head_major
            and view.group.tables is not None
            and queries.shape[-1] == pool.layers[view.layer].key_dim
        )

    def __call__(
        self,
        queries: mx.array,
        view: LayerView,
        scale: float,
        window: int | None,
        sinks: mx.array | None = None,
        softcap: float = 0.0,
    ) -> mx.array:
        """``queries [B, H, L, D]``; returns ``[B, H, L, value_dim]``, zeros for pads."""
        pool, layer, group = view.pool, view.pool.layers[view.layer], view.group
        assert group.tables is not None and group.bases is not None
        key, value = layer.key_packing, layer.value_packing
        index = view.layer
        out = self.operations.attend(
            queries.astype(mx.float32),
            group.tables,
            group.bases,
            view.batch.offsets,
            view.batch.ends,
            pool.marks[index] if pool.in_place else self._unmarked,
            self._nothing if sinks is None else sinks.astype(mx.float32),
            [pool.keys[index], *pool.key_affine[index], pool.values[index], *pool.value_affine[index]],
            pool.block_size,
            scale,
            window or 0,
            softcap,
            layer.bits or 0,
            layer.key_dim,
            layer.value_dim,
            0 if key is None else key.group_size,
            0 if value is None else value.group_size,
        )
        return out.astype(queries.dtype)
