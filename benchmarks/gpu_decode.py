"""Milliseconds per decode step: Headrace's runner beside mlx-lm's BatchGenerator, same run, random weights.

    python benchmarks/gpu_decode.py --shapes llama-1b,llama-8b,qwen3-30b-a3b --rows 1,5,32,128 --context 256,2048
    … --bits 16,4      packed weights too; on CUDA held packed and plain, as the server does where there is room
                       (--packed: packed alone, --unpacked: plain alone)
    … --torch          and PyTorch with one CUDA graph per step (torch_decode.py), for dense shapes at 16 bits
    … --budget 540     begin nothing that would end later; what was measured is printed and written

Every cell prints the times, the ratios (above 1: Headrace is faster), and the floor: bytes that one step must move
(the weights it uses once, the rows' KV) over the copy bandwidth measured at the start. KV is filled directly; a
cell that does not fit prints its bytes. ``Headrace`` steps as the server does: launched one ahead, tokens read on
the host every step. Each other engine is measured before it, with the memory freed in between.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

sys.path.insert(0, str(Path(__file__).parent))

from decode_report import Budget, Cell, Grid, markdown_table
from model_shapes import held_packed, random_model, step_bytes, unpacked, weight_bytes
from shapes import SHAPES, is_dense

from headrace.core.step import ScheduledRow, SchedulerOutput
from headrace.params import SamplingParams
from headrace.runner.attention.dispatch import install
from headrace.runner.attention.kernel_check import choose_kernel
from headrace.runner.forwards.logits_head import HeadSelector, substitute_head
from headrace.runner.forwards.step_graphs import StepGraphs
from headrace.runner.kernels.cache import device_cache
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.kv.layout import read_layout
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.store import PoolStore
from headrace.runner.model_runner import ModelRunner, RunnerOptions
from headrace.runner.sampling.check import choose_sampling
from headrace.runner.sampling.kernel import SamplingKernel
from headrace.runner.substitutions.decode_products import substitute_decode_products
from headrace.runner.substitutions.fused_linear import fuse_projections

GRAPH_BYTES = 8 << 30
SPARE_BYTES = 3 << 30  # activations, logits, MLX's buffer cache
GREEDY = SamplingParams(max_tokens=10**9, temperature=0.0)


def first_token(row: int) -> int:
    """Different in every row: equal ones would all choose the same experts."""
    return 1 + 97 * row


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

    def __init__(
        self,
        model: nn.Module,
        rows: int,
        context: int,
        steps: int,
        options: RunnerOptions,
        sampling: SamplingKernel | None = None,
        *,
        early: bool = True,
    ) -> None:
        block_size = 32
        found = read_layout(model, block_size)
        self.blocks = -(-(context + steps) // block_size)
        store = PoolStore.checked() if _on_gpu() else None
        pool = KVPool(found.layers, [rows * self.blocks + 1], block_size, head_major=not _on_gpu(), store=store)
        mx.eval(pool.state)
        vocab = int(model(mx.zeros((1, 1), mx.int32)).shape[-1])
        recorder = Recorder.for_device(early=early)
        self.graphs = None if recorder is None else StepGraphs(recorder, GRAPH_BYTES)
        self.runner = ModelRunner(
            model, HeadSelector(), pool, found.layout, vocab, options, graphs=self.graphs, sampling=sampling
        )
        self.rows, self.context, self.block_size = rows, context, block_size
        self.position = context
        self.handle: Any = None
        self.needed, self.kept = 0, list[tuple[tuple[int, ...]]]()
        self.host_s = 0.0  # spent on building and starting steps

    def launch(self, *, first: bool) -> Any:
        rows = []
        needed = self.position // self.block_size + 1
        for row in range(self.rows):
            rows.append(
                ScheduledRow(
                    row, self.position, 1, (first_token(row),) if first else (), self.tables(needed)[row], True,
                    self.position + 1, 0, GREEDY, self.context,
                )
            )  # fmt: skip
        self.position += 1
        return self.runner.launch(SchedulerOutput(self.position, decode=tuple(rows)))

    def tables(self, needed: int) -> list[tuple[tuple[int, ...]]]:
        """Block tables of the rows; the same objects while a row has no new block, as the scheduler's are."""
        if needed != self.needed:
            starts = [1 + row * self.blocks for row in range(self.rows)]
            self.needed, self.kept = needed, [(tuple(range(start, start + needed)),) for start in starts]
        return self.kept

    def run(self, steps: int) -> float:
        """Seconds per step over ``steps`` steps."""
        handle = self.handle or self.launch(first=True)
        start = time.perf_counter()
        self.host_s = 0.0
        for _ in range(steps):
            before = time.perf_counter()
            following = self.launch(first=False)
            self.host_s += (time.perf_counter() - before) / steps
            handle.result()
            handle = following
        self.handle = handle
        return (time.perf_counter() - start) / steps


