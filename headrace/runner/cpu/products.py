"""Whether weights stay narrow on this CPU: the extension is built, checked and measured.

The check compares products with NumPy's in float64 over all forms, and rows alone with rows in company, which must
be equal. The measurement takes a product of one row, of sixteen and of 256, with narrow weights and with float32
ones as MLX computes them here. What came of it is kept in the cache folder, so that a model is held in the same
form at every start. Whatever is missing or wrong, the answer is no, with the reason.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt

from headrace.core.machine import cpu_features, cpu_model
from headrace.errors import StartupError
from headrace.files import appearing, cache_folder
from headrace.runner.cpu import experts as cpu_experts
from headrace.runner.cpu.narrow_weights import NarrowMatrix, NarrowProducts
from headrace.runner.kernels import native_extension
from headrace.runner.kernels.native_extension import Extension
from headrace.runner.timing import best_of_each

Doubles = npt.NDArray[Any]

SOURCES = (
    "cpu_products.cpp",
    "cpu_block.cpp",
    "cpu_products.h",
    "cpu_experts.h",
    "cpu_layout.h",
    "cpu_lanes.h",
    "cpu_narrow.h",
    "cpu_product.h",
    "cpu_block.h",
    "cpu_functions.h",
    "cpu_attention.h",
    "cpu_elementwise.h",
)
_MODULE = "headrace_cpu_products"
_ROWS = (1, 16, 256)
_OUTPUTS, _INPUTS = 2048, 1024
# Of float32's, that narrow weights must have at every number of rows.
_LEAST_RATE = 0.75
# Of a product with rounded x, and of float32 sums, as a share of the largest result.
_TOLERANCE = 2e-4


@dataclass(frozen=True, slots=True)
class NarrowChoice:
    """What may stay narrow.

    Attributes:
        products: the operations; None where nothing may.
        packed: whether affine weights stay packed.
        plain: whether 16-bit weights stay so.
        experts: whether those of experts stay as they are, too.
        note: why not, or how much faster; one line.
    """

    products: NarrowProducts | None
    packed: bool
    plain: bool
    note: str
    experts: bool = False

    @property
    def kinds(self) -> tuple[Literal["packed", "plain", "experts"], ...]:
        """As the loader takes them."""
        found: list[Literal["packed", "plain", "experts"]] = []
        if self.packed:
            found.append("packed")
        if self.plain:
            found.append("plain")
        if self.experts:
            found.append("experts")
        return tuple(found)


class Measured(msgspec.Struct, frozen=True):
    """Rates of products over narrow weights, as multiples of the float32 ones', for each number of rows."""

    key: str
    packed: tuple[float, ...]
    plain: tuple[float, ...]
    experts: tuple[float, ...]


def nothing(note: str) -> NarrowChoice:
    return NarrowChoice(None, False, False, note)


def choose(load: Callable[[], ModuleType] | None = None) -> NarrowChoice:
    """The choice for this machine. ``load`` gives the extension module, by default it is built."""
    if load is None and sys.platform != "linux":
        return nothing("weights are widened: products over narrow weights are built on Linux")
    try:
        products = NarrowProducts((load or _load)())
    except native_extension.ExtensionError as error:
        return nothing(f"weights are widened: native/cpu_products.cpp is not there ({error})")
    fault = check(products)
    if fault:
        return nothing(f"weights are widened: native/cpu_products.cpp computes wrongly here ({fault})")
    measured = _known(products) if load is None else measure(products)
    packed, plain = pays(measured.packed), pays(measured.plain)
    rates = "; ".join(
        f"{bits} bits {', '.join(f'{rate:.1f}' for rate in found)}{'' if kept else ' (widened)'}"
        for bits, found, kept in ((4, measured.packed, packed), (16, measured.plain, plain))
    )
    note = f"products over narrow weights, times the rate of float32 ones at 1, 16 and 256 rows: {rates}"
    fault = cpu_experts.check(products)
    experts = not fault and pays(measured.experts)
    note += f"; experts {', '.join(f'{rate:.1f}' for rate in measured.experts)}{'' if experts else ' (widened)'}"
    note += f"; native/cpu_experts.h computes wrongly here ({fault})" if fault else ""
    return NarrowChoice(products if packed or plain or experts else None, packed, plain, note, experts)


def pays(rates: Sequence[float]) -> bool:
    """Whether products at these multiples of float32's rates are the better choice: they save memory as well."""
    return math.prod(rates) >= 1 and min(rates) >= _LEAST_RATE


def extension(processor: Sequence[str] | None = None) -> Extension:
    """The products; ``processor``: compiler flags that name one, None: this machine's own."""
    machine = native_extension.own_processor() if processor is None else processor
    return Extension(_MODULE, SOURCES, (*machine, "-ffp-contract=off", "-pthread"))


