"""Prefill tokens per second: Headrace's runner over its pools beside mlx-lm's own, same run, random weights.

    python benchmarks/gpu_prefill.py --shapes llama-1b,llama-8b --lengths 512,2048,8192,16384 --budget 240 --json f
    python benchmarks/gpu_prefill.py --shapes tiny --lengths 64,200 --repeats 1 --each 40 --gather   # any machine

Five kinds of cells, each timed until the first token is on the host, best of ``--repeats`` after a first one:

    exact     not timed: by how much of their spread logits differ from mlx-lm's (16 bits: a few hundredths) for a
              cold prompt, chunks that begin anywhere, and several prompts behind different prefixes in one pass
    prompt    one prompt, cold, in chunks of ``--chunk``. Peer: mlx-lm's ``generate_step`` with its own chunk
              (2048), and once more with ours where that is another one
    together  ``--together`` prompts of ``--each`` tokens in one pass, and one after another. Peer: BatchGenerator,
              and ``generate_step`` one after another
    prefix    a prompt whose first half is in the cache already; only the second half counts. ``same`` says whether
              the first token is a cold run's, ``off`` by how much of their spread logits differ (rounding). Peer:
              ``generate_step`` on a trimmed cache
    lengths   prompts of lengths that the process has not seen, each once, no warm-up: what a server meets, where
              libraries plan anew for every shape

The floor is 2 operations per weight and token and causal attention's, over the rate of a large bf16 product
measured at the start. Engines take turns cell by cell; the JSON is written after each one. Ours has its modules
substituted and attention of prompts chosen as the server does (on CUDA decode products are timed on the way).
``headrace_host_ms``, and "host" in the table, is what the host takes to build and start a cell's steps in the best
repeat: beside the whole it says whether a prompt waits for the host or the device. ``--unfused`` leaves prompts to
the unmodified decoder blocks.
"""

# ruff: noqa: E402 (MLX reads its settings when it is imported)

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from headrace.runner import mlx_environment

mlx_environment.prepare()  # as a worker does; mlx-lm here runs under the same settings

import mlx.core as mx
import mlx.nn as nn
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from decode_report import Budget, Cell
from gpu_decode import SPARE_BYTES, device_bytes
from model_shapes import prefill_flops, random_model, twin, weight_bytes
from shapes import SHAPES

from headrace.core.step import ScheduledRow, SchedulerOutput
from headrace.params import SamplingParams
from headrace.runner.attention.dispatch import install
from headrace.runner.attention.kernel_check import choose_model_kernel, model_forms
from headrace.runner.attention.prefill_check import choose_prefill
from headrace.runner.forwards.logits_head import HeadSelector, substitute_head
from headrace.runner.kernels.cache import device_cache
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.kv.layout import read_layout
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.store import PoolStore
from headrace.runner.model_runner import ModelRunner, RunnerOptions
from headrace.runner.substitutions.decode_products import substitute_decode_products
from headrace.runner.substitutions.decoder_block import FusedBlock
from headrace.runner.substitutions.fused_linear import fuse_projections

BLOCK_SIZE = 32
PEER_CHUNK = 2048  # mlx-lm's default prefill_step_size
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
UNSEEN = (403, 451, 499, 547, 595, 643)


def on_gpu() -> bool:
    return bool(mx.default_device() == mx.gpu)


def product_rate() -> float:
    """Floating-point operations per second of a large bf16 product."""
    side = 8192 if on_gpu() else 256
    left, right = (mx.random.normal((side, side), dtype=mx.bfloat16) for _ in range(2))
    mx.eval(left, right)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        mx.eval([left @ right for _ in range(4)])
        best = min(best, (time.perf_counter() - start) / 4)
    return 2.0 * side**3 / best


def tokens_of(length: int, vocab: int, seed: int) -> list[int]:
    """A prompt of random tokens."""
    found: list[int] = np.random.default_rng(seed).integers(1, vocab - 1, length).tolist()
    return found


# -- ours ----------------------------------------------------------------------------------------------


