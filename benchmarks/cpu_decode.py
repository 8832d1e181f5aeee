"""Decode steps on the CPU with halves of blocks as native operations, with single ones, and with MLX's: ms a step.

    python benchmarks/cpu_decode.py --model FILE.gguf
    python benchmarks/cpu_decode.py --model FOLDER --rows 1 8 32 --contexts 70 400 2000 --kv-cache-dtype int8

One process, one copy of the weights per way; a few steps of each way in turns, each launched before the one
ahead of it is read, as the engine does. Median and best time, and CPU time of all threads. The contexts are not
computed: blocks are filled with random vectors, which takes as long to read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import msgspec
from window_decode import Tables, _random, decode_row

from headrace.config import EngineConfig
from headrace.core.step import SchedulerOutput
from headrace.runner.cpu import blas

_AHEAD = 3  # steps of a turn

WAYS = ("native", "single", "MLX")

# By rows and context: wall and CPU time of a step; 0 rows: of a prompt of that length.
Seconds = dict[tuple[int, int], list[tuple[float, float]]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--contexts", type=int, nargs="+", default=(70, 400, 2000))
    parser.add_argument("--prompts", type=int, nargs="+", default=(), help="and prompts of these lengths, alone")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "int8", "int4"))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="native, single operations, MLX's")
    arguments = parser.parse_args()
    blas.prepare()  # before MLX is imported
    ways = arguments.ways
    times = measure(arguments, ways)
    print("| rows × context | " + " | ".join(f"{way}: median, best; CPU ms" for way in ways) + " |")
    print("|---|" + "---|" * len(ways))
    for cell in times[ways[0]]:
        shown = []
        for way in ways:
            wall, busy = zip(*times[way][cell], strict=True)
            shown.append(f"{statistics.median(wall) * 1e3:.1f}, {min(wall) * 1e3:.1f}; {min(busy) * 1e3:.1f}")
        name = f"{cell[0]} × {cell[1]}" if cell[0] else f"prompt of {cell[1]}"
        print(f"| {name} | " + " | ".join(shown) + " |")
    return 0


def measure(arguments: argparse.Namespace, ways: Sequence[str]) -> dict[str, Seconds]:
    # The one built last binds its attention, which leaves the forwards of the other to MLX's operations.
    runners = {way: Runner(arguments, way) for way in sorted(ways)}
    times: dict[str, Seconds] = {way: {} for way in ways}
    for rows in arguments.rows:
        for context in arguments.contexts:
            for step in range(-2, arguments.steps):  # the first ones warm up
                for way, runner in runners.items():
                    taken = runner.steps(rows, context + _AHEAD * max(step, 0))
                    if step >= 0:
                        times[way].setdefault((rows, context), []).append(taken)
    for length in arguments.prompts:
        for step in range(-2, arguments.steps):
            for way, runner in runners.items():
                taken = runner.prompt(length)
                if step >= 0:
                    times[way].setdefault((0, length), []).append(taken)
    return times


class Runner:
    """The real runner over the model, its pools filled."""

    def __init__(self, arguments: argparse.Namespace, way: str) -> None:
        import mlx.core as mx

        from headrace.runner import build

        load, blocks = build.load_operations, build.substitute_native_blocks
        if way == "MLX":
            build.load_operations = lambda: None
        if way == "single":
            build.substitute_native_blocks = lambda *_: "decode blocks: single operations"
        longest = max(*arguments.contexts, *arguments.prompts, 0) + _AHEAD * (arguments.steps + 2)
        config = EngineConfig(
            model=arguments.model,
            max_num_seqs=max(arguments.rows),
            max_model_len=longest,
            kv_cache_dtype=arguments.kv_cache_dtype,
            memory_headroom=0.02,
            max_cache_blocks=max(arguments.rows) * (longest // 16 + 2),
        )
        built = build.build_runner(config, lambda stage, fraction: None)
        build.load_operations, build.substitute_native_blocks = load, blocks
        print(f"{way}: {built.ready_info.attention}")
        self._runner = built.runner
        pool = built.runner._pool
        keys = iter(mx.random.split(mx.random.key(1), len(pool.state)))
        for_each = []
        for array in pool.state:
            for_each.append(_random(array, next(keys)))
            mx.eval(for_each[-1])
        pool.state = for_each
        self._tables = {rows: Tables(built.layout, built.num_blocks, rows) for rows in arguments.rows}

    def steps(self, rows: int, position: int) -> tuple[float, float]:
        """Seconds of a step, of some from ``position`` on, and of CPU time."""
        tables = self._tables[rows]
        began, busy, running = time.perf_counter(), time.process_time(), None
        for end in range(position, position + _AHEAD):
            decode = tuple(decode_row(i, end, tables.of(i, end)) for i in range(rows))
            launched = self._runner.launch(SchedulerOutput(0, decode=decode))
            if running is not None:
                running.result()
            running = launched
        assert running is not None
        running.result()
        return (time.perf_counter() - began) / _AHEAD, (time.process_time() - busy) / _AHEAD

    def prompt(self, length: int) -> tuple[float, float]:
        """Seconds from the launch of a prompt to its first token, and of CPU time."""
        row = decode_row(0, 0, next(iter(self._tables.values())).of(0, length))
        tokens = tuple(5 + i % 90 for i in range(length))
        row = msgspec.structs.replace(
            row, num_tokens=length, token_ids=tokens, sample_position=length, num_prompt_tokens=length
        )
        began, busy = time.perf_counter(), time.process_time()
        self._runner.launch(SchedulerOutput(0, prefill=(row,))).result()
        return time.perf_counter() - began, time.process_time() - busy


if __name__ == "__main__":
    sys.exit(main())
