"""Which way each product of few rows is computed: measured at load on the model's own weights.

Every way that is right is timed as a decode step runs it (``measure``); then what makes a layer quickest is taken
(``balance`` where the host counts, ``settle`` where steps are replayed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product as combinations
from typing import Any

import mlx.core as mx

from headrace.errors import one_line
from headrace.runner.kernels.language import compile_ahead, cuda_kernel
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.row_operations import MLX_ROWS, RowOperations
from headrace.runner.products.small_rows import (
    MAX_ROWS,
    Dense,
    Form,
    Norm,
    Product,
    Products,
    Way,
    largest_difference,
    plain_product,
    takes,
    unpacking_product,
)
from headrace.runner.products.tiling import BLOCK_ROWS, Staged, Tiling
from headrace.runner.timing import Cost, compiled_cost

TOLERANCE = 2e-2
# Counts of rows that are measured; a count goes by the smallest of these that holds it.
MEASURED_ROWS = (1, 8, 16, BLOCK_ROWS, 64, MAX_ROWS)
# A way that takes this many times longer than the best one is not tried with more rows.
HOPELESS = 4.0
# A layer's kernels beside its products: rotation and attention, and what the device takes for one of them.
OTHER_OPERATIONS = 3
OTHER_DEVICE_S = 5e-6
# Products timed in one compiled function; each is a few of the operations that MLX starts together.
MEASURED_TOGETHER = 16
CHECKED_LAYERS = 4
# Adds the first of a row's results ``y [B, N]`` to ``x [B, 1, K]``: what comes next depends on it.
_THEN = """
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const int at = blockIdx.y * x_shape[2] + i;
  if (i < x_shape[2]) z[at] = T(float(x[at]) + float(y[blockIdx.y * y_shape[1]]));
