"""Decode time per token at a long and at a short context, of a model with sliding windows, on this machine.

    python benchmarks/window_decode.py                      Gemma 3 270M, 8k against 1k
    python benchmarks/window_decode.py --model scripted     five layers with a window of 64, one without
    python benchmarks/window_decode.py --model FOLDER

One process, the real runner and pools, steps of both contexts in turns, so that both meet the same disturbances;
medians. The contexts are not computed: their blocks are filled with random vectors, which takes as long to read.
What full-attention layers read grows with the context by nature; how much that is, is printed. ``--require 1.3``
makes the exit code 1 above that ratio.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.config import EngineConfig
from headrace.core.layout import KVLayout
from headrace.core.step import ScheduledRow, SchedulerOutput
from headrace.files import cache_folder
from headrace.params import SamplingParams
from headrace.runner.cpu import blas

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support import scripted

GEMMA = "gemma-3-270m-q4_k_m.gguf"
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True)
class Timing:
    """Of decode steps at one context: seconds, and KV bytes that they read."""

    context: int
    seconds: list[float]
    full_bytes: int
    sliding_bytes: int

    @property
    def median_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma", help="gemma, scripted, or a path")
    parser.add_argument("--contexts", type=int, nargs=2, default=(1024, 8192), metavar=("SHORT", "LONG"))
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8", "int4"))
    parser.add_argument("--require", type=float, help="largest ratio that passes")
    arguments = parser.parse_args()
    blas.prepare()  # before MLX is imported
    with model_path(arguments.model) as path:
        short, long = measure(path, arguments)
    ratio = long.median_ms / short.median_ms
    for timing in (short, long):
        print(
            f"{arguments.rows} x {timing.context:>6} tokens  {timing.median_ms:8.2f} ms a step"
            f"   KV read: {timing.full_bytes / 1e6:.1f} MB by full layers,"
            f" {timing.sliding_bytes / 1e6:.1f} MB in windows"
        )
    print(f"ratio {ratio:.3f}")
    return int(arguments.require is not None and ratio > arguments.require)


@contextmanager
def model_path(name: str) -> Iterator[Path]:
    if name == "gemma":
        yield cache_folder("models") / GEMMA
        return
    if name != "scripted":
        yield Path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield scripted.build(Path(folder) / "scripted", scripted.VARIANTS["swa64_deep"])


def measure(path: Path, arguments: argparse.Namespace) -> list[Timing]:
    import mlx.core as mx

    from headrace.runner.build import build_runner

    longest = max(arguments.contexts) + arguments.steps + 1
    config = EngineConfig(
        model=str(path),
        max_num_seqs=arguments.rows,
        max_model_len=longest,
        kv_cache_dtype=arguments.kv_cache_dtype,
        memory_headroom=0.02,
    )
    built = build_runner(config, lambda stage, fraction: None)
    pool, layout = built.runner._pool, built.layout
    keys = iter(mx.random.split(mx.random.key(1), len(pool.state)))
    pool.state = [_random(array, next(keys)) for array in pool.state]
    mx.eval(pool.state)
    seconds: dict[int, list[float]] = {context: [] for context in arguments.contexts}
    tables = Tables(layout, built.num_blocks, arguments.rows)
    for step in range(-3, arguments.steps):  # the first ones warm up
        for number, context in enumerate(arguments.contexts):
            position = context + max(step, 0)
            rows = [
                decode_row(number * arguments.rows + i, position, tables.of(i, position))
                for i in range(arguments.rows)
            ]
            began = time.perf_counter()
            built.runner.launch(SchedulerOutput(0, decode=tuple(rows))).result()
            if step >= 0:
                seconds[context].append(time.perf_counter() - began)
    return [
        Timing(context, seconds[context], *bytes_read(layout, context, arguments.rows))
        for context in arguments.contexts
    ]


def _random(array: object, key: object) -> object:
    import mlx.core as mx

    assert isinstance(array, mx.array) and isinstance(key, mx.array)
    if array.dtype == mx.uint32:
        return mx.random.randint(0, 1 << 30, array.shape, mx.uint32, key=key)
    return (0.3 * mx.random.normal(array.shape, key=key)).astype(array.dtype)


class Tables:
    """Block tables, consecutive as the scheduler likes to place them; the same object until a block is full."""

    def __init__(self, layout: KVLayout, num_blocks: Sequence[int], rows: int) -> None:
        self._layout = layout
        self._shares = [blocks // rows for blocks in num_blocks]
        self._known: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}

    def of(self, row: int, position: int) -> tuple[tuple[int, ...], ...]:
        size = self._layout.block_size
        key = row, position // size
        if key not in self._known:
            self._known[key] = tuple(
                self._table(group.window, share, row, position)
                for group, share in zip(self._layout.groups, self._shares, strict=True)
            )
        return self._known[key]

    def _table(self, window: int | None, share: int, row: int, position: int) -> tuple[int, ...]:
        size = self._layout.block_size
        gone = 0 if window is None else max(0, position - window + 1) // size
        held = position // size + 1 - gone
        assert held <= share, f"the pool is too small for this many rows of {position} tokens"
        return (0,) * gone + tuple(range(1 + row * share, 1 + row * share + held))


def decode_row(seq_id: int, position: int, tables: tuple[tuple[int, ...], ...]) -> ScheduledRow:
    return ScheduledRow(
        seq_id=seq_id,
        start=position,
        num_tokens=1,
        token_ids=(5 + position % 90,),
        block_tables=tables,
        samples=True,
        sample_position=position + 1,
        seed=0,
        params=GREEDY,
        num_prompt_tokens=position,
    )


def bytes_read(layout: KVLayout, context: int, rows: int) -> tuple[int, int]:
    """KV that a step's full-attention and sliding layers read."""
    full = sum(group.bytes_per_token * context for group in layout.groups if group.window is None)
    sliding = sum(
        group.bytes_per_token * min(context, group.window) for group in layout.groups if group.window is not None
    )
    return rows * full, rows * sliding


if __name__ == "__main__":
    sys.exit(main())
