"""Milliseconds per decode step: Headrace's runner beside mlx-lm's BatchGenerator, same run, random weights.

    python benchmarks/gpu_decode.py --shapes llama-1b,llama-8b --bits 16,4 --rows 1,5,32,128 --context 256,2048

Every cell prints both times, the ratio, and the floor: bytes that one step must move (weights once, the rows' KV)
over the copy bandwidth measured at the start. KV is filled directly; a cell that does not fit prints its bytes.
``Headrace`` steps as the server does: launched one ahead, tokens read on the host every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

sys.path.insert(0, str(Path(__file__).parent))

from model_shapes import SHAPES, random_model, weight_bytes

from headrace.core.step import ScheduledRow, SchedulerOutput
from headrace.params import SamplingParams
from headrace.runner.attention.dispatch import install
from headrace.runner.attention.kernel_check import choose_kernel
from headrace.runner.kv_layout import read_layout
from headrace.runner.kv_pool import KVPool
from headrace.runner.logits_head import HeadSelector, substitute_head
from headrace.runner.model_runner import ModelRunner, RunnerOptions
from headrace.runner.small_rows import SmallRowsKernel
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.small_row_linear import substitute_small_row_linears

GREEDY = SamplingParams(max_tokens=10**9, temperature=0.0)


def copy_bandwidth() -> float:
    """Bytes per second of a large copy, read and write counted."""
    source = mx.zeros((1 << 30,), mx.uint8)
    mx.eval(source)
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        mx.eval(source + 1)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


class HeadraceStep:
    """Decode steps of a fixed set of rows at one context length."""

    def __init__(self, model: nn.Module, rows: int, context: int, steps: int, options: RunnerOptions) -> None:
        block_size = 32
        found = read_layout(model, block_size)
        self.blocks = -(-(context + steps) // block_size)
        pool = KVPool(found.layers, [rows * self.blocks + 1], block_size, head_major=not _on_gpu())
        mx.eval(pool.state)
        vocab = int(model(mx.zeros((1, 1), mx.int32)).shape[-1])
        self.runner = ModelRunner(model, HeadSelector(), pool, found.layout, vocab, options)
        self.rows, self.context, self.block_size = rows, context, block_size
        self.position = context
        self.handle: Any = None

    def launch(self, *, first: bool) -> Any:
        rows = []
        needed = self.position // self.block_size + 1
        for row in range(self.rows):
            base = 1 + row * self.blocks
            rows.append(
                ScheduledRow(
                    row, self.position, 1, (1,) if first else (), (tuple(range(base, base + needed)),), True,
                    self.position + 1, 0, GREEDY, self.context,
                )
            )  # fmt: skip
        self.position += 1
        return self.runner.launch(SchedulerOutput(self.position, decode=tuple(rows)))

    def run(self, steps: int) -> float:
        """Seconds per step over ``steps`` steps."""
        handle = self.handle or self.launch(first=True)
        start = time.perf_counter()
        for _ in range(steps):
            following = self.launch(first=False)
            handle.result()
            handle = following
        self.handle = handle
        return (time.perf_counter() - start) / steps


def prepare(model: nn.Module) -> str:
    """Substitute modules and choose the attention as the server does at load; what was chosen."""
    found = read_layout(model, 32)
    heads = int(model.args.num_attention_heads)
    choice = choose_kernel(found.layers[0], heads, found.layout.groups[0].window, 32)
    install(choice.kernel)
    fuse_projections(model)
    if _on_gpu() and not mx.metal.is_available():
        substitute_small_row_linears(model, SmallRowsKernel())
    substitute_head(model)
    return choice.note


def headrace_ms(model: nn.Module, rows: int, context: int, steps: int, options: RunnerOptions) -> float:
    bench = HeadraceStep(model, rows, context, 3 * steps + 8, options)
    bench.run(steps)
    best = min(bench.run(steps), bench.run(steps))
    bench.handle.result()
    return best * 1e3


def batch_generator_ms(model: nn.Module, rows: int, context: int, steps: int) -> float:
    from mlx_lm.generate import BatchGenerator

    caches = []
    for _ in range(rows):
        caches.append(_filled_cache(model, context))
    generator = BatchGenerator(model, completion_batch_size=rows, prefill_batch_size=rows, max_tokens=10**6)
    generator.insert([[1]] * rows, caches=caches)
    del caches
    while len(generator.next()[1]) < rows:
        pass
    for _ in range(steps):
        generator.next()
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        for _ in range(steps):
            generator.next()
        best = min(best, (time.perf_counter() - start) / steps)
    generator.close()
    del generator
    gc.collect()
    mx.clear_cache()
    return best * 1e3


def _filled_cache(model: nn.Module, context: int) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    layers = read_layout(model, 32).layers
    for entry, layer in zip(cache, layers, strict=True):
        entry.keys = mx.zeros((1, layer.kv_heads, context, layer.key_dim), layer.dtype)
        entry.values = mx.zeros((1, layer.kv_heads, context, layer.value_dim), layer.dtype)
        entry.offset = context
    return cache


def _on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama-1b,llama-8b", help=",".join(SHAPES))
    parser.add_argument("--bits", default="16")
    parser.add_argument("--rows", default="1,5,32,128")
    parser.add_argument("--context", default="256,2048")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"device {mx.device_info().get('device_name')}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    cells = []
    for shape in args.shapes.split(","):
        for bits in _numbers(args.bits):
            model = random_model(shape, bits=bits)
            weights = weight_bytes(model)
            grid = [(rows, context) for context in _numbers(args.context) for rows in _numbers(args.rows)]
            peer = {} if args.no_peer else {cell: batch_generator_ms(model, *cell, args.steps) for cell in grid}
            kernel = prepare(model)
            for rows, context in grid:
                cell = measure(model, shape, bits, rows, context, weights, bandwidth, args)
                cell["attention"] = kernel
                if peer:
                    cell["mlx_lm_ms"] = round(peer[rows, context], 3)
                    cell["ratio"] = round(cell["mlx_lm_ms"] / cell["headrace_ms"], 2)
                cells.append(cell)
                print(json.dumps(cell), flush=True)
            del model
            gc.collect()
            mx.clear_cache()
    if args.json:
        Path(args.json).write_text(json.dumps(cells, indent=1))


def measure(
    model: nn.Module,
    shape: str,
    bits: int,
    rows: int,
    context: int,
    weights: int,
    bandwidth: float,
    args: argparse.Namespace,
) -> dict[str, Any]:
    kv = read_layout(model, 32).layout.bytes_per_token * rows * context
    cell: dict[str, Any] = {"shape": shape, "bits": bits, "rows": rows, "context": context}
    cell["floor_ms"] = round((weights + kv) / bandwidth * 1e3, 3)
    options = RunnerOptions(compile=_on_gpu() and not args.no_compile, max_prefill_rows=1)
    cell["headrace_ms"] = round(headrace_ms(model, rows, context, args.steps, options), 3)
    gc.collect()
    mx.clear_cache()
    return cell


if __name__ == "__main__":
    main()
