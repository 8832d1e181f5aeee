"""Products of few rows with a large 16-bit matrix, and what a decoder block does before and after them, in one.

A decode step multiplies 1 to some hundred rows with every weight matrix. It is bound by reading weights and, on a
fast GPU, by the host's cost per operation (measured on an H200: 15 to 36 us for a library product, 8 to 10 for a
kernel of our own). So one kernel streams the weights once (``small_rows_source.py``) and takes the neighbours
along:

    y = x W^T + bias           x may be RMS-normalized first,
                               y may be the gated halves SiLU(gate) * up, or have a residual added

``Product`` says which of these; ``plain_product`` computes it with MLX's own operations, ``KernelProducts`` by the
kernel, ``SmallRowsKernel`` by whichever was right and faster for the shape when it was measured on this device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product as combinations
from typing import Any

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
# A layer's kernels beside its products: rotation and attention, and what the device takes for one of them.
OTHER_OPERATIONS = 3
OTHER_DEVICE_S = 5e-6
# Products timed in one compiled function; each is a few of the operations that MLX starts together (100).
MEASURED_TOGETHER = 16
# What is done beside the product, outputs, inner dimension, whether there is a bias, how weights are held.
Form = tuple[str, int, int, bool, str]
KINDS = (mx.bfloat16, mx.float16)


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
    """``x [..., K] @ weight.T + bias`` by one of MLX's products."""
    packed = dense.packed
    if dense.weight is not None:
        return x @ dense.weight.T if dense.bias is None else mx.addmm(dense.bias, x, dense.weight.T)
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
    """Constants of one compiled form: tiles of 8 rows, tiles of 16 outputs, warps, chunks loaded at once."""

    tiles: int
    wide: int
    warps: int
    deep: int

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
        limits = bounds(tiling.warps, tiling.tiles * tiling.wide)
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
    """``Products`` by the kernel where ``measure`` found it right and faster, by MLX's operations elsewhere.

    Args:
        own: the kernel; None: the CUDA one.
        recorder: where decode steps are recorded and replayed, so that an operation costs the host nothing.

    Attributes:
        faults: what was wrong with the kernel, one line each; empty when nothing was.
    """

    def __init__(self, own: Products | None = None, recorder: Recorder | None = None) -> None:
        self._own: Products = own or KernelProducts()
        self._recorder = recorder
        self._wins: dict[tuple[Any, ...], bool] = {}
        self._costs: dict[tuple[Any, ...], tuple[Cost, Cost]] = {}  # of right ones: the kernel's, MLX's
        self.faults: list[str] = []

    def __call__(self, x: mx.array, product: Product) -> mx.array:
        rows = x.shape[0]
        own = takes(rows, x.dtype, product.dense, gated=product.gated) and self._wins.get(
            (measured_bucket(rows), *product.form), False
        )
        return (self._own if own else plain_product)(x, product)

    def wins(self, rows: int, dense: Dense) -> bool:
        """What ``measure`` found for the product alone, in the bucket of ``rows``; False where it did not look."""
        return rows <= MAX_ROWS and self._wins.get((measured_bucket(rows), *Product(dense).form), False)

    def call_kernels(
        self, dense: Dense, norm: Norm | None = None, *, residual: bool = False, gated: bool = False
    ) -> None:
        """Call what ``measure`` will run, without evaluating anything (see ``compile_ahead``)."""
        outputs, inner = dense.weight.shape
        for rows in MEASURED_ROWS:
            x = mx.zeros((rows, 1, inner), dense.weight.dtype)
            if takes(rows, x.dtype, dense, gated=gated):
                added = mx.zeros((rows, 1, outputs), x.dtype) if residual else None
                self._own(x, Product(dense, norm, added, gated))

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
        outputs, inner = dense.weight.shape
        form = Product(dense, norm, mx.zeros(()) if residual else None, gated).form
        compile_ahead(partial(self.call_kernels, dense, norm, residual=residual, gated=gated))
        for rows in MEASURED_ROWS:
            x = mx.random.normal((rows, 1, inner)).astype(dense.weight.dtype)
            added = mx.random.normal((rows, 1, outputs)).astype(x.dtype) if residual else None
            key = (measured_bucket(rows), *form)
            if key in self._wins or not takes(rows, x.dtype, dense, gated=gated):
                continue
            try:
                products = [Product(*layer, added, gated) for layer in layers]
                worst = max(
                    largest_difference(self._own(x, product), plain_product(x, product)) for product in products
                )
                right = worst <= TOLERANCE
                if not right:
                    self.faults.append(f"{_words(key)}: differs by {worst:.2g}")
                own, plain = (_cost(by, products, x, self._recorder) for by in (self._own, plain_product))
                self._wins[key] = right and own.beats(plain)
                if right:
                    self._costs[key] = own, plain
            except Exception as error:
                # Whatever a compiler or driver says about a kernel, MLX's operations can serve.
                self._wins[key] = False
                self.faults.append(f"{_words(key)}: {(str(error).splitlines() or ['?'])[0][:160]}")
        return form

    def balance(self, forms: Sequence[Form]) -> None:
        """Choose anew among kernel and MLX for products that make up a layer together.

        Of one product it is not known whether the host or the device will be what a step waits for; of all of them
        it is: that combination is taken whose greater sum, of host or device, is least.
        """
        for rows in MEASURED_ROWS:
            keys = [(rows, *form) for form in forms]
            known = [self._costs[key] for key in keys if key in self._costs]
            if len(known) < len(keys):
                continue
            own_host = sum(own.host for own, _ in known) / len(known)
            others = Cost(OTHER_OPERATIONS * own_host, OTHER_OPERATIONS * OTHER_DEVICE_S)

            def in_a_step(
                choice: tuple[int, ...], known: Sequence[tuple[Cost, Cost]] = known, others: Cost = others
            ) -> float:
                taken = [others, *(costs[which] for costs, which in zip(known, choice, strict=True))]
                return Cost(sum(cost.host for cost in taken), sum(cost.device for cost in taken)).in_a_step

            best = min(combinations((0, 1), repeat=len(keys)), key=in_a_step)
            self._wins.update({key: which == 0 for key, which in zip(keys, best, strict=True)})

    def note(self) -> str:
        """What ``measure`` found, in one line."""
        won = sum(self._wins.values())
        text = f"few-rows products: kernel for {won} of {len(self._wins)} measured"
        return "; ".join([text, *self.faults])