"""
_THEN_THREADS = 256


class SmallRowsKernel:
    """``Products`` by whichever way ``measure`` found right and fastest, by MLX's operations elsewhere.

    Args:
        own: the kernel; None: the CUDA one.
        recorder: where decode steps are recorded and replayed, so that an operation costs the host nothing.
        beside: what norms and gates before and after MLX's products; MLX's operations once that was wrong.

    Attributes:
        faults: what was wrong with the kernel, one line each; empty when nothing was.
    """

    def __init__(
        self,
        own: Products | None = None,
        recorder: Recorder | None = None,
        beside: RowOperations = MLX_ROWS,
    ) -> None:
        self._own: Products = own or KernelProducts(beside, None if recorder is None else recorder.anew)
        self._beside = beside
        self._recorder = recorder
        self._chosen: dict[tuple[Any, ...], Way] = {}
        self._costs: dict[tuple[Any, ...], dict[Way, Cost]] = {}  # of right ones
        self.faults: list[str] = []

    def __call__(self, x: mx.array, product: Product) -> mx.array:
        return self._by(self._chosen.get((measured_bucket(x.shape[0]), *product.form)), x, product)

    def in_prompts(self, x: mx.array, product: Product) -> mx.array:
        """The product in a forward that is not recorded, where MLX would instantiate a graph for every cluster."""
        key = (measured_bucket(x.shape[0]), *product.form)
        way = self._chosen.get(key)
        if way is not None and way.is_cluster:
            others = {
                other: cost for other, cost in self._costs[key].items() if other is None or not other.is_cluster
            }
            way = min(others, key=lambda other: others[other].in_a_step, default=None)
        return self._by(way, x, product)

    def _by(self, way: Way, x: mx.array, product: Product) -> mx.array:
        if way is None or not takes(x.shape[0], x.dtype, product.dense, gated=product.gated):
            return plain_product(x, product, self._beside)
        return self._own(x, replace(product, tiling=way))

    def chosen(self, rows: int, dense: Dense) -> bool:
        """Whether ``measure`` found the kernel better for the product alone, in the bucket of ``rows``."""
        return self._chosen.get((measured_bucket(rows), *Product(dense).form)) is not None

    def call_kernels(
        self, dense: Dense, norm: Norm | None = None, *, residual: bool = False, gated: bool = False
    ) -> None:
        """Call what ``measure`` will run, without evaluating anything (see ``compile_ahead``)."""
        outputs, inner = dense.shape
        for rows in MEASURED_ROWS:
            x = mx.zeros((rows, 1, inner), dense.dtype)
            product = Product(dense, norm, mx.zeros((rows, 1, outputs), x.dtype) if residual else None, gated)
            if takes(rows, x.dtype, dense, gated=gated):
                for way in (None, *self._tilings(rows, x.dtype, product)):
                    self._by(way, x, product)

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
        hopeless = {"kernel": False, "library": dense.weight is None}  # over packed weights it is for faults alone
        for rows in MEASURED_ROWS:
            key = (rows, *form)
            if key in self._chosen or not takes(rows, dense.dtype, dense, gated=gated):
                continue
            x = mx.random.normal((rows, 1, inner)).astype(dense.dtype)
            added = mx.random.normal((rows, 1, outputs)).astype(x.dtype) if residual else None
            products = [Product(*layer, added, gated) for layer in layers]
            costs: dict[Way, Cost] = {} if hopeless["kernel"] else self._own_costs(key, products, x)
            own = min(costs.items(), key=lambda one: one[1].in_a_step, default=None)
            usual = None if hopeless["library"] else self._usual_cost(key, products, x)
            if usual is not None:
                costs[None] = usual
            self._chosen[key] = None if own is None or (usual is not None and not own[1].beats(usual)) else own[0]
            if costs:
                self._costs[key] = costs
            if own is not None and usual is not None:
                hopeless["kernel"] = own[1].device > HOPELESS * usual.device
                hopeless["library"] = usual.device > HOPELESS * own[1].device
        return form

    def _own_costs(self, key: tuple[Any, ...], products: Sequence[Product], x: mx.array) -> dict[Way, Cost]:
        """What those of the kernels' tilings cost that are right."""
        possible = self._tilings(x.shape[0], x.dtype, products[0])
        tried = [(way, self._checked_cost(key, way, products, x)) for way in possible]
        return {way: cost for way, cost in tried if cost is not None}

    def _usual_cost(self, key: tuple[Any, ...], products: Sequence[Product], x: mx.array) -> Cost | None:
        """What MLX's product costs, with MLX's operations beside it once others were wrong."""
        cost = self._checked_cost(key, None, products, x)
        if cost is None and self._beside is not MLX_ROWS:
            self._beside = MLX_ROWS
            cost = self._checked_cost(key, None, products, x)
        return cost

    def _tilings(self, rows: int, dtype: mx.Dtype, product: Product) -> list[Tiling | Staged]:
        # Without a recorder MLX would launch clusters for good, slowly (see ``Recorder.anew``).
        return KernelProducts.tilings(rows, dtype, product, clusters=self._recorder is not None)

    def _checked_cost(
        self, key: tuple[Any, ...], way: Way, products: Sequence[Product], x: mx.array
    ) -> Cost | None:
        """What the way costs; None when it is wrong or cannot run, which is then among the faults."""
        try:
            if way is not None or self._beside is not MLX_ROWS:
                worst = max(
                    largest_difference(self._by(way, x, product), _expected(x, product))
                    for product in products[:CHECKED_LAYERS]
                )
                if not worst <= TOLERANCE:
                    self.faults.append(f"{_words(key, way)}: differs by {worst:.2g}")
                    return None
            return _cost(partial(self._by, way), products, x, self._recorder)
        except Exception as error:
            # Whatever a compiler or driver says about a kernel, MLX's operations can serve.
            self.faults.append(f"{_words(key, way)}: {one_line(error)}")
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

    def settle(self, forms: Sequence[Form], seconds: Callable[[int], float]) -> None:
        """Choose anew among a few combinations of ways, by what a layer takes with each.

        Kernels that begin early share the device with those ahead of them, which no product's own time shows. So
        for each number of rows the quickest ways are tried, the quickest without clusters, and without staging.

        Args:
            forms: of the products that make up a layer.
            seconds: of a layer for so many rows, with the ways chosen now.
        """
        allowed: list[Callable[[Way], bool]] = [
            lambda way: True,
            lambda way: way is None or not way.is_cluster,
            lambda way: not isinstance(way, Staged),
        ]
        for rows in MEASURED_ROWS:
            keys = [(rows, *form) for form in forms]
            tried: dict[tuple[Way, ...], float] = {}
            for kind in allowed:
                known = [
                    {way: cost for way, cost in self._costs.get(key, {}).items() if kind(way)} for key in keys
                ]
                if not all(known):
                    continue
                ways = tuple(min(costs, key=lambda way: costs[way].in_a_step) for costs in known)
                if ways not in tried:
                    self._chosen.update(zip(keys, ways, strict=True))
                    tried[ways] = seconds(rows)
            if tried:
                best = min(tried, key=lambda ways: tried[ways])
                self._chosen.update(zip(keys, best, strict=True))

    def note(self) -> str:
        """What ``measure`` found, in one line."""
        own = [key for key, way in self._chosen.items() if way is not None]
        text = f"few-rows products: kernel for {len(own)} of {len(self._chosen)} measured"
        packed = sum("by" in key[-1] for key in own)
        if packed:
            text += f", {packed} of them over packed weights"
        return "; ".join([text, *self.faults])

    def details(self) -> list[str]:
        """A line for each kind of product: what was chosen by rows, with microseconds of the kernel and of MLX."""
        lines: dict[Form, list[str]] = {}
        for key, way in self._chosen.items():
            costs = self._costs.get(key, {})
            own = min((cost.in_a_step for other, cost in costs.items() if other is not None), default=None)
            usual = costs[None].in_a_step if None in costs else None
            times = ["-" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in (own, usual)]
            lines.setdefault(key[1:], []).append(f"{key[0]}: {way or 'library'} ({' : '.join(times)})")
        return [
            f"{kind} {outputs} x {inner}, {held}: " + ", ".join(found)
            for (kind, outputs, inner, _, held), found in lines.items()
        ]