class HeadracePrefill:
    """Prefills through the runner, launched one ahead as the server does."""

    def __init__(
        self, model: nn.Module, selector: HeadSelector, vocab: int, tokens: int, rows: int, *, gather: bool
    ) -> None:
        found = read_layout(model, BLOCK_SIZE)
        self.blocks = -(-(tokens + 1) // BLOCK_SIZE)
        store = PoolStore.checked() if on_gpu() else None
        pool = KVPool(found.layers, [rows * self.blocks + 1], BLOCK_SIZE, head_major=not gather, store=store)
        mx.eval(pool.state)
        options = RunnerOptions(compile=False, max_prefill_rows=max(8, rows))
        self.runner = ModelRunner(model, selector, pool, found.layout, vocab, options)
        self.step = 0
        self.host_s = 0.0  # of the last run, spent on building and starting steps

    def row(self, index: int, prompt: list[int], start: int, end: int) -> ScheduledRow:
        first = 1 + index * self.blocks
        table = tuple(range(first, first + -(-end // BLOCK_SIZE)))
        return ScheduledRow(
            index, start, end - start, tuple(prompt[start:end]), (table,), end == len(prompt), end, 0, GREEDY,
            len(prompt),
        )  # fmt: skip

    def chunks(self, index: int, prompt: list[int], start: int, chunk: int) -> list[list[ScheduledRow]]:
        """Steps of one row each that compute the prompt from ``start`` on."""
        return [
            [self.row(index, prompt, first, min(first + chunk, len(prompt)))]
            for first in range(start, len(prompt), chunk)
        ]

    def run(self, steps: list[list[ScheduledRow]]) -> int:
        """The last token sampled."""
        token, handle = -1, None
        self.host_s = 0.0
        for rows in [*steps, None]:
            following = None
            if rows is not None:
                self.step += 1
                before = time.perf_counter()
                following = self.runner.launch(SchedulerOutput(self.step, prefill=tuple(rows)))
                self.host_s += time.perf_counter() - before
            if handle is not None:
                for sampled in handle.result().sampled.values():
                    token = sampled.token_id
            handle = following
        return token

    def logits(self, row: ScheduledRow) -> mx.array:
        return self.runner.prefill_logits([row])[0].astype(mx.float32)


def prepare(model: nn.Module) -> str:
    """Substitute modules and choose the attention of prompts as the server does at load; what was chosen."""
    found, heads = read_layout(model, BLOCK_SIZE), int(model.args.num_attention_heads)
    decode = choose_model_kernel(found, heads, 0.0)
    prefill = choose_prefill(model_forms(found, heads, 0.0), BLOCK_SIZE)
    install(decode.kernel, prefill.kernel)
    fuse_projections(model)
    notes = [decode.note, prefill.note]
    if on_gpu() and not mx.metal.is_available():
        notes.append(substitute_decode_products(model, PoolStore.checked(), Recorder.for_device()))
    return "; ".join(note for note in notes if note)


# -- mlx-lm's ------------------------------------------------------------------------------------------


def generate_step(model: nn.Module, prompt: list[int], chunk: int, cache: Any = None) -> None:
    """mlx-lm's prefill and first token."""
    from mlx_lm.generate import generate_step as steps

    for _ in steps(mx.array(prompt), model, max_tokens=0, prefill_step_size=chunk, prompt_cache=cache):
        pass


def batch_generator(model: nn.Module, prompts: list[list[int]]) -> None:
    """mlx-lm's batch prefill until every prompt has its first token."""
    from mlx_lm.generate import BatchGenerator

    count = len(prompts)
    generator = BatchGenerator(model, completion_batch_size=count, prefill_batch_size=count, max_tokens=4)
    uids = set(generator.insert(prompts))
    while uids:
        uids -= {response.uid for response in generator.next()[1]}
    generator.close()


# -- the grid ------------------------------------------------------------------------------------------


class Bench:
    """Measures cells within a budget of time and the device's memory."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cells: list[Cell] = []
        self.memory = device_bytes()
        self.rate = product_rate()

    def shape(self, name: str, budget: Budget) -> None:
        """All cells of a shape, in the order of what matters most."""
        peer = random_model(name)
        model = twin(name, peer)
        print(f"{name}: {prepare(model)}", flush=True)
        for _, block in model.named_modules():
            if isinstance(block, FusedBlock) and self.args.unfused:
                block.prompts = False
        selector, _ = substitute_head(model)
        self.name, self.peer, self.model, self.selector = name, peer, model, selector
        self.vocab = int(SHAPES[name]["vocab_size"])
        print(f"{name}: built, {budget.used_s:.0f} s", flush=True)
        for make in self.plan():
            if budget.is_over:
                print(f"{name}: out of time", flush=True)
                break
            try:
                self.note(make())
            except Exception as error:  # what a cell needs before it is timed may fail too
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
            gc.collect()
            mx.clear_cache()
        del self.peer, self.model, self.selector

    def plan(self) -> Iterator[Callable[[], Cell]]:
        lengths = sorted(int(word) for word in self.args.lengths.split(","))
        short = [length for length in lengths if length <= 4096]
        yield self.exact
        for length in short:
            yield lambda n=length: self.prompt(n)
        yield self.together
        for length in short[-1:]:
            yield lambda n=length: self.prefix(n)
        for length in lengths[len(short) :]:
            yield lambda n=length: self.prompt(n)
        yield self.unseen
        for length in lengths[len(short) :]:
            yield lambda n=length: self.prefix(n)

    def cell(self, kind: str, length: int, rows: int, start: int, computed: int) -> Cell:
        flops = rows * prefill_flops(self.name, self.peer, start, computed)
        return {
            "shape": self.name, "kind": kind, "length": length, "rows": rows, "tokens": rows * computed,
            "floor_tok_s": round(rows * computed / (flops / self.rate), 1),
        }  # fmt: skip

    def ours(self, tokens: int, rows: int = 1) -> HeadracePrefill:
        gather = on_gpu() or self.args.gather
        return HeadracePrefill(self.model, self.selector, self.vocab, tokens, rows, gather=gather)

    def exact(self) -> Cell:
        lengths = [max(16, length * self.args.each // 512) for length in (700, 333, 640, 650)]
        cell = self.cell("exact", lengths[0], len(lengths), 0, lengths[0])
        prompts = [tokens_of(length, self.vocab, length) for length in lengths]
        wanted = [self.peer(mx.array([prompt]))[0, -1].astype(mx.float32) for prompt in prompts]
        engine = self.ours(max(lengths), len(lengths))

        def off(rows: list[ScheduledRow]) -> float:
            found = engine.runner.prefill_logits(rows).astype(mx.float32)
            pairs = [(found[place], wanted[row.seq_id]) for place, row in enumerate(rows)]
            return round(max(float(mx.max(mx.abs(a - b)) / (mx.max(b) - mx.min(b))) for a, b in pairs), 5)

        rows = [engine.row(index, prompt, 0, len(prompt)) for index, prompt in enumerate(prompts)]
        cell["off_cold"] = max(off([row]) for row in rows)
        cell["off_cold_together"] = off(rows)
        first = prompts[0]
        ends = [0, len(first) // 7, len(first) // 7 + 1, len(first) // 2, len(first)]
        engine.run([[engine.row(0, first, start, end)] for start, end in pairwise(ends[:-1])])
        cell["off_chunks"] = off([engine.row(0, first, ends[-2], ends[-1])])
        starts = [length // 3 for length in lengths]
        starts[-1] = starts[-2]
        parts = [engine.row(i, p, start, len(p)) for i, (p, start) in enumerate(zip(prompts, starts, strict=True))]
        cell["off_prefixes_together"] = off(parts)
        return cell

    def prompt(self, length: int) -> Cell:
        cell = self.cell("prompt", length, 1, 0, length)
        chunk = self.args.chunk
        prompt = tokens_of(length, self.vocab, length)
        if self.fits(cell, length, chunk):
            self.timed(cell, "mlx_lm", lambda: generate_step(self.peer, prompt, PEER_CHUNK))
            if chunk != PEER_CHUNK:
                self.timed(cell, "mlx_lm_our_chunk", lambda: generate_step(self.peer, prompt, chunk))
            engine = self.ours(length)
            self.timed(cell, "headrace", lambda: engine.run(engine.chunks(0, prompt, 0, chunk)), engine)
        return cell

    def together(self) -> Cell:
        rows, length = self.args.together, self.args.each
        cell = self.cell("together", length, rows, 0, length)
        if not self.fits(cell, rows * length, rows * length):
            return cell
        prompts = [tokens_of(length, self.vocab, seed) for seed in range(rows)]

        def peers_one_by_one() -> None:
            for prompt in prompts:
                generate_step(self.peer, prompt, PEER_CHUNK)

        self.timed(cell, "mlx_lm", lambda: batch_generator(self.peer, prompts))
        self.timed(cell, "mlx_lm_one_by_one", peers_one_by_one)
        engine = self.ours(length, rows)
        all_rows = [engine.row(index, prompt, 0, length) for index, prompt in enumerate(prompts)]
        self.timed(cell, "headrace", lambda: engine.run([all_rows]), engine)
        self.timed(cell, "headrace_one_by_one", lambda: engine.run([[row] for row in all_rows]), engine)
        return cell

    def prefix(self, length: int) -> Cell:
        from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

        half = length // 2 // BLOCK_SIZE * BLOCK_SIZE
        cell = self.cell("prefix", length, 1, half, length - half)
        if not self.fits(cell, length, self.args.chunk):
            return cell
        prompt, chunk = tokens_of(length, self.vocab, length), self.args.chunk
        cache = make_prompt_cache(self.peer)
        generate_step(self.peer, prompt, PEER_CHUNK, cache)

        def peers() -> None:
            trim_prompt_cache(cache, cache[0].offset - half)
            generate_step(self.peer, prompt[half:], PEER_CHUNK, cache)

        self.timed(cell, "mlx_lm", peers)
        engine = self.ours(length)
        cold = engine.run(engine.chunks(0, prompt, 0, chunk))
        self.timed(cell, "headrace", lambda: engine.run(engine.chunks(0, prompt, half, chunk)), engine)
        cell["same"] = engine.run(engine.chunks(0, prompt, half, chunk)) == cold
        if length - half <= chunk and length <= chunk:
            whole, part = (engine.logits(engine.row(0, prompt, start, length)) for start in (0, half))
            cell["off"] = round(float(mx.max(mx.abs(whole - part)) / (mx.max(whole) - mx.min(whole))), 5)
        return cell

    def unseen(self) -> Cell:
        lengths = [max(2, length * self.args.each // 512) for length in UNSEEN]
        cell = self.cell("lengths", lengths[0], 1, 0, sum(lengths) // len(lengths))
        cell["tokens"] = sum(lengths)
        prompts = [tokens_of(length, self.vocab, length) for length in lengths]
        engine = self.ours(max(lengths))
        self.once(cell, "mlx_lm", [lambda p=prompt: generate_step(self.peer, p, PEER_CHUNK) for prompt in prompts])
        chunk = self.args.chunk
        self.once(cell, "headrace", [lambda p=p: engine.run(engine.chunks(0, p, 0, chunk)) for p in prompts])
        return cell

    def fits(self, cell: Cell, tokens: int, chunk: int) -> bool:
        config = SHAPES[self.name]
        kv = 3 * read_layout(self.peer, BLOCK_SIZE).layout.bytes_per_token * tokens
        activations = 12 * min(chunk, tokens) * max(config["intermediate_size"], config["hidden_size"]) * 2
        needed = 2 * weight_bytes(self.peer) + kv + activations + SPARE_BYTES
        if self.memory is not None and needed > self.memory:
            cell["bytes"] = needed
            return False
        return True

    def timed(
        self, cell: Cell, engine: str, work: Callable[[], object], ours: HeadracePrefill | None = None
    ) -> None:
        """Best of the repeats, as milliseconds and tokens per second, or the fault; of ours the host's too."""
        try:
            best = host = float("inf")
            for repeat in range(self.args.repeats + 1):
                mx.synchronize()
                start = time.perf_counter()
                work()
                took = time.perf_counter() - start
                if repeat == 0:
                    cell[f"{engine}_first_ms"] = round(took * 1e3, 2)
                else:
                    host = ours.host_s if ours is not None and took < best else host
                    best = min(best, took)
            cell[f"{engine}_ms"] = round(best * 1e3, 2)
            if ours is not None:
                cell[f"{engine}_host_ms"] = round(host * 1e3, 2)
            cell[f"{engine}_tok_s"] = round(cell["tokens"] / best, 1)
        except Exception as error:  # one engine's fault must not cost the others, device time is scarce
            cell[f"{engine}_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def once(self, cell: Cell, engine: str, works: list[Callable[[], object]]) -> None:
        """Each piece of work once; the sum and every single time."""
        try:
            times = []
            for work in works:
                start = time.perf_counter()
                work()
                times.append(time.perf_counter() - start)
            cell[f"{engine}_each_ms"] = [round(took * 1e3, 2) for took in times]
            cell[f"{engine}_ms"] = round(sum(times) * 1e3, 2)
            cell[f"{engine}_tok_s"] = round(cell["tokens"] / sum(times), 1)
        except Exception as error:  # as above
            cell[f"{engine}_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def note(self, cell: Cell) -> None:
        """Keep, print and write a cell, with its ratios."""
        ours = cell.get("headrace_tok_s")
        if ours:
            cell["of_floor"] = round(ours / cell["floor_tok_s"], 3)
            for name, other in (("ratio", "mlx_lm_tok_s"), ("vs_one_by_one", "headrace_one_by_one_tok_s")):
                if other in cell:
                    cell[name] = round(ours / cell[other], 2)
        self.cells.append(cell)
        print(json.dumps(cell), flush=True)
        if self.args.json:
            Path(self.args.json).write_text(json.dumps(self.cells, indent=1))


COLUMNS = (
    ("mlx_lm_tok_s", "mlx-lm"),
    ("mlx_lm_our_chunk_tok_s", "mlx-lm, our chunk"),
    ("mlx_lm_one_by_one_tok_s", "mlx-lm, one by one"),
    ("headrace_tok_s", "Headrace"),
    ("headrace_ms", "Headrace, ms"),
    ("headrace_host_ms", "host, ms"),
    ("headrace_one_by_one_tok_s", "Headrace, one by one"),
    ("floor_tok_s", "floor"),
    ("ratio", "× mlx-lm"),
    ("vs_one_by_one", "× one by one"),
    ("of_floor", "of floor"),
)


def markdown_table(cells: list[Cell]) -> str:
    """Tokens per second, a line per cell; columns that nobody fills are left out."""
    columns = [(key, title) for key, title in COLUMNS if any(key in cell for cell in cells)]
    lines = [f"| shape, cell | {' | '.join(title for _, title in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for cell in cells:
        if cell["kind"] == "exact":
            continue
        rows = f"{cell['rows']} × " if cell["rows"] > 1 else ""
        shown = [_shown(cell, key) for key, _ in columns]
        lines.append(f"| {cell['shape']}, {cell['kind']} {rows}{cell['length']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _shown(cell: Cell, key: str) -> str:
    if key in cell:
        return f"{cell[key]:.0f}" if key.endswith("tok_s") else f"{cell[key]:.2f}"
    if "bytes" in cell and key == "headrace_tok_s":
        return f"needs {cell['bytes'] / (1 << 30):.0f} GiB"
    return "error" if key.replace("_tok_s", "_error") in cell else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shapes", default="llama-1b,llama-8b", help=",".join(SHAPES))
    add("--lengths", default="512,2048,8192,16384")
    add("--chunk", type=int, default=2048, help="tokens per step of ours")
    add("--repeats", type=int, default=3)
    add("--together", type=int, default=8, help="prompts in one pass")
    add("--each", type=int, default=512, help="their tokens")
    add("--unfused", action="store_true", help="prompts by the unmodified decoder blocks")
    add("--gather", action="store_true", help="pools and readers of a GPU on the CPU too")
    add("--budget", type=float, default=float("inf"), metavar="SECONDS")
    add("--json", metavar="FILE", help="written after every cell")
    args = parser.parse_args()
    device_cache()  # before MLX compiles anything: then it settles on a folder
    budget = Budget.starting_now(args.budget)
    bench = Bench(args)
    print(f"device {mx.device_info().get('device_name')}, bf16 {bench.rate / 1e12:.3g} TFLOP/s", flush=True)
    shapes = args.shapes.split(",")
    for done, shape in enumerate(shapes):
        part = budget.part(len(shapes) - done)
        if not part.is_over:
            bench.shape(shape, part)
            gc.collect()
            mx.clear_cache()
    print(markdown_table(bench.cells))
    if budget.is_limited:
        print(f"{budget.used_s:.0f} of {args.budget:.0f} s used")


if __name__ == "__main__":
    main()
