"""Paged decode attention by a kernel of our own, on CUDA and Metal: reads the pools in place, gathers nothing.

Same contract as ``reference.paged_attention`` for one query per row over token-major pools. Which shapes the
kernel takes is ``supports``; everything else goes to the reference. See ``paged_decode_source.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.runner.attention import paged_decode_source as source
from headrace.runner.layer_view import LayerView

# Thread blocks that keep a large GPU busy; the context is split until there are about this many.
BUSY_BLOCKS = 512
MIN_SPLIT_TOKENS = 128
MAX_SPLITS = 64
MAX_QUERIES_PER_BLOCK = 8


@dataclass(frozen=True, slots=True)
class _Shape:
    """Constants of one compiled form of the kernel."""

    head_dim: int
    kv_heads: int
    queries: int
    queries_per_block: int
    splits: int

    @property
    def lanes(self) -> int:
        """Lanes that hold one token's head vector, a power of two."""
        return 1 << (self.head_dim // 8 - 1).bit_length()


class PagedDecodeKernel:
    """The compiled kernel of one device; make one and keep it.

    Args:
        make: ``mx.fast.cuda_kernel`` or ``mx.fast.metal_kernel``.
        prelude: the matching prelude.
    """

    def __init__(self, make: Callable[..., Any], prelude: str) -> None:
        inputs = ["q", "k", "v", "tables", "bases", "ends", "sizes", "params", "sinks"]
        self._whole = make(
            name="paged_decode",
            input_names=inputs,
            output_names=["out"],
            source=source.DECODE_BODY,
            header=prelude + "#define WHOLE\n",
        )
        self._split = make(
            name="paged_decode_split",
            input_names=inputs,
            output_names=["part_out", "stats"],
            source=source.DECODE_BODY,
            header=prelude,
        )
        self._combine = make(
            name="paged_decode_combine",
            input_names=["parts", "stats", "sizes", "sinks"],
            output_names=["out"],
            source=source.COMBINE_BODY,
            header=prelude,
        )

    @staticmethod
    def for_device() -> PagedDecodeKernel | None:
        """The kernel of the default device, or None where there is none."""
        if mx.default_device() != mx.gpu:
            return None
        if mx.metal.is_available():
            return PagedDecodeKernel(mx.fast.metal_kernel, source.METAL_PRELUDE)
        return PagedDecodeKernel(mx.fast.cuda_kernel, source.CUDA_PRELUDE)

    @staticmethod
    def supports(queries: mx.array, view: LayerView) -> bool:
        """Whether this forward's shapes are ones the kernel takes."""
        layer = view.pool.layers[view.layer]
        return (
            queries.shape[2] == 1
            and not view.pool.head_major
            and layer.bits is None
            and layer.bits is None
            and layer.key_dim == layer.value_dim
            and layer.key_dim % 8 == 0
            and layer.key_dim <= 256
            and queries.dtype == layer.dtype
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
        """Attention of ``queries [B, H, 1, D]``; returns ``[B, H, 1, D]``."""
        layer = view.pool.layers[view.layer]
        rows, heads, _, dim = queries.shape
        tables = view.group.tables
        assert tables is not None and view.group.bases is not None
        context = tables.shape[1] * view.pool.block_size
        shape = _shape(rows, heads, layer.kv_heads, dim, context if window is None else min(context, window))
        sizes = mx.array([tables.shape[1], shape.splits, window or 0], mx.int32)
        sink_values = mx.zeros((1,), mx.float32) if sinks is None else sinks.astype(mx.float32)
        constants = [
            ("T", queries.dtype),
            ("D", dim),
            ("G", shape.queries),
            ("GT", shape.queries_per_block),
            ("KV", layer.kv_heads),
            ("BS", view.pool.block_size),
            ("HAS_SINKS", int(sinks is not None)),
            ("LP", shape.lanes),
        ]
        inputs = [
            queries.reshape(rows, heads, dim),
            view.pool.keys[view.layer],
            view.pool.values[view.layer],
            tables,
            view.group.bases,
            view.batch.ends,
            sizes,
            mx.array([scale, softcap], mx.float32),
            sink_values,
        ]
        threads = source.WARPS * 32
        launch = {
            "inputs": inputs,
            "template": constants,
            "grid": (shape.splits * threads, heads // shape.queries_per_block, rows),
            "threadgroup": (threads, 1, 1),
        }
        if shape.splits == 1:
            whole = {"output_shapes": [(rows, heads, dim)], "output_dtypes": [queries.dtype]}
            out: mx.array = self._whole(**launch, **whole)[0]
        else:
            per_split = [(rows, heads, shape.splits, dim), (rows, heads, shape.splits, 2)]
            parts = self._split(output_shapes=per_split, output_dtypes=[mx.float32, mx.float32], **launch)
            out = self._combined(parts, sizes, sink_values, queries, sinks is not None)
        return out[:, :, None]

    def _combined(
        self, parts: list[mx.array], sizes: mx.array, sinks: mx.array, queries: mx.array, has_sinks: bool
    ) -> mx.array:
        rows, heads, _, dim = queries.shape
        out: mx.array = self._combine(
            inputs=[*parts, sizes, sinks],
            template=[
                ("T", queries.dtype),
                ("D", dim),
                ("H", heads),
                ("HAS_SINKS", int(has_sinks)),
            ],
            grid=(dim, heads, rows),
            threadgroup=(dim, 1, 1),
            output_shapes=[(rows, heads, dim)],
            output_dtypes=[queries.dtype],
        )[0]
        return out


def _shape(rows: int, heads: int, kv_heads: int, dim: int, context: int) -> _Shape:
    queries = heads // kv_heads
    per_block = max(part for part in range(1, MAX_QUERIES_PER_BLOCK + 1) if queries % part == 0)
    blocks = rows * kv_heads * (queries // per_block)
    most = max(1, min(MAX_SPLITS, context // MIN_SPLIT_TOKENS))
    return _Shape(dim, kv_heads, queries, per_block, min(most, max(1, -(-BUSY_BLOCKS // blocks))))
