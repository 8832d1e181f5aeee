"""The forms of our CUDA kernels that models of usual shapes need, collected without a GPU: nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import pytest
from kernel_cases import Case, build

from headrace.runner.attention import paged_decode, paged_decode_source
from headrace.runner.attention.rotate_store import RotarySpec, RotateAndStore
from headrace.runner.forwards.token_feed import TokenFeed
from headrace.runner.kernels import language as kernel_language
from headrace.runner.kernels.language import CUDA_NAMES, cuda_kernel
from headrace.runner.kernels.text import KernelForm
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.store import PoolStore
from headrace.runner.kv.view import ForwardBatch, GroupBatch, LayerView
from headrace.runner.products import choice as product_choice
from headrace.runner.products import small_rows
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.packed_weights import PackedWeights
from headrace.runner.products.row_operations import RowKernels
from headrace.runner.products.small_rows import Dense, Norm, Product
from headrace.runner.products.tiling import staged_tilings
from headrace.runner.sampling.kernel import SamplingKernel
from headrace.runner.sampling.source import CUDA_SAMPLING_NAMES
from headrace.runner.substitutions.moe_decode import CudaExperts, Experts

HALF = (mx.bfloat16, mx.float16)


class Recorder:
    """A cache that only notes which forms it is asked for.

    Attributes:
        forms: by their text.
        late: names of those that came one by one, not together with others.
    """

    def __init__(self) -> None:
        self.forms: dict[str, KernelForm] = {}
        self.late: list[str] = []
        self._together = False

    def ensure(self, form: KernelForm) -> None:
        if form.own not in self.forms and not self._together:
            self.late.append(form.name)
        self.forms[form.own] = form

    @contextmanager
    def together(self) -> Iterator[None]:
        before, self._together = self._together, True
        yield
        self._together = before


def blank_kernel(**_made: Any) -> Callable[..., list[mx.array]]:
    """In place of ``mx.fast.cuda_kernel``: outputs are zero."""

    def run(*, output_shapes: Any, output_dtypes: Any, **_launch: Any) -> list[mx.array]:
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

    return run


def recorded(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> Recorder:
    """What ``run`` asks the cache for."""
    recorder = Recorder()
    monkeypatch.setattr(kernel_language, "device_cache", lambda: recorder)
    monkeypatch.setattr(mx.fast, "cuda_kernel", blank_kernel)
    run()
    return recorder


def all_kernels() -> None:
    """Call every kernel in forms that models use."""
    attention()
    stores()
    products()
    rows()
    staged_products()
    experts()
    sampling()
    TokenFeed(cuda_kernel)(mx.zeros((16,), mx.int32), mx.zeros((2, 5), mx.int32))


def attention() -> None:
    kernel = paged_decode.PagedDecodeKernel(
        cuda_kernel, paged_decode_source.CUDA_PRELUDE, paged_decode.CUDA_FLOATS, tiles=True
    )
    cases = [
        Case(dtype="bfloat16", widths=(64, 64), ratio=4, block_size=32),
        Case(dtype="float16", widths=(128, 128), ratio=8, block_size=32, sinks=True),
        Case(dtype="float32", widths=(80, 80)),
        Case(dtype="bfloat16", widths=(576, 512), ratio=16, kv_heads=1),
        Case(dtype="bfloat16", widths=(128, 128), ratio=4, bits=8, window=64),
        Case(dtype="float16", widths=(256, 256), ratio=2, bits=4, softcap=50.0),
        Case(dtype="bfloat16", widths=(96, 96), ratio=4, bits=8),
        Case(dtype="bfloat16", widths=(64, 64), ratio=4, bits=8),
        Case(dtype="float16", widths=(64, 64), ratio=8, bits=4, window=64, sinks=True),
        Case(dtype="float16", widths=(128, 128), ratio=3, bits=4, softcap=50.0),
    ]
    for case in cases:
        # One short row is one split, one long row is many.
        for lengths in ((5,), (9000,)):
            queries, view = build(Case(**{**_fields(case), "lengths": lengths}))[:2]
            sinks = mx.zeros((case.heads,)) if case.sinks else None
            kernel(queries, view, case.scale, case.window, sinks, case.softcap)


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


def stores() -> None:
    store = PoolStore(cuda_kernel, CUDA_NAMES)
    slots, mark = mx.zeros((3,), mx.int32), mx.zeros((1,), mx.int32)
    for dtype in (*HALF, mx.float32, mx.uint32):
        for count in (2, 4):
            store.write([mx.zeros((8, 2, 8), dtype)] * count, [mx.zeros((3, 2, 8), dtype)] * count, slots, mark)
    rotate = RotateAndStore(cuda_kernel, CUDA_NAMES)
    for dtype in HALF:
        for norm in (None, mx.ones((64,), dtype)):
            for bits in (None, 8, 4):
                pool = KVPool([LayerShape(0, 2, 64, 64, dtype, bits)], [4], 32, head_major=False, store=store)
                spec = RotarySpec(4, 2, 64, mx.ones((32,)), 64, False, 1.0, norm, norm, 1e-5)
                for start, length in ((0, 1), (0, 8), (5, 8)):
                    group = GroupBatch(None, mx.zeros((length,), mx.int32))
                    batch = ForwardBatch(
                        offsets=mx.array([start], mx.int32),
                        ends=mx.array([start + length], mx.int32),
                        starts=[start],
                        lengths=[length],
                        groups=[group],
                    )
                    rotate(mx.zeros((length, 8 * 64), dtype), LayerView(pool, 0, batch), spec)


def products() -> None:
    own = KernelProducts()
    for dtype in HALF:
        for rows in product_choice.MEASURED_ROWS:
            x = mx.zeros((rows, 1, 2048), dtype)
            square, wide = (Dense(mx.zeros((width, 2048), dtype)) for width in (2048, 16384))
            norm = Norm(mx.ones((2048,), dtype), 1e-5)
            biased = Dense(square.weight, mx.zeros((2048,), dtype))
            for product in (
                Product(square, norm),
                Product(square, residual=x),
                Product(wide, norm, gated=True),
                Product(biased, norm),
            ):
                own(x, product)
            if dtype == mx.bfloat16:
                narrow = packed((16384, 2048), 4, 64, dtype)
                for dense in (wide, Dense(None, None, narrow)):
                    for tiling in own.tilings(rows, dtype, Product(dense, norm, gated=True)):
                        own(x, Product(dense, norm, gated=True, tiling=tiling))
            for bits, group in ((4, 64), (8, 64), (4, 128), (8, 32)):
                held = [packed((width, 2048), bits, group, dtype) for width in (2048, 16384)]
                for product in (
                    Product(Dense(None, None, held[0]), norm),
                    Product(Dense(None, biased.bias, held[0]), residual=x),
                    Product(Dense(None, None, held[1]), norm, gated=True),
                ):
                    own(x, product)


def rows() -> None:
    own = RowKernels()
    for dtype in HALF:
        for width in (64, 896, 2048, 5120, 8192):
            own.rms_norm(mx.zeros((17, 1, width), dtype), mx.ones((width,), dtype), 1e-5)
        own.silu_gate(mx.zeros((17, 16384), dtype))


def staged_products() -> None:
    own = KernelProducts()
    for dtype in HALF:
        weights = {width: Dense(mx.zeros((width, 2048), dtype)) for width in (2048, 16384)}
        for rows in (16, 32, 64, 128):
            x = mx.zeros((rows, 1, 2048), dtype)
            for tiling in staged_tilings(rows, 2048, 2048):
                own(x, Product(weights[2048], residual=x, tiling=tiling))
                own(x, Product(Dense(weights[2048].weight, mx.zeros((2048,), dtype)), tiling=tiling))
            for tiling in staged_tilings(rows, 16384, 2048):
                own(x, Product(weights[16384], gated=True, tiling=tiling))


def packed(shape: tuple[int, ...], bits: int, group: int, dtype: mx.Dtype) -> PackedWeights:
    *outer, inner = shape
    scales = mx.zeros((*outer, inner // group), dtype)
    return PackedWeights(mx.zeros((*outer, inner * bits // 32), mx.uint32), scales, scales, bits, group)


def experts() -> None:
    kernel = CudaExperts()
    for dtype in HALF:
        weights = [mx.zeros(shape, dtype) for shape in ((64, 128), (8, 64, 128), (8, 64, 128), (8, 128, 64))]
        router, gate, up, down = weights
        layer = Experts(Norm(mx.ones((128,), dtype), 1e-5), Dense(router[:8]), gate, up, down, 2, True)
        norm, shapes = layer.norm, ((8, 64, 128), (8, 64, 128), (8, 128, 64))
        for rows in (3, 32, 128):
            h = mx.zeros((rows, 1, 128), dtype)
            kernel(h, layer, small_rows.plain_product)
            for bits in (4, 8):
                matrices = (packed(shape, bits, 64, dtype) for shape in shapes)
                held = Experts(norm, layer.router, None, None, None, 2, True, (*matrices,))  # type: ignore[arg-type]
                kernel(h, held, small_rows.plain_product)


def sampling() -> None:
    kernel = SamplingKernel(cuda_kernel, CUDA_NAMES + CUDA_SAMPLING_NAMES)
    for dtype in (*HALF, mx.float32):
        kernel(mx.zeros((2, 32003), dtype), None)
