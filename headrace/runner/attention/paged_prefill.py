"""Attention of prompts behind prefixes by a kernel of our own, on CUDA: reads the pools in place.

Same contract as ``reference.paged_attention`` for several queries per row over token-major pools. Rows of one
forward may stand behind prefixes of different lengths; nothing is planned or compiled for a length. Which shapes
the kernel takes is ``refusal``, which forwards it is for ``supports``. See ``paged_prefill_source.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.runner.attention import paged_decode_source
from headrace.runner.attention import paged_prefill_source as source
from headrace.runner.attention.gathered_prefill import reads_new
from headrace.runner.attention.paged_decode import pool_names
from headrace.runner.device_arrays import DeviceConstants
from headrace.runner.kernels.language import cuda_kernel
from headrace.runner.kv.packing import VectorPacking
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import LayerView

# Thread blocks that a large GPU runs at once: two on each multiprocessor.
BUSY_BLOCKS = 264
# Positions of a split, at least: a pass over fewer costs less than what combines them (one H200).
MIN_SPLIT = 4096
MAX_SPLITS = 16
MAX_WIDTH = 256
# Queries of a row times positions that they see, from which on gathering pays, once its shapes are planned.
MOST_PRODUCTS = 2048 * 8192
# Widest vectors for which a warp's registers hold two tiles of 16 rows; and 64 keys' scores beside them.
_WIDE = 128
_NARROW = 64


def input_names(bits: int | None) -> list[str]:
    """Of the kernel over a pool that is packed to ``bits``, or not."""
    return ["q", *pool_names(bits), "tables", "bases", "offsets", "ends", "sizes", "params", "sinks", "mark"]


@dataclass(frozen=True, slots=True)
class Form:
    """Constants of one compiled form; ``tiles`` of 16 rows per warp."""

    layer: LayerShape
    heads: int
    tiles: int
    has_softcap: bool

    @property
    def rows(self) -> int:
        """Of a block."""
        return 64 * self.tiles

    def blocks(self, length: int) -> int:
        """For a chunk of ``length`` positions."""
        return -(-length * (self.heads // self.layer.kv_heads) // self.rows) * self.layer.kv_heads

    @property
    def keys(self) -> int:
        """That are multiplied at a time."""
        return 64 if max(self.layer.key_dim, self.layer.value_dim) <= _NARROW else 32

    @property
    def template(self) -> list[tuple[str, Any]]:
        layer = self.layer
        constants: list[tuple[str, Any]] = [
            ("T", layer.dtype),
            ("DK", layer.key_dim),
            ("DV", layer.value_dim),
            ("G", self.heads // layer.kv_heads),
            ("KV", layer.kv_heads),
            ("MT", self.tiles),
            ("BN", self.keys),
            ("HAS_SOFTCAP", int(self.has_softcap)),
        ]
        key, value = layer.key_packing, layer.value_packing
        if key is not None and value is not None:
            constants += [("BITS", layer.bits), ("GK", key.group_size), ("GV", value.group_size)]
        return constants

    @property
    def shared_bytes(self) -> int:
        """Queries, and two tiles of keys and of values; packed: one, and the codes and scales of the next."""
        key, value = _row_bytes(self.layer.key_dim), _row_bytes(self.layer.value_dim)
        packings = [packing for packing in (self.layer.key_packing, self.layer.value_packing) if packing]
        coming = sum(map(_packed_bytes, packings)) if packings else key + value
        return self.rows * key + self.keys * (key + value + coming)


class PagedPrefillKernel:
    """The compiled kernel of one device; make one and keep it.

    Args:
        make: ``cuda_kernel``.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._constants = DeviceConstants()
        self._made: dict[tuple[Any, ...], Any] = {}
        self._combine = make(
            name="paged_prefill_combine",
            input_names=["parts", "stats", "sizes", "sinks"],
            output_names=["out"],
            source=paged_decode_source.COMBINE_BODY,
            header=paged_decode_source.CUDA_PRELUDE,
        )

    @staticmethod
    def for_device() -> PagedPrefillKernel | None:
        """The kernel of the default device, unchecked; None where there is none."""
        if mx.default_device() != mx.gpu or mx.metal.is_available():
            return None
        return PagedPrefillKernel(cuda_kernel)

    @staticmethod
    def supports(queries: mx.array, view: LayerView) -> bool:
        """Whether this is a forward of prompts whose shapes the kernel takes, and that it is the best for."""
        layer = view.pool.layers[view.layer]
        return (
            queries.shape[2] > 1
            and bool(view.batch.lengths)
            and not view.pool.head_major
            and refusal(layer, queries.shape[1], view.pool.block_size) is None
            and queries.dtype == layer.dtype
            and _is_best(view, queries.shape[2])
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
        """Attention of ``queries [B, H, L, key_dim]``; returns ``[B, H, L, value_dim]``, zeros for pads."""
        layer, batch = view.pool.layers[view.layer], view.batch
        rows, heads, length, _ = queries.shape
        ends = (start + count for start, count in zip(batch.starts, batch.lengths, strict=True))
        context = max(end - first for end, first in zip(ends, view.group.firsts, strict=True))
        if window is not None:
            context = min(context, window + length)
        form, splits = _chosen(layer, heads, rows, length, context, has_softcap=softcap > 0)
        launch = {
            "inputs": self._inputs(queries, view, scale, window, sinks, softcap),
            "template": form.template,
            "grid": (form.blocks(length) * source.THREADS, splits, rows),
            "threadgroup": (source.THREADS, 1, 1),
        }
        result = {"output_shapes": [(rows, length, heads, layer.value_dim)], "output_dtypes": [layer.dtype]}
        kernel = self._kernel(form, whole=splits == 1)
        if splits == 1:
            out: mx.array = kernel(**launch, **result)[0]
            return out.swapaxes(1, 2)
        per_split = (rows, length, heads, splits)
        parts = kernel(
            output_shapes=[(*per_split, layer.value_dim), (*per_split, 2)],
            output_dtypes=[mx.float32, mx.float32],
            **launch,
        )
        out = self._combine(
            inputs=[*parts, self._constants.get((0, splits), mx.int32), self._sinks(sinks)],
            template=[
                ("T", layer.dtype),
                ("DV", layer.value_dim),
                ("H", heads),
                ("HAS_SINKS", int(sinks is not None)),
            ],
            grid=(layer.value_dim, heads, rows * length),
            threadgroup=(layer.value_dim, 1, 1),
            **result,
        )[0]
        return out.swapaxes(1, 2)

    def _inputs(
        self,
        queries: mx.array,
        view: LayerView,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
        softcap: float,
    ) -> list[mx.array]:
        """As ``input_names`` names them."""
        pool, index, group = view.pool, view.layer, view.group
        assert group.tables is not None and group.bases is not None
        shift = pool.block_size.bit_length() - 1
        return [
            queries,
            pool.keys[index],
            *pool.key_affine[index],
            pool.values[index],
            *pool.value_affine[index],
            group.tables,
            group.bases,
            view.batch.offsets,
            view.batch.ends,
            self._constants.get((shift, window or 0, int(sinks is not None)), mx.int32),
            self._constants.get((scale, softcap), mx.float32),
            self._sinks(sinks),
            pool.marks[index] if pool.marks else self._constants.get((), mx.int32),
        ]

    def _sinks(self, sinks: mx.array | None) -> mx.array:
        return self._constants.get((), mx.float32) if sinks is None else sinks.astype(mx.float32)

    def _kernel(self, form: Form, *, whole: bool) -> Any:
        bits = form.layer.bits
        key = whole, bits, form.shared_bytes
        if key not in self._made:
            defines = ("#define WHOLE\n" if whole else "") + ("" if bits is None else "#define PACKED\n")
            self._made[key] = self._make(
                name=f"paged_prefill{'' if bits is None else '_packed'}{'' if whole else '_split'}",
                input_names=input_names(bits),
                output_names=["out"] if whole else ["part_out", "stats"],
                source=source.BODY,
                header=defines + source.HEADER,
                shared_memory=form.shared_bytes,
            )
        return self._made[key]


def _is_best(view: LayerView, length: int) -> bool:
    """Whether a forward of chunks of ``length`` is better left to the kernel than to ``gathered_prefill.py``."""
    if view.pool.layers[view.layer].bits is not None:
        return True
    if reads_new(view):  # planned before the first request, and fused unless a window cuts it
        window = view.group.window
        return view.new is None or (window is not None and length > window)
    return length * (max(view.batch.starts) + length) <= MOST_PRODUCTS


def _chosen(
    layer: LayerShape, heads: int, rows: int, length: int, context: int, *, has_softcap: bool
) -> tuple[Form, int]:
    """The form for ``rows`` of ``length`` positions, pads included, and how often their contexts are split.

    Larger tiles read keys less often; a chunk that fills no more than one of them goes in smaller ones.
    """
    wide = max(layer.key_dim, layer.value_dim) > _WIDE
    form, large = (Form(layer, heads, tiles, has_softcap) for tiles in (1, 2))
    if not wide and length * heads // layer.kv_heads > large.rows:
        form = large
    splits = min(context // MIN_SPLIT, BUSY_BLOCKS // (rows * form.blocks(length)), MAX_SPLITS)
    return form, 1 << max(1, splits).bit_length() - 1


def refusal(layer: LayerShape, heads: int, block_size: int) -> str | None:
    """Why the kernel cannot read this layer's pool; None: it can."""
    for name, width in (("key", layer.key_dim), ("value", layer.value_dim)):
        if width % 16 or width > MAX_WIDTH:
            return f"{name} vectors of {width} elements: the kernel takes multiples of 16 up to {MAX_WIDTH}"
    if layer.dtype not in (mx.float16, mx.bfloat16):
        return f"the kernel does not read {layer.dtype}"
    if heads % layer.kv_heads:
        return f"{heads} query heads cannot share {layer.kv_heads} KV heads evenly"
    if block_size < 2 or block_size & (block_size - 1):
        return f"blocks of {block_size} positions: the kernel takes powers of two"
    return None


def _row_bytes(dim: int) -> int:
    """Of one vector in shared memory (``Tile`` of the source)."""
    pieces = dim // 8
    return 16 * (pieces if pieces % 8 == 0 else pieces + 1)


def _packed_bytes(packing: VectorPacking) -> int:
    """Of one packed vector on its way (``Codes`` of the source): codes, scales, biases."""
    pieces = packing.words // 4
    return 16 * (pieces | 1) + 2 * 4 * -(-packing.groups // 2)
