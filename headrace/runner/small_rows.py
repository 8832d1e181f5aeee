"""Products of few rows with a large matrix, and what a decoder block does before and after them, in one.

A decode step multiplies 1 to some hundred rows with every weight matrix. It is bound by reading weights and, on a
fast GPU, by the host's cost per operation (measured on an H200: 15 to 36 us for a library product, 8 to 10 for a
kernel of our own). So one kernel streams the weights once (``small_rows_source.py``) and takes the neighbours
along:

    y = x W^T + bias           x may be RMS-normalized first,
                               y may be the gated halves SiLU(gate) * up, or have a residual added

``Product`` says which of these; ``plain_product`` computes it with MLX's own operations, ``KernelProducts`` by the
kernel, ``SmallRowsKernel`` by whichever was right and faster for the shape when it was measured on this device.
Weights may be plain, packed (``packed_rows_source.py``) or held both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product as combinations
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.runner import small_rows_source as source
from headrace.runner.kernel_language import compile_ahead, cuda_kernel
from headrace.runner.packed_rows_source import PACKED_PRODUCT
from headrace.runner.packed_weights import PackedWeights
from headrace.runner.step_graphs import Recorder
from headrace.runner.timing import Cost, compiled_cost

MAX_ROWS = 128
# Rows of one thread block; blocks of other rows read the same weights from the cache.
BLOCK_ROWS = 32
# Blocks get wider, and read inputs less often, while there are this many: about one per multiprocessor.
LEAST_BLOCKS = 120
# Up to this many blocks start at once on a large GPU when each fills a multiprocessor.
FILLING_BLOCKS = 132
TOLERANCE = 2e-2
# Counts of rows that are measured; a count goes by the smallest of these that holds it.
MEASURED_ROWS = (1, 8, BLOCK_ROWS, MAX_ROWS)
# A way that takes this many times longer than the best one is not tried with more rows.
HOPELESS = 4.0
# A layer's kernels beside its products: rotation and attention, and what the device takes for one of them.
OTHER_OPERATIONS = 3
OTHER_DEVICE_S = 5e-6
# Products timed in one compiled function; each is a few of the operations that MLX starts together (100).
MEASURED_TOGETHER = 16
# What is done beside the product, outputs, inner dimension, whether there is a bias, how weights are held.
Form = tuple[str, int, int, bool, str]
KINDS = (mx.bfloat16, mx.float16)
# Our kernel over plain or over packed weights, MLX's product over plain ones or over those that there are.
Way = Literal["kernel", "packed kernel", "library"]
# From so many rows on, weights are unpacked for MLX's product. That over packed ones is then another kernel, which
# MLX compiles when it is first called, for half a minute on an H200.
LEAST_UNPACKED = 8


@dataclass(frozen=True, slots=True)
class Dense:
    """Weights ``[N, K]`` of a linear layer, plain or packed or both, and its bias ``[N]``."""

    weight: mx.array | None
    bias: mx.array | None = None
    packed: PackedWeights | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inner dimension."""
        found = self.held.shape
        return found[0], found[1]

    @property
    def dtype(self) -> mx.Dtype:
        """Of the weights' values."""
        return self.held.dtype

    @property
    def held(self) -> mx.array | PackedWeights:
        """The plain weights where there are some, else the packed ones."""
        found = self.packed if self.weight is None else self.weight
        assert found is not None, "weights are one or the other"
        return found

    @property
    def plain_side(self) -> Dense | None:
        """With nothing but plain weights; None: there are none."""
        return None if self.weight is None else Dense(self.weight, self.bias)

    @property
    def packed_side(self) -> Dense | None:
        """With nothing but packed weights; None: there are none."""
        return None if self.packed is None else Dense(None, self.bias, self.packed)


@dataclass(frozen=True, slots=True)
class Norm:
    """Weights ``[K]`` and epsilon of an RMS norm."""

    weight: mx.array
    eps: float