def _expected(x: mx.array, product: Product) -> mx.array:
    return (plain_product if product.dense.weight is not None else unpacking_product)(x, product)


def _cost(by: Products, products: Sequence[Product], x: mx.array, recorder: Recorder | None) -> Cost:
    def computed(product: Product, x: mx.array) -> mx.array:
        return by(x, product)

    # Different inputs: equal operations would be computed once.
    inputs = [x + index for index in range(MEASURED_TOGETHER)]
    mx.eval(inputs)
    if recorder is not None:
        return Cost(0.0, recorder.device_seconds(lambda: _chained(by, products, inputs)) / MEASURED_TOGETHER)
    runs = [partial(computed, products[i % len(products)]) for i in range(MEASURED_TOGETHER)]
    return compiled_cost(runs, inputs)


def _chained(by: Products, products: Sequence[Product], inputs: Sequence[mx.array]) -> list[mx.array]:
    """Each product after the one before it, as in a step: side by side they would hide their beginnings and ends.

    The addition in between is one more small kernel for whatever way is measured. It is of our own, so that a
    product may begin early as it does behind rotation or attention.
    """
    then = cuda_kernel(name="then", input_names=["x", "y"], output_names=["z"], source=_THEN)
    y = by(inputs[0], products[0])
    for index, x in enumerate(inputs[1:], 1):
        rows, _, inner = x.shape
        x = then(
            inputs=[x, y.reshape(rows, -1)],
            template=[("T", x.dtype)],
            grid=(-(-inner // _THEN_THREADS) * _THEN_THREADS, rows, 1),
            threadgroup=(_THEN_THREADS, 1, 1),
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
        )[0]
        y = by(x, products[index % len(products)])
    return [y]


def measured_bucket(rows: int) -> int:
    """The measured number of rows that ``rows`` goes by; 0 above all of them."""
    return next((most for most in MEASURED_ROWS if rows <= most), 0)


def _words(key: tuple[Any, ...], way: Way) -> str:
    rows, kind, outputs, inner, *_ = key
    return f"{'library' if way is None else f'kernel {way}'}: {kind} {outputs} x {inner} at {rows} rows"