def prepare(model: nn.Module, *, early: bool = True) -> str:
    """Substitute modules and choose the attention as the server does at load; what was chosen."""
    found = read_layout(model, 32)
    heads = int(model.args.num_attention_heads)
    choice = choose_kernel(found.layers[0], heads, found.layout.groups[0].window, 32)
    install(choice.kernel)
    fuse_projections(model)
    note = choice.note
    if _on_gpu() and not mx.metal.is_available():
        recorder = Recorder.for_device(early=early)
        note = f"{note}; {substitute_decode_products(model, PoolStore.checked(), recorder)}"
    substitute_head(model)
    return note


def headrace_ms(
    model: nn.Module,
    rows: int,
    context: int,
    steps: int,
    options: RunnerOptions,
    sampling: SamplingKernel | None = None,
    *,
    early: bool = True,
) -> float:
    bench = HeadraceStep(model, rows, context, 3 * steps + 8, options, sampling, early=early)
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
    generator.insert([[first_token(row)] for row in range(rows)], caches=caches)
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


def _clear() -> None:
    gc.collect()
    mx.clear_cache()


# -- the grid ------------------------------------------------------------------------------------------


def device_bytes() -> int | None:
    """Memory of the GPU; None on the CPU, where everything is tried."""
    info = mx.device_info()
    if not _on_gpu():
        return None
    return int(info.get("max_recommended_working_set_size") or info["total_memory"])