@dataclass(frozen=True, slots=True)
class Product:
    """``norm(x) @ weight.T + bias``, gated or with a residual.

    Attributes:
        residual: B * N values in any shape, added to the product of an ``x`` of B rows, which then has that shape.
        gated: the first half of the outputs is the gate's: ``SiLU(first half) * second half``.
    """

    dense: Dense
    norm: Norm | None = None
    residual: mx.array | None = None
    gated: bool = False

    @property
    def form(self) -> Form:
        """What products share that are computed and measured alike."""
        parts = {"norm": self.norm is not None, "residual": self.residual is not None, "gate": self.gated}
        outputs, inner = self.dense.shape
        kind = "+".join(name for name, on in parts.items() if on) or "product"
        return kind, outputs, inner, self.dense.bias is not None, _held_text(self.dense)


# ``[B, ...]`` with K values a row -> ``[B, N]``, ``[B, N / 2]`` where gated, or the shape of the residual.
Products = Callable[[mx.array, Product], mx.array]


def plain_product(x: mx.array, product: Product) -> mx.array:
    """``Products`` by MLX's operations, for any number of rows and any type; over packed weights where there are
    no others."""
    dense, norm, residual = product.dense, product.norm, product.residual
    x = x.reshape(x.shape[0], -1)
    if norm is not None:
        x = mx.fast.rms_norm(x, norm.weight, norm.eps)
    if residual is not None and dense.weight is not None and dense.bias is None and not product.gated:
        return mx.addmm(residual.reshape(x.shape[0], -1), x, dense.weight.T).reshape(residual.shape)
    y = linear(x, dense)
    if product.gated:
        half = y.shape[1] // 2
        y = nn.silu(y[:, :half]) * y[:, half:]
    return y if residual is None else y.reshape(residual.shape) + residual


def linear(x: mx.array, dense: Dense) -> mx.array:
    """``x [..., K] @ weight.T + bias`` by MLX's product."""
    packed, weight = dense.packed, dense.weight
    if weight is None and packed is not None and x.size // x.shape[-1] >= LEAST_UNPACKED:
        weight = packed.unpacked()
    if weight is not None:
        return x @ weight.T if dense.bias is None else mx.addmm(dense.bias, x, weight.T)
    assert packed is not None, "weights are one or the other"
    y = mx.quantized_matmul(
        x, packed.words, packed.scales, packed.biases, group_size=packed.group, bits=packed.bits
    )
    return y if dense.bias is None else y + dense.bias


def unpacking_product(x: mx.array, product: Product) -> mx.array:
    """``plain_product`` of packed weights that are unpacked for it."""
    packed = product.dense.packed
    assert packed is not None, "there is something to unpack"
    return plain_product(x, replace(product, dense=Dense(packed.unpacked(), product.dense.bias)))


@dataclass(frozen=True, slots=True)
class Tiling:
    """Constants of one compiled form: tiles of 8 rows, tiles of 16 outputs, warps, chunks loaded at once,
    blocks that share a multiprocessor (None: by ``bounds``)."""

    tiles: int
    wide: int
    warps: int
    deep: int
    resident: int | None = None

    @staticmethod
    def of_packed(rows: int, outputs: int, inner: int, *, gated: bool) -> Tiling:
        """Inputs are read as often as there are blocks, from the cache, which is where packed products wait."""
        tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
        wide = 2 if outputs % 32 == 0 else 1
        warps = 16 if outputs // (16 * wide) <= FILLING_BLOCKS else 8
        while warps > 4 and inner < warps * 128:
            warps //= 2
        return Tiling(tiles, wide, warps, 2 if tiles == 1 else 1)

    @staticmethod
    def of(rows: int, outputs: int, *, gated: bool) -> Tiling:
        """Few rows: narrow blocks, many of them. More rows: wider ones, which read the inputs less often."""
        tiles = 1 if rows <= 8 else BLOCK_ROWS // 8
        least = 2 if gated else 1
        wide = least
        while tiles > 1 and wide < 4 and outputs % (32 * wide) == 0 and outputs // (32 * wide) >= LEAST_BLOCKS:
            wide *= 2
        together = FILLING_BLOCKS * (2 if tiles * wide == 1 else 1)
        warps = 16 if outputs // (16 * wide) <= together and tiles * wide <= 8 else 8
        return Tiling(tiles, wide, warps, 2 if tiles * wide >= 8 else 4)


