"""Checks and times the few-rows products, experts and fused decoder blocks on a CUDA GPU. Not a pytest file.

    python tests/runner/gpu_products.py                   everything but the sweep, under three minutes
    python tests/runner/gpu_products.py --only times --shapes llama-8b
    python tests/runner/gpu_products.py --only sweep      which tiling is fastest per shape
    python tests/runner/gpu_products.py --only staged     the staged kernel's tilings by recorded chains

Goes on after a failure; prints all failures at the end and exits with 1. Two times per product, each with weights
of several layers in turn, so that they come from memory:

    host    microseconds per operation, many queued: whatever is slower, host or GPU
    GPU     microseconds per operation behind a long product, while which the host queues: the GPU's share alone,
            and the weights' bytes over it
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from headrace.runner.kernels.language import compile_ahead
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.products import choice as product_choice
from headrace.runner.products import small_rows
from headrace.runner.products.kernel_products import KernelProducts
from headrace.runner.products.small_rows import Dense, Norm, Product, plain_product
from headrace.runner.products.tiling import Staged, Tiling, staged_tilings, tilings
from headrace.runner.timing import best_seconds

ROWS = (1, 5, 8, 32)
EPS = 1e-5
failures: list[str] = []
limit_s = [170.0]
started = time.perf_counter()


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - started:6.1f}s]", *words, flush=True)


def attempt(name: str, run: Callable[[], str | None]) -> None:
    """Run one check; a returned text or an exception is a failure. Skips when time is over."""
    if time.perf_counter() - started > limit_s[0]:
        say("skipped, out of time:", name)
        return
    try:
        fault = run()
    except Exception as error:
        traceback.print_exc(limit=3)
        fault = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    if fault:
        failures.append(f"{name}: {fault}")
        say("FAILED", name, fault)


# -- are they right? ---------------------------------------------------------------------------------------

PLAIN_TILINGS = (
    Tiling(1, 1, 8, 4),
    Tiling(1, 1, 16, 4),
    Tiling(4, 1, 16, 4),
    Tiling(4, 2, 16, 2),
    Tiling(4, 4, 8, 2),
)
GATE_TILINGS = (Tiling(1, 2, 8, 4), Tiling(1, 2, 16, 4), Tiling(4, 2, 16, 2), Tiling(4, 4, 8, 2))
KINDS: tuple[dict[str, bool], ...] = (
    {},
    {"norm": True},
    {"norm": True, "bias": True},
    {"residual": True},
    {"residual": True, "bias": True},
    {"norm": True, "gated": True},
    {"gated": True, "bias": True},
)
INNER = (32, 160, 1536, 8960)


def checks(products: KernelProducts) -> None:
    for dtype in (mx.bfloat16, mx.float16):
        for kind in KINDS if dtype == mx.bfloat16 else KINDS[:1] + KINDS[3:4] + KINDS[5:6]:
            tilings = GATE_TILINGS if kind.get("gated") else PLAIN_TILINGS
            everyday = dtype == mx.bfloat16 and not kind.get("bias")
            for tiling in tilings if everyday else (tilings[1], tilings[-1]):
                name = f"{'+'.join(kind) or 'product'} {str(dtype)[9:]} {tiling}"
                attempt(name, partial(check, products, kind, dtype, tiling))
    say(f"checks done, {len(failures)} failures")


def check(products: KernelProducts, kind: dict[str, bool], dtype: mx.Dtype, tiling: Tiling) -> str | None:
    worst, where = 0.0, ""
    for inner in INNER:
        for rows in (1, 3, 8) if tiling.tiles == 1 else (1, 9, 32, 70):
            x, product = random_product(rows, 192, inner, kind, dtype)
            got = products(x, replace(product, tiling=tiling)).astype(mx.float32)
            expected = in_float32(x, product)
            error = float(np.array(mx.max(mx.abs(got - expected)) / mx.max(mx.abs(expected))))
            if not error <= worst:
                worst, where = error, f"{rows} rows, K {inner}"
    return None if worst <= 1.2e-2 else f"differs by {worst:.3g} at {where}"


def random_product(
    rows: int, outputs: int, inner: int, kind: dict[str, bool], dtype: mx.Dtype
) -> tuple[mx.array, Product]:
    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    width = outputs // 2 if kind.get("gated") else outputs
    bias = normal(outputs) if kind.get("bias") else None
    return normal(rows, 1, inner), Product(
        Dense(normal(outputs, inner), bias),
        Norm(normal(inner), EPS) if kind.get("norm") else None,
        normal(rows, 1, width) if kind.get("residual") else None,
        bool(kind.get("gated")),
    )


def in_float32(x: mx.array, product: Product) -> mx.array:
    """The definition in float64 on the host."""

    def host(array: mx.array) -> np.ndarray:
        return np.array(array.astype(mx.float32)).astype(np.float64)

    dense, norm, residual = product.dense, product.norm, product.residual
    v = host(x).reshape(x.shape[0], -1)
    if norm is not None:
        v = v / np.sqrt((v * v).mean(axis=1, keepdims=True) + norm.eps) * host(norm.weight)
    y = v @ host(dense.weight).T
    if dense.bias is not None:
        y = y + host(dense.bias)
    if product.gated:
        gate, up = np.split(y, 2, axis=1)
        y = gate / (1 + np.exp(-gate)) * up
    if residual is not None:
        y = y.reshape(residual.shape) + host(residual)
    return mx.array(y.astype(np.float32))


# -- how fast are they? ------------------------------------------------------------------------------------

# hidden, query outputs, key-value outputs, feed-forward width
SHAPES = {
    "llama-1b": (2048, 2048, 512, 8192),
    "llama-3b": (3072, 3072, 1024, 8192),
    "llama-8b": (4096, 4096, 1024, 14336),
    "qwen3-0.6b": (1024, 2048, 1024, 3072),
    "qwen2.5-1.5b": (1536, 1536, 256, 8960),
}
RING_BYTES = 300e6  # more than a large GPU's cache


class Long:
    """A long product; what depends on it starts when it is over."""

    def __init__(self) -> None:
        self.a = mx.random.normal((8192, 8192)).astype(mx.bfloat16)
        mx.eval(self.a)

    def zero(self) -> mx.array:
        y = self.a
        for _ in range(6):
            y = self.a @ y * 0.0
        return y[0, 0]


def gpu_seconds(long: Long, chain: Callable[[mx.array], Sequence[mx.array]], count: int) -> float:
    """Seconds per operation of ``chain(zero)``, which has ``count`` operations that wait for ``zero``."""

    def timed(more: bool) -> float:
        zero = long.zero()
        arrays = [zero, *(chain(zero) if more else [zero + 1])]
        start = time.perf_counter()
        mx.eval(arrays)
        return time.perf_counter() - start

    timed(True)
    timed(False)
    pairs = [(timed(True), timed(False)) for _ in range(3)]
    return (min(one for one, _ in pairs) - min(other for _, other in pairs)) / count


def ring(outputs: int, inner: int) -> Iterator[Dense]:
    count = max(2, min(12, int(RING_BYTES / (2 * outputs * inner)) + 1))
    made = [Dense((mx.random.normal((outputs, inner)) * 0.02).astype(mx.bfloat16)) for _ in range(count)]
    mx.eval([dense.weight for dense in made])
    return cycle(made)


def product_cases(shape: str) -> list[tuple[str, int, int, dict[str, bool]]]:
    hidden, queries, keys, width = SHAPES[shape]
    return [
        ("qkv", queries + 2 * keys, hidden, {"norm": True}),
        ("out", hidden, queries, {"residual": True}),
        ("gate_up", 2 * width, hidden, {"norm": True, "gated": True}),
        ("down", hidden, width, {"residual": True}),
    ]


def once(by: Any, weights: Iterator[Dense], x: mx.array, product: Product) -> mx.array:
    result: mx.array = by(x, replace(product, dense=next(weights)))
    return result


def queued(
    by: Any, weights: Iterator[Dense], x: mx.array, product: Product, zero: mx.array, count: int = 48
) -> list[mx.array]:
    """``count`` products after ``zero``; residuals make them a chain."""
    x = x + zero.astype(x.dtype)
    results = []
    residual = product.residual
    for _ in range(count):
        results.append(by(x, replace(product, dense=next(weights), residual=residual)))
        residual = results[-1] if residual is not None else None
    return results


def times(products: KernelProducts, shapes: Sequence[str], rows_list: Sequence[int], long: Long) -> None:
    print("shape product N x K | rows | host us own, mlx | GPU us own, mlx | GPU TB/s own, mlx")
    for shape in shapes:
        for label, outputs, inner, kind in product_cases(shape):
            weights = ring(outputs, inner)
            for rows in rows_list:
                attempt(
                    f"time {shape} {label} {rows}",
                    partial(time_one, products, f"{shape} {label}", outputs, inner, kind, rows, weights, long),
                )


def time_one(
    products: KernelProducts,
    label: str,
    outputs: int,
    inner: int,
    kind: dict[str, bool],
    rows: int,
    weights: Iterator[Dense],
    long: Long,
) -> str | None:
    x, product = random_product(rows, outputs, inner, kind, mx.bfloat16)
    mx.eval([array for array in (x, product.residual) if array is not None])
    host, gpu = [], []
    for by in (products, plain_product):
        host.append(best_seconds(partial(once, by, weights, x, product), rounds=3) * 1e6)
        gpu.append(gpu_seconds(long, partial(queued, by, weights, x, product), 48) * 1e6)
    rate = [2 * outputs * inner / max(us, 0.01) / 1e6 for us in gpu]
    print(
        f"{label:>20} {outputs:6d} x {inner:5d} | {rows:2d} | {host[0]:6.1f} {host[1]:6.1f} | "
        f"{gpu[0]:6.1f} {gpu[1]:6.1f} | {rate[0]:5.2f} {rate[1]:5.2f}",
        flush=True,
    )
    return None


# -- which tiling? -----------------------------------------------------------------------------------------


def sweep(products: KernelProducts, shapes: Sequence[str], long: Long, limit_s: float) -> None:
    end = time.perf_counter() + limit_s
    for shape in shapes:
        for label, outputs, inner, kind in product_cases(shape):
            weights = ring(outputs, inner)
            for rows in (8, 32):
                x, product = random_product(rows, outputs, inner, kind, mx.bfloat16)
                gated = bool(kind.get("gated"))
                found = []
                for tiling in candidates(rows, outputs, gated):
                    if time.perf_counter() > end:
                        say("sweep: out of time")
                        return
                    cut = replace(product, tiling=tiling)
                    try:
                        us = gpu_seconds(long, partial(queued, products, weights, x, cut), 48) * 1e6
                    except Exception as error:
                        say(f"{shape} {label} {tiling}: {str(error).splitlines()[0][:100]}")
                        continue
                    found.append((us, tiling))
                default = tilings(rows, outputs, 0, gated=gated, normed=True, packed=False)[0]
                found.sort(key=lambda pair: pair[0])
                words = ", ".join(
                    f"{'*' if t == default else ''}{t.tiles}/{t.wide}/{t.warps}/{t.deep} {us:.1f}"
                    for us, t in found
                )
                say(f"{shape} {label} {outputs} x {inner}, {rows} rows, us by tiles/wide/warps/deep: {words}")


def candidates(rows: int, outputs: int, gated: bool) -> list[Tiling]:
    tiles = 1 if rows <= 8 else 4
    made = set(tilings(rows, outputs, 0, gated=gated, normed=True, packed=False))
    for wide in (2, 4) if gated else (1, 2, 4):
        for warps in (4, 8, 16):
            for deep in (2, 4, 8):
                registers = 8 * wide * deep + 4 * tiles * deep + 4 * wide * tiles + 30
                fits = outputs % (16 * wide) == 0 and warps // 2 * wide * tiles * 512 <= 40000
                if fits and registers * warps * 32 <= 66000 and tiles * wide * warps >= 8:
                    made.add(Tiling(tiles, wide, warps, deep))
    return sorted(made, key=lambda t: (t.wide, t.warps, t.deep))


STAGED_ROWS = (1, 8, 16, 32, 64, 128)


def staged(products: KernelProducts, shapes: Sequence[str]) -> None:
    """Device microseconds of the library, the best other tiling and staged ones, in steps as they are replayed."""
    recorder = Recorder.for_device()
    if recorder is None:
        say("FAILED staged: nothing can be recorded")
        return
    compile_ahead(partial(staged_forms, products, shapes))
    say("compiled; us: library | others | staged tiles/outputs/deep/stages/splits, * is tried at a start")
    for shape in shapes:
        for label, outputs, inner, kind in product_cases(shape):
            weights = ring(outputs, inner)
            for rows in STAGED_ROWS:
                name = f"{shape} {label} {outputs} x {inner}, {rows} rows"
                attempt(name, partial(staged_one, products, recorder, name, rows, (outputs, inner), kind, weights))


def staged_forms(products: KernelProducts, shapes: Sequence[str]) -> None:
    """Call every form once without evaluating it."""
    for shape in shapes:
        for _, outputs, inner, kind in product_cases(shape):
            for rows in STAGED_ROWS:
                x, product = random_product(rows, outputs, inner, kind, mx.bfloat16)
                for tiling in (*other_tilings(rows, product), *staged_candidates(rows, outputs, inner)):
                    products(x, replace(product, tiling=tiling))


def staged_one(
    products: KernelProducts,
    recorder: Recorder,
    name: str,
    rows: int,
    size: tuple[int, int],
    kind: dict[str, bool],
    weights: Iterator[Dense],
) -> str | None:
    x, product = random_product(rows, *size, {**kind}, mx.bfloat16)
    layers = [replace(product, dense=next(weights)) for _ in range(12)]
    mx.eval([x, product.residual] if product.residual is not None else x)
    right = plain_product(x, layers[0])
    usual = product_choice._cost(plain_product, layers, x, recorder).device * 1e6
    found: dict[Tiling | Staged, float] = {}
    faults = []
    for tiling in (*other_tilings(rows, product), *staged_candidates(rows, *size)):

        def by(x: mx.array, product: Product, tiling: Tiling | Staged = tiling) -> mx.array:
            return products(x, replace(product, tiling=tiling))

        try:
            wrong = small_rows.largest_difference(by(x, layers[0]), right)
            if not wrong <= product_choice.TOLERANCE:
                faults.append(f"{tiling} differs by {wrong:.3g}")
                continue
            found[tiling] = product_choice._cost(by, layers, x, recorder).device * 1e6
        except Exception as error:
            faults.append(f"{tiling}: {str(error).splitlines()[0][:100]}")
    tried = staged_tilings(rows, *size)
    words = [
        f"{'*' if tiling in tried else ''}{str(tiling).removeprefix('staged ')} {us:.1f}"
        for tiling, us in sorted(found.items(), key=lambda pair: pair[1])
        if isinstance(tiling, Staged)
    ]
    others = [(us, str(tiling)) for tiling, us in found.items() if isinstance(tiling, Tiling)]
    other = "{1} {0:.1f}".format(*min(others)) if others else "-"
    say(f"{name}: {usual:.1f} | {other} | {', '.join(words)}")
    return "; ".join(faults) or None


def other_tilings(rows: int, product: Product) -> list[Tiling | Staged]:
    found = KernelProducts.tilings(rows, mx.bfloat16, product)
    return [tiling for tiling in found if isinstance(tiling, Tiling)]


def staged_candidates(rows: int, outputs: int, inner: int) -> list[Staged]:
    """Those that are tried at a start, and as many as there is time for."""
    tiles = max(1, rows // 8)
    usual = staged_tilings(rows, outputs, inner)
    found = [*usual, *(replace(tiling, splits=2 * tiling.splits) for tiling in usual)]
    for tiling in usual:
        if tiling.outputs == 64:
            found += [replace(tiling, stages=8), replace(tiling, deep=2)]
        elif tiling.outputs == 128:
            found += [replace(tiling, stages=5 if tiles <= 4 else 6), replace(tiling, deep=2, stages=3)]
        else:
            found += [replace(tiling, stages=4), Staged(tiles, 64, 1, 4, min(2 * tiling.splits, 8))]
    fitting = (tiling for tiling in found if tiling.takes(outputs, inner) and tiling.splits <= 8)
    return [tiling for tiling in dict.fromkeys(fitting) if tiling.shared_bytes <= 227 << 10]


# -- experts -----------------------------------------------------------------------------------------------


def experts(long: Long) -> None:
    """Right on a small odd shape and on a real one; times of the real one."""
    from headrace.runner.substitutions.moe_decode import CudaExperts, Experts

    kernel = CudaExperts()
    for name, count, hidden, width, choices, normalized, dtype in (
        ("small", 16, 160, 96, 3, False, mx.float16),
        ("small", 16, 160, 96, 3, True, mx.bfloat16),
        ("qwen3-30b-a3b", 128, 2048, 768, 8, True, mx.bfloat16),
    ):
        layers = [
            Experts(
                Norm(1 + 0.1 * normal(hidden, dtype=dtype), EPS),
                Dense(normal(count, hidden, dtype=dtype) * hidden**-0.5),
                normal(count, width, hidden, dtype=dtype) * hidden**-0.5,
                normal(count, width, hidden, dtype=dtype) * hidden**-0.5,
                normal(count, hidden, width, dtype=dtype) * width**-0.5,
                choices,
                normalized,
            )
            for _ in range(1 if name == "small" else 3)
        ]
        mx.eval([[layer.gate, layer.up, layer.down] for layer in layers])
        for rows in ROWS:
            label = f"experts {name} {str(dtype)[9:]} {rows} rows"
            attempt(label, partial(check_experts, kernel, layers[0], rows, dtype))
            if name != "small":
                attempt(f"time {label}", partial(time_experts, kernel, layers, rows, long))


def normal(*shape: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal(shape).astype(dtype)


def check_experts(kernel: Any, layer: Any, rows: int, dtype: mx.Dtype) -> str | None:
    """Routing against its definition on the same logits; the rest in float32 with the routing that was found."""
    h = normal(rows, 1, layer.gate.shape[2], dtype=dtype)
    logits = plain_product(h, Product(layer.router, layer.norm))
    chosen, weights = kernel.route(logits, layer)
    wide = logits.astype(mx.float32)
    best = mx.argsort(-wide, axis=-1)[:, : layer.choices]
    if not mx.array_equal(mx.take_along_axis(wide, best, -1), mx.take_along_axis(wide, chosen, -1)).item():
        return "another choice of experts"
    shares = mx.take_along_axis(mx.softmax(wide, axis=-1), chosen, -1)
    shares = shares / shares.sum(axis=-1, keepdims=True) if layer.normalized else shares
    if not mx.allclose(shares, weights, rtol=1e-3, atol=1e-6).item():
        return "other weights of the experts"
    got = kernel(h, layer, plain_product)
    x = mx.fast.rms_norm(h.astype(mx.float32), layer.norm.weight.astype(mx.float32), layer.norm.eps)
    worst = 0.0
    for row in range(rows):
        total = h[row, 0].astype(mx.float32)
        for which in range(layer.choices):
            gate, up, down = (
                array[chosen[row, which]].astype(mx.float32) for array in (layer.gate, layer.up, layer.down)
            )
            total += weights[row, which] * (down @ (one_gate(gate @ x[row, 0]) * (up @ x[row, 0])))
        error = mx.max(mx.abs(got[row, 0].astype(mx.float32) - total)) / mx.max(mx.abs(total))
        worst = max(worst, float(np.array(error)))
    return None if worst <= 1.5e-2 else f"differs by {worst:.3g}"


def one_gate(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def time_experts(kernel: Any, layers: Sequence[Any], rows: int, long: Long) -> str | None:
    products = KernelProducts()
    h = normal(rows, 1, layers[0].gate.shape[2], dtype=mx.bfloat16)
    turn = cycle(layers)
    host = best_seconds(lambda: kernel(h, next(turn), products), rounds=3) * 1e6

    def chain(zero: mx.array) -> list[mx.array]:
        x = h + zero
        for _ in range(9):
            x = kernel(x, next(turn), products)
        return [x]

    gpu = gpu_seconds(long, chain, 9) * 1e6
    layer = layers[0]
    logits = plain_product(h, Product(layer.router, layer.norm))
    chosen, _ = kernel.route(logits, layer)
    distinct = len(set(np.array(chosen).reshape(-1).tolist()))
    moved = 3 * 2 * distinct * layer.gate.shape[1] * layer.gate.shape[2]
    say(
        f"experts, {rows} rows: host {host:.1f} us, GPU {gpu:.1f} us, "
        f"{distinct} experts chosen, {moved / gpu / 1e6:.2f} TB/s"
    )
    return None


# -- decoder blocks ----------------------------------------------------------------------------------------


def blocks(names: Sequence[str]) -> None:
    for name in names:
        attempt(f"blocks {name}", partial(check_blocks, name))


def check_blocks(name: str) -> str | None:
    import model_shapes

    from headrace.runner.attention.dispatch import install
    from headrace.runner.attention.paged_decode import PagedDecodeKernel
    from headrace.runner.attention.rotate_store import RotateAndStore
    from headrace.runner.kv.store import PoolStore
    from headrace.runner.products.choice import SmallRowsKernel
    from headrace.runner.substitutions import block_check
    from headrace.runner.substitutions.decoder_block import FusedBlock
    from headrace.runner.substitutions.fused_linear import fuse_projections

    whole = dict(model_shapes.SHAPES[name])
    try:
        model_shapes.SHAPES[name]["num_hidden_layers"] = 4
        model = model_shapes.random_model(name)
    finally:
        model_shapes.SHAPES[name].update(whole)
    install(PagedDecodeKernel.for_device())
    fuse_projections(model)
    store, rotate = PoolStore.checked(), RotateAndStore.for_device()
    if store is None or rotate is None:
        return "no in-place store on this device"
    products, experts = SmallRowsKernel(), block_check.ExpertsChoice()
    begin = time.perf_counter()
    tools = block_check.BlockTools(products, rotate, store, experts)
    count, note = block_check.substitute_decoder_blocks(model, tools)
    say(f"{name}: {note}; {products.note()}; {experts.note()}; took {time.perf_counter() - begin:.1f} s")
    faults = [*products.faults, *experts.faults]
    found = [module for _, module in model.named_modules() if isinstance(module, FusedBlock)]
    faults += [] if count == 4 else [f"fused {count} of 4"]
    for rows, bits in ((5, 8), (40, 8), (5, 4), (40, 4)) if found else ():
        fault = block_check.compare(found[0], store, rows=rows, bits=bits)
        faults += [] if fault is None else [f"{rows} rows, int{bits}: {fault}"]
    faults += [] if not found or found[0].prompts else ["prompts are not fused"]
    for tokens, bits in itertools.product(block_check.PROMPTS, (None, 8, 4)) if found and found[0].prompts else ():
        fault = block_check.compare(found[0], store, tokens=tokens, bits=bits)
        faults += [] if fault is None else [f"prompts from {tokens.starts}, {bits} bits: {fault}"]
    for rows in (1, 5, 9, 32, 40) if found else ():
        fault = block_check.compare(found[0], store, rows=rows)
        faults += [] if fault is None else [f"{rows} rows: {fault}"]
        own, usual = (block_check._cost(by, found[0], tools, rows) for by in (found[0], found[0].inner))
        say(
            f"{name}: {rows} rows, us, host and device: fused {own.host * 1e6:.0f} {own.device * 1e6:.0f}, "
            f"unmodified {usual.host * 1e6:.0f} {usual.device * 1e6:.0f}"
        )
    del model, found
    mx.clear_cache()
    return "; ".join(faults) or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        default="checks,blocks,experts,times",
        help="checks, blocks, experts, times, sweep, staged",
    )
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--blocks", default="llama-1b,qwen3-0.6b,qwen2.5-1.5b,qwen3-30b-a3b")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--sweep-seconds", type=float, default=240.0)
    parser.add_argument("--seconds", type=float, default=limit_s[0], help="start no more checks after these")
    args = parser.parse_args()
    limit_s[0] = args.seconds
    if mx.default_device() != mx.gpu or mx.metal.is_available():
        sys.exit("needs a CUDA GPU")
    parts, shapes = args.only.split(","), args.shapes.split(",")
    recorder = Recorder.for_device()
    products, long = KernelProducts(anew=None if recorder is None else recorder.anew), Long()
    if "checks" in parts:
        checks(products)
    if "blocks" in parts:
        blocks(args.blocks.split(","))
    if "experts" in parts:
        experts(long)
    if "times" in parts:
        times(products, shapes, [int(rows) for rows in args.rows.split(",")], long)
    if "staged" in parts:
        staged(products, shapes)
    if "sweep" in parts:
        sweep(products, shapes, long, args.sweep_seconds)
    say(f"{len(failures)} failures")
    for failure in failures:
        print("FAILED", failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