class Bench:
    """Measures cells within a budget of time and the device's memory."""

    def __init__(self, args: argparse.Namespace, grid: Grid) -> None:
        self.args, self.grid = args, grid
        self.cells: list[Cell] = []
        self.memory = device_bytes()
        self.bandwidth = copy_bandwidth()

    def shape(self, name: str, all_bits: list[int], budget: Budget) -> None:
        """All cells of one shape: PyTorch once, then each packing in an equal part of the time that is left."""
        torch_ms = self.torch(name, budget.part(2 + 2 * len(all_bits))) if self.args.torch else {}
        for done, bits in enumerate(all_bits):
            part = budget.part(len(all_bits) - done)
            if part.is_over:
                return
            self.packing(name, bits, part, torch_ms if bits == 16 else {})
            _clear()

    def packing(self, name: str, bits: int, budget: Budget, torch_ms: dict[tuple[int, int], float]) -> None:
        model = random_model(name, bits=bits)
        peer: dict[tuple[int, int], Cell] = {}
        for rows, context in [] if self.args.no_peer else self.grid.cells(budget.part(2)):
            needed = weight_bytes(model) + 2 * self.kv_bytes(model, rows, context)  # the caches, and their batch
            found = self.tried(needed, lambda r=rows, c=context: batch_generator_ms(model, r, c, self.args.steps))
            peer[rows, context] = {f"mlx_lm_{key}": value for key, value in found.items()}
        read = {rows: step_bytes(name, model, rows) for rows in self.grid.rows}
        if bits < 16 and _is_cuda():
            both = not self.args.packed
            model = unpacked(name, model) if self.args.unpacked else held_packed(model, both=both)
            _clear()
        early = not self.args.no_early
        kernel = prepare(model, early=early)
        sampling = choose_sampling(int(model(mx.zeros((1, 1), mx.int32)).shape[-1]))
        options = RunnerOptions(compile=_on_gpu() and not self.args.no_compile, max_prefill_rows=1)
        for rows, context in self.grid.cells(budget):
            kv = self.kv_bytes(model, rows, context)
            cell: Cell = {"shape": name, "bits": bits, "rows": rows, "context": context}
            cell["floor_ms"] = round((read[rows] + kv) / self.bandwidth * 1e3, 3)
            found = self.tried(
                weight_bytes(model) + kv,
                lambda r=rows, c=context: headrace_ms(
                    model, r, c, self.args.steps, options, sampling, early=early
                ),
            )
            cell |= {f"headrace_{key}": value for key, value in found.items()} | peer.get((rows, context), {})
            if (rows, context) in torch_ms:
                cell["torch_ms"] = torch_ms[rows, context]
            self.note({**cell, "attention": kernel})

    def kv_bytes(self, model: nn.Module, rows: int, context: int) -> int:
        return read_layout(model, 32).layout.bytes_per_token * rows * context

    def tried(self, needed: int, measure: Callable[[], float]) -> Cell:
        """``ms``, or ``bytes`` when the cell does not fit, or ``error``."""
        if self.memory is not None and needed + SPARE_BYTES > self.memory:
            return {"bytes": needed + SPARE_BYTES}
        try:
            return {"ms": round(measure(), 3)}
        except Exception as error:  # one cell's fault must not cost the others, device time is scarce
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
        finally:
            _clear()

    def torch(self, name: str, budget: Budget) -> dict[tuple[int, int], float]:
        """PyTorch's milliseconds by (rows, context), from a process of its own."""
        if not is_dense(name) or budget.is_over:
            return {}
        _clear()
        script = Path(__file__).parent / "torch_decode.py"
        words = ["--shape", name, "--rows", self.args.rows, "--context", self.args.context]
        words += ["--device", "cuda" if _on_gpu() else "cpu"]
        words += ["--budget", f"{budget.left_s:.0f}"] if budget.is_limited else []
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        found: dict[tuple[int, int], float] = {}
        process = subprocess.run(
            [self.args.torch, str(script), *words], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        for line in process.stdout.splitlines():
            print(line, flush=True)
            if not line.startswith("{"):
                continue
            cell = json.loads(line)
            if "torch_ms" in cell:
                found[cell["rows"], cell["context"]] = cell["torch_ms"]
        if process.returncode:
            print(f"{self.args.torch} {script.name}: exit code {process.returncode}", flush=True)
        return found

    def note(self, cell: Cell) -> None:
        """Keep, print and write a cell, with its ratios."""
        for name, other in (("ratio", "mlx_lm_ms"), ("vs_torch", "torch_ms")):
            if other in cell and "headrace_ms" in cell:
                cell[name] = round(cell[other] / cell["headrace_ms"], 2)
        self.cells.append(cell)
        print(json.dumps(cell), flush=True)
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(self.cells, indent=1))


def _is_cuda() -> bool:
    return _on_gpu() and not mx.metal.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="llama-1b,llama-8b,qwen3-30b-a3b", help=",".join(SHAPES))
    parser.add_argument("--bits", default="16")
    parser.add_argument("--rows", default="1,5,32,128")
    parser.add_argument("--context", default="256,2048")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-early", action="store_true", help="no kernel begins before the one ahead has ended")
    parser.add_argument("--packed", action="store_true", help="hold packed weights on CUDA and no others")
    parser.add_argument("--unpacked", action="store_true", help="unpack weights on CUDA")
    parser.add_argument(
        "--torch", nargs="?", const=sys.executable, metavar="PYTHON", help="PyTorch too, with this interpreter"
    )
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--verbose", action="store_true", help="print what was measured for each kind of product")
    parser.add_argument("--json", metavar="FILE", help="written after every cell")
    args = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("headrace.runner").setLevel(logging.DEBUG if args.verbose else logging.INFO)
    device_cache()  # before MLX compiles anything: then it settles on a folder
    budget = Budget.starting_now(args.budget)
    bench = Bench(args, Grid.parse(args.rows, args.context))
    print(f"device {mx.device_info().get('device_name')}, copy {bench.bandwidth / 1e12:.2f} TB/s", flush=True)
    shapes = args.shapes.split(",")
    for done, shape in enumerate(shapes):
        part = budget.part(len(shapes) - done)
        if not part.is_over:
            bench.shape(shape, [int(bits) for bits in args.bits.split(",")], part)
    print(markdown_table(bench.cells, bench.grid))
    if budget.is_limited:
        print(f"{budget.used_s:.0f} of {args.budget:.0f} s used")


if __name__ == "__main__":
    main()