def bounds(warps: int, sums: int, resident: int | None = None) -> str:
    """The part of a header with a block's threads.

    Args:
        warps: of a block.
        sums: tiles of 8 x 16 sums that each warp keeps.
        resident: blocks that shall share a multiprocessor; None: as many as registers allow, by ``sums``.
    """
    return source.BOUNDS.format(threads=warps * 32, blocks=resident or (32 if sums == 1 else 16) // warps)


def takes(rows: int, dtype: mx.Dtype, dense: Dense, *, gated: bool = False) -> bool:
    """Whether the kernel can compute this product at all."""
    outputs, inner = dense.shape
    return (
        dtype in KINDS
        and dtype == dense.dtype
        and (dense.bias is None or dense.bias.dtype == dtype)
        and 1 <= rows <= MAX_ROWS
        and inner % 32 == 0
        and outputs % (32 if gated else 16) == 0
    )


class KernelProducts:
    """``Products`` by the CUDA kernel, for what ``takes`` says; compiled forms are made as they are needed."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], Any] = {}

    def __call__(self, x: mx.array, product: Product, *, tiling: Tiling | None = None) -> mx.array:
        """``tiling``: None: by the shape. Of weights that are held both ways the plain ones are read."""
        dense, norm, residual, gated = product.dense, product.norm, product.residual, product.gated
        if norm is not None and (x.dtype != mx.bfloat16 or norm.weight.dtype != x.dtype):
            # Unscaled inputs times the norm's weights could leave float16's range.
            x, norm = mx.fast.rms_norm(x, norm.weight, norm.eps), None
        outputs, inner = dense.shape
        packed = dense.packed if dense.weight is None else None
        if tiling is None and packed is not None:
            tiling = Tiling.of_packed(x.shape[0], outputs, inner, gated=gated)
        tiling = tiling or Tiling.of(x.shape[0], outputs, gated=gated)
        weights = [dense.weight] if packed is None else [packed.words, packed.scales, packed.biases]
        extra = {
            "NORM": None if norm is None else norm.weight,
            "BIAS": dense.bias,
            "RESIDUAL": residual,
        }
        given = {name: array for name, array in extra.items() if array is not None}
        parts = (*given, *(["GATE"] if gated else []), *([] if packed is None else ["PACKED"]))
        shape = (x.shape[0], outputs // 2 if gated else outputs) if residual is None else residual.shape
        eps = 0.0 if norm is None else norm.eps
        y: mx.array = self._kernel(parts, tiling)(
            inputs=[x, *weights, *given.values()],
            template=[
                ("T", x.dtype),
                ("MT", tiling.tiles),
                ("NT", tiling.wide),
                ("W", tiling.warps),
                ("DEEP", tiling.deep),
                ("EPS", int(np.float32(eps).view(np.int32))),
                *([] if packed is None else packed_constants(packed)),
            ],
            grid=(-(-x.shape[0] // (8 * tiling.tiles)) * tiling.warps * 32, outputs // (16 * tiling.wide), 1),
            threadgroup=(tiling.warps * 32, 1, 1),
            output_shapes=[shape],
            output_dtypes=[x.dtype],
        )[0]
        return y

    def _kernel(self, parts: tuple[str, ...], tiling: Tiling) -> Any:
        limits = bounds(tiling.warps, tiling.tiles * tiling.wide, tiling.resident)
        key = limits, *parts
        if key not in self._made:
            defines = "".join(f"#define {part}\n" for part in parts)
            weights = ["w", "scales", "biases"] if "PACKED" in parts else ["w"]
            names = [part.lower() for part in parts if part not in ("GATE", "PACKED")]
            product = source.PRODUCT + (PACKED_PRODUCT if "PACKED" in parts else "")
            self._made[key] = cuda_kernel(
                name="_".join(["rows", *(part.lower() for part in parts)]),
                input_names=["x", *weights, *names],
                output_names=["y"],
                source=source.BODY,
                header=defines + source.MACHINE + product + limits,
            )
        return self._made[key]


def packed_constants(packed: PackedWeights) -> list[tuple[str, int]]:
    """What kernels over packed weights are compiled for; WHOLE: a row is whole chunks."""
    whole = packed.shape[-1] % (512 // packed.bits) == 0
    return [("BITS", packed.bits), ("GROUP", packed.group), ("WHOLE", int(whole))]


def _held_text(dense: Dense) -> str:
    """How weights are held, for people and for telling forms apart."""
    packed = [] if dense.packed is None else [f"{dense.packed.bits} bits by {dense.packed.group}"]
    return " and ".join([*packed, *([] if dense.weight is None else ["16 bits"])])


class SmallRowsKernel:
    """``Products`` by whichever way ``measure`` found right and fastest, by MLX's operations elsewhere.

    Args:
        own: the kernel; None: the CUDA one.
        recorder: where decode steps are recorded and replayed, so that an operation costs the host nothing.

    Attributes:
        faults: what was wrong with the kernel, one line each; empty when nothing was.
    """

    def __init__(self, own: Products | None = None, recorder: Recorder | None = None) -> None:
        self._own: Products = own or KernelProducts()
        self._recorder = recorder
        self._chosen: dict[tuple[Any, ...], Way] = {}
        self._costs: dict[tuple[Any, ...], dict[Way, Cost]] = {}  # of right ones
        self.faults: list[str] = []

    def __call__(self, x: mx.array, product: Product) -> mx.array:
        rows = x.shape[0]
        way = self._chosen.get((measured_bucket(rows), *product.form))
        takes_it = way in ways(rows, x.dtype, product.dense, gated=product.gated)
        return self._by(way if way is not None and takes_it else "library", x, product)

    def _by(self, way: Way, x: mx.array, product: Product) -> mx.array:
        if way == "library":
            return plain_product(x, product)
        dense = product.dense
        side = dense.plain_side if way == "kernel" else dense.packed_side
        assert side is not None, "only ways that the weights allow are chosen"
        return self._own(x, replace(product, dense=side))

    def chosen(self, rows: int, dense: Dense) -> bool:
        """Whether ``measure`` found a way for the product alone, in the bucket of ``rows``, that is not MLX's."""
        way = self._chosen.get((measured_bucket(rows), *Product(dense).form))
        return way is not None and way != "library"

    def call_kernels(
        self, dense: Dense, norm: Norm | None = None, *, residual: bool = False, gated: bool = False
    ) -> None:
        """Call what ``measure`` will run, without evaluating anything (see ``compile_ahead``)."""
        outputs, inner = dense.shape
        for rows in MEASURED_ROWS:
            x = mx.zeros((rows, 1, inner), dense.dtype)
            added = mx.zeros((rows, 1, outputs), x.dtype) if residual else None
            for way in ways(rows, x.dtype, dense, gated=gated):
                if way != "library":
                    self._by(way, x, Product(dense, norm, added, gated))

    def measure(
        self,
        layers: Sequence[tuple[Dense, Norm | None]],
        *,
        residual: bool = False,
        gated: bool = False,
    ) -> Form:
        """Check and time one kind of product on the weights of some layers, which are alike but for their values.

        Several layers, so that weights come from memory as in a step, not from the cache.
        """
        dense, norm = layers[0]
        outputs, inner = dense.shape
        form = Product(dense, norm, mx.zeros(()) if residual else None, gated).form
        compile_ahead(partial(self.call_kernels, dense, norm, residual=residual, gated=gated))
        hopeless: set[Way] = set()
        for rows in MEASURED_ROWS:
            key = (measured_bucket(rows), *form)
            if key in self._chosen:
                continue
            x = mx.random.normal((rows, 1, inner)).astype(dense.dtype)
            added = mx.random.normal((rows, 1, outputs)).astype(x.dtype) if residual else None
            products = [Product(*layer, added, gated) for layer in layers]
            possible = ways(rows, x.dtype, dense, gated=gated)
            if len(possible) < 2:
                continue
            if dense.weight is None:
                possible = possible[:-1]  # MLX's product over packed weights is for faults alone
            tried = {way: self._checked_cost(key, way, products, x) for way in possible if way not in hopeless}
            costs = {way: cost for way, cost in tried.items() if cost is not None}
            self._chosen[key] = best = _best(costs) if costs else "library"
            if costs:
                self._costs[key] = costs
                hopeless |= {way for way in costs if costs[way].device > HOPELESS * costs[best].device}
        return form

    def _checked_cost(
        self, key: tuple[Any, ...], way: Way, products: Sequence[Product], x: mx.array
    ) -> Cost | None:
        """What the way costs; None when it is wrong or cannot run, which is then among the faults."""
        try:
            if way != "library":
                worst = max(
                    largest_difference(self._by(way, x, product), _expected(x, product)) for product in products
                )
                if not worst <= TOLERANCE:
                    self.faults.append(f"{_words(key, way)}: differs by {worst:.2g}")
                    return None
            return _cost(partial(self._by, way), products, x, self._recorder)
        except Exception as error:
            # Whatever a compiler or driver says about a kernel, MLX's operations can serve.
            self.faults.append(f"{_words(key, way)}: {(str(error).splitlines() or ['?'])[0][:160]}")
            return None

    def balance(self, forms: Sequence[Form]) -> None:
        """Choose anew among the ways of products that make up a layer together.

        Of one product it is not known whether the host or the device will be what a step waits for; of all of them
        it is: that combination is taken whose greater sum, of host or device, is least.
        """
        for rows in MEASURED_ROWS:
            keys = [(rows, *form) for form in forms]
            known = [list(self._costs[key].items()) for key in keys if key in self._costs]
            if len(known) < len(keys):
                continue
            own_host = sum(min(cost.host for _, cost in costs) for costs in known) / len(known)
            others = Cost(OTHER_OPERATIONS * own_host, OTHER_OPERATIONS * OTHER_DEVICE_S)

            def in_a_step(choice: tuple[tuple[Way, Cost], ...], others: Cost = others) -> float:
                taken = [others, *(cost for _, cost in choice)]
                return Cost(sum(cost.host for cost in taken), sum(cost.device for cost in taken)).in_a_step

            best = min(combinations(*known), key=in_a_step)
            self._chosen.update({key: way for key, (way, _) in zip(keys, best, strict=True)})

    def note(self) -> str:
        """What ``measure`` found, in one line."""
        chosen = list(self._chosen.values())
        counts = {way: chosen.count(way) for way in ("kernel", "packed kernel")}
        text = f"few-rows products: kernel for {sum(counts.values())} of {len(chosen)} measured"
        if counts["packed kernel"]:
            text += f", {counts['packed kernel']} of them over packed weights"
        return "; ".join([text, *self.faults])


def ways(rows: int, dtype: mx.Dtype, dense: Dense, *, gated: bool = False) -> list[Way]:
    """Ways to compute a product; MLX's own last."""
    sides: list[tuple[Way, Dense | None]] = [("packed kernel", dense.packed_side), ("kernel", dense.plain_side)]
    found = [way for way, side in sides if side is not None and takes(rows, dtype, side, gated=gated)]
    return [*found, "library"]


def _best(costs: dict[Way, Cost]) -> Way:
    """The way that pays most in a decode step; MLX's own unless another is better."""
    *others, best = costs
    for way in others:
        if costs[way].beats(costs[best]):
            best = way
    return best


def _expected(x: mx.array, product: Product) -> mx.array:
    return (plain_product if product.dense.weight is not None else unpacking_product)(x, product)


def _cost(by: Products, products: Sequence[Product], x: mx.array, recorder: Recorder | None) -> Cost:
    def computed(product: Product, x: mx.array) -> mx.array:
        return by(x, product)

    # Different inputs: equal operations would be computed once.
    inputs = [x + index for index in range(MEASURED_TOGETHER)]
    mx.eval(inputs)
    if recorder is not None:
        runs = [partial(by, inputs[i], products[i % len(products)]) for i in range(MEASURED_TOGETHER)]
        return Cost(0.0, recorder.device_seconds(lambda: [run() for run in runs]) / MEASURED_TOGETHER)
    runs = [partial(computed, products[i % len(products)]) for i in range(MEASURED_TOGETHER)]
    return compiled_cost(runs, inputs)


def largest_difference(got: mx.array, expected: mx.array) -> float:
    """Largest difference over the largest value; NaN stays."""
    expected = expected.astype(mx.float32)
    worst = mx.max(mx.abs(got.astype(mx.float32) - expected)) / mx.max(mx.abs(expected))
    return float(np.array(worst))


def measured_bucket(rows: int) -> int:
    """The measured number of rows that ``rows`` goes by; 0 above all of them."""
    return next((most for most in MEASURED_ROWS if rows <= most), 0)


def _words(key: tuple[Any, ...], way: Way) -> str:
    rows, kind, outputs, inner, *_ = key
    return f"{way}: {kind} {outputs} x {inner} at {rows} rows"
