"""What packed KV costs in time on a GPU: attention alone and whole decode steps, 16-bit beside int8 and int4.

    python benchmarks/gpu_packed_kv.py --shapes llama-1b,llama-8b --rows 8,32 --context 2048,8192 --budget 100

All in one run, so that the ratios (packed time over 16-bit time; below 1: packed is faster) mean something. The
kernel is used as it is, not chosen by the check at load: tests/runner/gpu_kernel_grid.py says whether it is right.
``attention`` rotates over pools that exceed the device's caches together. Nothing begins after the budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

sys.path.insert(0, str(Path(__file__).parent))

import gpu_decode
from model_shapes import random_model
from shapes import SHAPES

from headrace.runner.attention.dispatch import install
from headrace.runner.attention.paged_decode import PagedDecodeKernel
from headrace.runner.attention.random_pools import random_case
from headrace.runner.kernels.cache import device_cache
from headrace.runner.kv.layout import read_layout
from headrace.runner.kv.pool import LayerShape
from headrace.runner.kv.view import LayerView
from headrace.runner.model_runner import RunnerOptions

BITS = {"auto": None, "int8": 8, "int4": 4}
UNCACHED_BYTES = 400 << 20
BLOCK_SIZE = 32


def attention_us(kernel: PagedDecodeKernel, layer: LayerShape, heads: int, rows: int, context: int) -> float:
    """Microseconds of one layer's decode attention."""
    copies = max(1, UNCACHED_BYTES // (layer.bytes_per_token * rows * context))
    views = [random_case(layer, heads, [context] * rows, BLOCK_SIZE, None, seed=seed) for seed in range(copies)]
    for queries, view in views:
        mx.eval(queries, view.pool.state)

    def once(queries: mx.array, view: LayerView) -> mx.array:
        return kernel(queries, view, layer.key_dim**-0.5, None)

    best = float("inf")
    repeat = max(1, 16 // copies)
    for _ in range(5):
        start = time.perf_counter()
        mx.eval([once(*case) for _ in range(repeat) for case in views])
        best = min(best, (time.perf_counter() - start) / (repeat * copies))
    return best * 1e6


def step_ms(model: nn.Module, rows: int, context: int, dtype: str, *, steps: int, compiled: bool) -> float:
    # HeadraceStep asks its module for the layout: hand it the packed one.
    gpu_decode.read_layout = lambda model, block_size: read_layout(model, block_size, dtype)
    try:
        options = RunnerOptions(compile=compiled, max_prefill_rows=1)
        return float(gpu_decode.headrace_ms(model, rows, context, steps, options))
    finally:
        gpu_decode.read_layout = read_layout


def compare(name: str, cell: dict[str, Any], run: Callable[[str], float]) -> dict[str, Any]:
    """``run`` for each way of holding KV; what fails is told."""
    for dtype in BITS:
        try:
            cell[dtype] = round(run(dtype), 3)
        except Exception as error:
            cell[dtype] = None
            cell[f"{dtype}_failed"] = f"{type(error).__name__}: {error}"[:400]
        gc.collect()
        mx.clear_cache()
    for dtype in ("int8", "int4"):
        if cell["auto"] and cell[dtype]:
            cell[f"{dtype}_ratio"] = round(cell[dtype] / cell["auto"], 3)
    print(name, json.dumps(cell), flush=True)
    return cell


def attention_cells(kernel: PagedDecodeKernel, args: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    for shape in args.shapes.split(","):
        for rows, context in _cells(args):
            if time.monotonic() < end:
                cell = {"shape": shape, "rows": rows, "context": context}
                yield compare("attention, us a layer", cell, partial(_attention, kernel, shape, rows, context))


def _attention(kernel: PagedDecodeKernel, shape: str, rows: int, context: int, dtype: str) -> float:
    config = SHAPES[shape]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    layer = LayerShape(0, config["num_key_value_heads"], dim, dim, mx.bfloat16, BITS[dtype])
    return attention_us(kernel, layer, heads, rows, context)


def step_cells(kernel: PagedDecodeKernel, args: argparse.Namespace, end: float) -> Iterator[dict[str, Any]]:
    for shape in args.shapes.split(","):
        if time.monotonic() > end - 10:  # what a model takes to be made
            return
        model = random_model(shape)
        print(shape, gpu_decode.prepare(model), flush=True)
        install(kernel)
        for rows, context in _cells(args):
            if time.monotonic() < end:
                cell = {"shape": shape, "rows": rows, "context": context}
                run = partial(step_ms, model, rows, context, steps=args.steps, compiled=not args.no_compile)
                yield compare("step, ms", cell, run)
        del model
        gc.collect()
        mx.clear_cache()


def _cells(args: argparse.Namespace) -> list[tuple[int, int]]:
    return [(rows, context) for context in _numbers(args.context) for rows in _numbers(args.rows)]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama-1b,llama-8b")
    parser.add_argument("--rows", default="8,32")
    parser.add_argument("--context", default="2048,8192")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--budget", type=float, default=100.0)
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--no-steps", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-tiles", action="store_true", help="without tensor cores")
    parser.add_argument("--json")
    args = parser.parse_args()
    device_cache()  # before MLX compiles anything: then it settles on a folder
    end = time.monotonic() + args.budget
    kernel = PagedDecodeKernel.for_device(tiles=not args.no_tiles)
    if kernel is None:
        sys.exit("needs a GPU: MLX computes on the CPU here")
    found = []
    if not args.no_attention:
        found += attention_cells(kernel, args, end)
    if not args.no_steps:
        found += step_cells(kernel, args, end)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
