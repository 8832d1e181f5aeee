"""Paged decode attention by a kernel of our own, on CUDA and Metal: reads the pools in place, gathers nothing.

Same contract as ``reference.paged_attention`` for one query per row over token-major pools, packed ones too. Which
shapes the kernel takes is ``supports``; everything else goes to the reference. See ``paged_decode_source.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.runner.attention import packed_decode_source as packed_source
from headrace.runner.attention import paged_decode_source as source
from headrace.runner.attention import tile_decode_source as tile_source
from headrace.runner.device_arrays import DeviceConstants
from headrace.runner.kernels.language import cuda_kernel
from headrace.runner.kv.packing import scale_dtype
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.view import LayerView

# Thread blocks that keep a large GPU busy; the context is split until there are about this many.
BUSY_BLOCKS = 512
# Elements of keys and values that a block reads at least, packed or not (they cost the same work): less is not
# worth the second kernel, which costs the host as much as any other.
MIN_SPLIT_ELEMENTS = 64 * 1024
MAX_SPLITS = 64
MAX_QUERIES_PER_BLOCK = 8
# Widest key or value vector: beyond it one query alone fills the registers.
MAX_WIDTH = 1024
# Floats per thread for queries and outputs. Threads of an Apple GPU have half the registers of CUDA's.
CUDA_FLOATS = 128
METAL_FLOATS = 64
# By tensor cores: multiprocessors of a large GPU, and warps of 128 registers that one of them holds.
MULTIPROCESSORS = 132
RESIDENT_WARPS = 16
# Bytes of a pool that one block reads in about the time of the second kernel; what a split is worth starting for;
# and beyond which rows of unlike lengths would keep single blocks busy for long.
WHOLE_BYTES = 256 << 10
SPLIT_BYTES = 64 << 10
LONG_BYTES = 2 << 20
# Widest vectors of 16 bits, and the widest keys and values together of which 128 registers hold a tile.
MAX_TILE_WIDTH = 256
NARROW = 256


@dataclass(frozen=True, slots=True)
class Form:
    """Constants of one compiled form of the kernel, for one layer's shape and number of query heads."""

    layer: LayerShape
    heads: int
    block_size: int
    lanes: int
    queries_per_block: int
    batch: int
    has_sinks: bool
    has_softcap: bool
    by_tiles: bool = False

    @staticmethod
    def of(
        layer: LayerShape,
        heads: int,
        block_size: int,
        floats: int,
        *,
        has_sinks: bool,
        has_softcap: bool,
        tiles: bool = False,
    ) -> Form:
        """``floats``: per thread, for queries and outputs; ``tiles``: whether there are tensor cores to use."""
        if tiles and takes_tiles(layer, block_size):
            per_block = heads // blocks_per_row(layer, heads)
            batch = 2 if layer.key_dim + layer.value_dim <= 128 else 1
            return Form(layer, heads, block_size, 0, per_block, batch, has_sinks, has_softcap, by_tiles=True)
        lanes = _lanes(layer.key_dim, layer.value_dim)
        pieces = _pieces(layer.key_dim, lanes) + _pieces(layer.value_dim, lanes)
        most = min(MAX_QUERIES_PER_BLOCK, max(1, floats // (8 * pieces)))
        queries = heads // layer.kv_heads
        per_block = max(part for part in range(1, most + 1) if queries % part == 0)
        # Tokens in flight per lane group: as many as the registers hold beside the queries and outputs.
        width = 8 if layer.bits is None and layer.dtype == mx.float32 else 4
        batch = 4 if 4 * (width * pieces + per_block) <= (CUDA_FLOATS - per_block * pieces * 8) // 2 + 32 else 2
        return Form(layer, heads, block_size, lanes, per_block, batch, has_sinks, has_softcap)

    def template(self, *, whole: bool, warps: int = source.WARPS) -> list[tuple[str, Any]]:
        """Constants of the decode kernel; ``whole``: one split, which writes the result and so knows the sinks."""
        layer = self.layer
        constants: list[tuple[str, Any]] = [
            ("T", layer.dtype),
            ("DK", layer.key_dim),
            ("DV", layer.value_dim),
            ("G", self.heads // layer.kv_heads),
            ("GT", self.queries_per_block),
            ("KV", layer.kv_heads),
            ("BS", self.block_size),
            ("LP", self.lanes),
            ("U", self.batch),
            ("HAS_SOFTCAP", int(self.has_softcap)),
        ]
        if whole:
            constants.append(("HAS_SINKS", int(self.has_sinks)))
        key, value = layer.key_packing, layer.value_packing
        if self.by_tiles:
            constants = [constant for constant in constants if constant[0] != "LP"] + [("W", warps)]
            if layer.bits is not None:
                constants += [("S", scale_dtype(layer.dtype)), ("BITS", layer.bits)]
        elif key is not None and value is not None:
            constants += [("S", scale_dtype(layer.dtype)), ("GK", key.group_size), ("GV", value.group_size)]
        return constants

    @property
    def combine_template(self) -> list[tuple[str, Any]]:
        return [
            ("T", self.layer.dtype),
            ("DV", self.layer.value_dim),
            ("H", self.heads),
            ("HAS_SINKS", int(self.has_sinks)),
        ]

    def splits(self, rows: int, context: int) -> int:
        """How often ``context`` positions are split, for enough blocks."""
        blocks = self._blocks(rows)
        if self.by_tiles:
            nbytes = context * self.layer.bytes_per_token // self.layer.kv_heads
            splits = nbytes // LONG_BYTES
            if nbytes > WHOLE_BYTES and 4 * blocks < 3 * MULTIPROCESSORS:
                splits = max(splits, min(2 * MULTIPROCESSORS // blocks, nbytes // SPLIT_BYTES))
            return max(1, min(MAX_SPLITS, splits))
        elements = context * (self.layer.key_dim + self.layer.value_dim)
        most = max(1, min(MAX_SPLITS, elements // MIN_SPLIT_ELEMENTS))
        return min(most, max(1, -(-BUSY_BLOCKS // blocks)))

    def warps(self, rows: int, context: int, splits: int) -> int:
        """Warps that share one split: as many as the device holds beside each other, and find tokens to read."""
        if not self.by_tiles:
            return source.WARPS
        resident = RESIDENT_WARPS if self.narrow else RESIDENT_WARPS // 2
        if splits > 1:
            return 8
        warps = resident
        while warps > 4 and self._blocks(rows) * warps > MULTIPROCESSORS * resident:
            warps //= 2
        while warps > 4 and (warps // 2) * 16 * self.batch >= context:
            warps //= 2
        return warps

    @property
    def narrow(self) -> bool:
        """Whether the tensor-core form needs no more than 128 registers."""
        key, value = self.layer.key_dim, self.layer.value_dim
        return self.layer.bits is not None or (key + value <= NARROW and 2 * value <= NARROW)

    def _blocks(self, rows: int) -> int:
        return rows * self.heads // self.queries_per_block


def input_names(bits: int | None) -> list[str]:
    """Of the decode kernel over a pool that is packed to ``bits``, or not."""
    return ["q", *pool_names(bits), "tables", "bases", "ends", "sizes", "params", "sinks", "mark"]


def pool_names(bits: int | None) -> list[str]:
    """A pool's arrays, keys first; of packed ones codes, scales and biases."""
    return ["k", "v"] if bits is None else ["k", "ks", "kb", "v", "vs", "vb"]


class PagedDecodeKernel:
    """The compiled kernel of one device; make one and keep it.

    Args:
        make: ``cuda_kernel`` or ``mx.fast.metal_kernel``.
        prelude: the matching prelude.
        floats: per thread, for queries and outputs.
        tiles: whether pools of widths that fit are read by tensor cores (``tile_decode_source.py``).
    """

    def __init__(self, make: Callable[..., Any], prelude: str, floats: int, *, tiles: bool = False) -> None:
        self._floats = floats
        self._tiles = tiles
        self._constants = DeviceConstants()
        self._whole: dict[int | None, Any] = {}
        self._split: dict[int | None, Any] = {}
        for bits in (None, 8, 4):
            name = f"paged_decode_{bits or 'plain'}"
            common = {"input_names": input_names(bits), "source": source.DECODE_BODY}
            self._whole[bits] = make(
                name=name, output_names=["out"], header=prelude + source.defines(bits, whole=True), **common
            )
            self._split[bits] = make(
                name=f"{name}_split",
                output_names=["part_out", "stats"],
                header=prelude + source.defines(bits, whole=False),
                **common,
            )
        self._make = make
        self._tiled: dict[tuple[bool, bool, bool, int], Any] = {}
        self._combine = make(
            name="paged_decode_combine",
            input_names=["parts", "stats", "sizes", "sinks"],
            output_names=["out"],
            source=source.COMBINE_BODY,
            header=prelude,
        )

    @staticmethod
    def for_device(*, tiles: bool = True) -> PagedDecodeKernel | None:
        """The kernel of the default device, or None where there is none; ``tiles``: with tensor cores on CUDA."""
        if mx.default_device() != mx.gpu:
            return None
        if mx.metal.is_available():
            return PagedDecodeKernel(mx.fast.metal_kernel, source.METAL_PRELUDE, METAL_FLOATS)
        return PagedDecodeKernel(cuda_kernel, source.CUDA_PRELUDE, CUDA_FLOATS, tiles=tiles)

    @staticmethod
    def supports(queries: mx.array, view: LayerView) -> bool:
        """Whether this forward's shapes are ones the kernel takes."""
        layer = view.pool.layers[view.layer]
        return (
            queries.shape[2] == 1
            and not view.pool.head_major
            and refusal(layer) is None
            and queries.dtype == layer.dtype
            and queries.shape[1] % layer.kv_heads == 0
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
        """Attention of ``queries [B, H, 1, key_dim]``; returns ``[B, H, 1, value_dim]``.

        ``softcap``: scores become ``softcap * tanh(score / softcap)``; 0: they stay.
        """
        pool, layer = view.pool, view.pool.layers[view.layer]
        rows, heads = queries.shape[:2]
        flags = {"has_sinks": sinks is not None, "has_softcap": softcap > 0}
        form = Form.of(layer, heads, pool.block_size, self._floats, tiles=self._tiles, **flags)
        tables = view.group.tables
        assert tables is not None
        context = tables.shape[1] * pool.block_size
        if window is not None:
            context = min(context, window)
        splits = form.splits(rows, context)
        warps = form.warps(rows, context, splits)
        sizes = self._constants.get((tables.shape[1], splits, window or 0), mx.int32)
        sink_values = self._constants.get((), mx.float32) if sinks is None else sinks.astype(mx.float32)
        kernel = self._kernel(form, warps, whole=splits == 1)
        launch = {
            "inputs": [
                queries,
                *_read(view),
                sizes,
                self._constants.get((scale, softcap), mx.float32),
                sink_values,
                self._mark(pool, view.layer),
            ],
            "template": form.template(whole=splits == 1, warps=warps),
            "grid": (splits * warps * 32, heads // form.queries_per_block, rows),
            "threadgroup": (warps * 32, 1, 1),
        }
        result = {"output_shapes": [(rows, heads, 1, layer.value_dim)], "output_dtypes": [layer.dtype]}
        if splits == 1:
            out: mx.array = kernel(**launch, **result)[0]
        else:
            per_split = [(rows, heads, splits, layer.value_dim), (rows, heads, splits, 2)]
            parts = kernel(output_shapes=per_split, output_dtypes=[mx.float32, mx.float32], **launch)
            out = self._combine(
                inputs=[*parts, sizes, sink_values],
                template=form.combine_template,
                grid=(layer.value_dim, heads, rows),
                threadgroup=(layer.value_dim, 1, 1),
                **result,
            )[0]
        return out

    def _kernel(self, form: Form, warps: int, *, whole: bool) -> Any:
        bits = form.layer.bits
        if not form.by_tiles:
            return (self._whole if whole else self._split)[bits]
        key = bits is None, form.narrow, whole, warps
        if key not in self._tiled:
            resident = RESIDENT_WARPS if form.narrow else RESIDENT_WARPS // 2
            self._tiled[key] = self._make(
                name=f"{'tile' if bits is None else 'packed'}_decode{'' if whole else '_split'}",
                input_names=input_names(bits),
                output_names=["out"] if whole else ["part_out", "stats"],
                source=tile_source.BODY,
                header=tile_source.header(
                    tile_source.PLAIN if bits is None else packed_source.PACKED,
                    source.defines(None, whole=whole),
                    threads=warps * 32,
                    blocks=resident // warps,
                ),
            )
        return self._tiled[key]

    def _mark(self, pool: KVPool, layer: int) -> mx.array:
        """What the kernel has to wait for besides its inputs: writes in place, where a pool has them."""
        return pool.marks[layer] if pool.marks else self._constants.get((), mx.int32)


def refusal(layer: LayerShape) -> str | None:
    """Why the kernel cannot read this layer's pool; None: it can."""
    for name, width in (("key", layer.key_dim), ("value", layer.value_dim)):
        if width % 8 or width > MAX_WIDTH:
            return f"{name} vectors of {width} elements: the kernel takes multiples of 8 up to {MAX_WIDTH}"
    if layer.dtype not in (mx.float16, mx.bfloat16, mx.float32):
        return f"the kernel does not read {layer.dtype}"
    return None


def takes_tiles(layer: LayerShape, block_size: int) -> bool:
    """Whether tensor cores can read this layer's pool: of widths whose outputs the registers hold."""
    if layer.dtype == mx.float32 or block_size % 16:
        return False
    widths = layer.key_dim, layer.value_dim
    if layer.bits is None:
        return all(width % 8 == 0 and width <= MAX_TILE_WIDTH for width in widths)
    return all(width in (packed_source.GROUP, 2 * packed_source.GROUP) for width in widths)


def blocks_per_row(layer: LayerShape, heads: int) -> int:
    """Thread blocks of a row whose context is not split, with as many queries to a block as can be."""
    queries = max(1, heads // layer.kv_heads)
    most = max(part for part in range(1, MAX_QUERIES_PER_BLOCK + 1) if queries % part == 0)
    return layer.kv_heads * (queries // most)


def _lanes(key_dim: int, value_dim: int) -> int:
    """Lanes that read one token: the power of two that leaves least of them idle, with few pieces a lane."""
    choices = [
        lanes
        for lanes in (32, 16, 8, 4, 2, 1)
        if lanes == 32 or _pieces(key_dim, lanes) + _pieces(value_dim, lanes) <= 3
    ]
    return min(choices, key=lambda lanes: lanes * (_pieces(key_dim, lanes) + _pieces(value_dim, lanes)))


def _pieces(dim: int, lanes: int) -> int:
    """Pieces of 8 elements that a lane reads of a vector."""
    return -(-dim // (8 * lanes))


def _read(view: LayerView) -> list[mx.array]:
    """What the kernel reads of a view, in the order of its inputs."""
    pool, index, group = view.pool, view.layer, view.group
    assert group.tables is not None and group.bases is not None
    return [
        pool.keys[index],
        *pool.key_affine[index],
        pool.values[index],
        *pool.value_affine[index],
        group.tables,
        group.bases,
        view.batch.ends,
    ]