def _load() -> ModuleType:
    return native_extension.load(extension())


# -- right? --------------------------------------------------------------------------------------------


def check(products: NarrowProducts) -> str:
    """What is wrong, or nothing."""
    source = np.random.default_rng(5)
    for matrix, weights in _samples(products, source):
        inputs = weights.shape[1]
        x = source.standard_normal((29, inputs)).astype(np.float32)
        expected = x.astype(np.float64) @ weights.T
        got = np.array(products.product(mx.array(x), matrix))
        if _far(got, expected):
            return f"{matrix.form.bits} bits, {inputs} inputs"
        alone = np.array(mx.concatenate([products.product(mx.array(x[i : i + 1]), matrix) for i in (0, 17, 28)]))
        if not np.array_equal(alone, got[[0, 17, 28]]):
            return f"{matrix.form.bits} bits: a row depends on the others"
        index = mx.array([0, weights.shape[0] - 1, 3])
        if _far(np.array(products.rows(index, matrix)), weights[[0, -1, 3]]):
            return f"{matrix.form.bits} bits: single outputs"
    return ""


def _far(got: Doubles, expected: Doubles) -> bool:
    worst = np.max(np.abs(got - expected)) / (np.max(np.abs(expected)) + 1e-30)
    return not bool(worst < _TOLERANCE)


def _samples(products: NarrowProducts, source: np.random.Generator) -> list[tuple[NarrowMatrix, Doubles]]:
    """Matrices of every form, with their weights in float64."""
    made = []
    for dtype in (mx.float16, mx.bfloat16):
        plain = mx.array(source.standard_normal((53, 77)).astype(np.float32)).astype(dtype)
        made.append((products.plain(plain), np.array(plain.astype(mx.float32), dtype=np.float64)))
    for bits, group, scale in (
        (4, 32, mx.float16),
        (4, 64, mx.bfloat16),
        (8, 32, mx.float16),
        (8, 128, mx.float32),
    ):
        values = mx.array(source.standard_normal((53, 384)).astype(np.float32))
        words, scales, biases = mx.quantize(values, group_size=group, bits=bits)
        scales, biases = scales.astype(scale), biases.astype(scale)
        wide = scales.astype(mx.float32), biases.astype(mx.float32)
        weights = mx.dequantize(words, wide[0], wide[1], group_size=group, bits=bits)
        made.append((products.packed(words, scales, biases, bits), np.array(weights, dtype=np.float64)))
    return made


# -- faster? -------------------------------------------------------------------------------------------


def _known(products: NarrowProducts) -> Measured:
    """From the cache, or measured and put there."""
    key = _key(products)
    cache = _cache_file(key)
    if cache is not None:
        known = _read(cache)
        if known is not None and known.key == key:
            return known
    measured = measure(products, key)
    if cache is not None:
        with suppress(OSError), appearing(cache) as temporary:  # a full disk costs time at the next start
            temporary.write_bytes(msgspec.json.encode(measured))
    return measured


def measure(products: NarrowProducts, key: str = "") -> Measured:
    """Rates of these products beside MLX's float32 ones."""
    values = 0.1 * mx.random.normal((_OUTPUTS, _INPUTS), key=mx.random.key(1))
    words, scales, biases = mx.quantize(values, group_size=32, bits=4)
    packed = products.packed(words, scales.astype(mx.float16), biases.astype(mx.float16), 4)
    plain = products.plain(values.astype(mx.bfloat16))
    mx.eval(values, packed.strips, plain.strips)
    rates: list[tuple[float, float]] = []
    for rows in _ROWS:
        x = mx.random.normal((rows, _INPUTS), key=mx.random.key(2))
        runs = (
            lambda x=x: x @ values.T,
            lambda x=x: products.product(x, packed),
            lambda x=x: products.product(x, plain),
        )
        best = best_of_each(runs, 8, 3)
        rates.append((best[0] / best[1], best[0] / best[2]))
    experts = cpu_experts.rates(products, _ROWS)
    return Measured(key, tuple(first for first, _ in rates), tuple(second for _, second in rates), experts)


def _key(products: NarrowProducts) -> str:
    """Everything the figures depend on; without the kernel of ``blas.py`` float32 products are far slower."""
    texts = [(native_extension.NATIVE / name).read_text(encoding="utf-8") for name in SOURCES]
    kernel = hasattr(ctypes.CDLL(None), "headrace_parallel")
    parts = [cpu_model(), cpu_features(), str(products.threads), str(kernel), *texts]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _cache_file(key: str) -> Path | None:
    try:
        return cache_folder("extensions") / f"narrow_products-{key[:16]}.json"
    except StartupError:
        return None


def _read(cache: Path) -> Measured | None:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError):
        return None