def _cost(by: Products, products: Sequence[Product], x: mx.array, recorder: Recorder | None) -> Cost:
    def computed(product: Product, x: mx.array) -> mx.array:
        return by(x, product)

    # Different inputs: equal operations would be computed once.
    inputs = [x + index for index in range(MEASURED_TOGETHER)]
    mx.eval(inputs)
    if recorder is not None:
        count = len(inputs)
        runs = [partial(by, inputs[i], products[i % len(products)]) for i in range(count)]
        return Cost(0.0, recorder.device_seconds(lambda: [run() for run in runs]) / count)
    return compiled_cost([partial(computed, products[i % len(products)]) for i in range(len(inputs))], inputs)


def largest_difference(got: mx.array, expected: mx.array) -> float:
    """Largest difference over the largest value; NaN stays."""
    expected = expected.astype(mx.float32)
    worst = mx.max(mx.abs(got.astype(mx.float32) - expected)) / mx.max(mx.abs(expected))
    return float(np.array(worst))


def measured_bucket(rows: int) -> int:
    """The measured number of rows that ``rows`` goes by; 0 above all of them."""
    return next((most for most in MEASURED_ROWS if rows <= most), 0)


def _words(key: tuple[Any, ...]) -> str:
    rows, kind, outputs, inner, _ = key
    return f"{kind} {outputs} x {inner} at {rows} rows"
