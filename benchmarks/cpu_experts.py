"""Forwards of a mixture of experts on the CPU, its experts widened and narrow: ms, and bytes of the weights.

    python benchmarks/random_checkpoint.py small-moe /tmp/small-moe-4bit 4
    python benchmarks/cpu_experts.py --model /tmp/small-moe-4bit --rows 1 8 32 --prompts 256
    python benchmarks/cpu_experts.py --model /tmp/small-moe-4bit --loads 5

One process, the real runner, the weights once for each way; decode steps of rows with random tokens behind random
contexts, and prompts of random tokens, so that rows choose experts of their own. Both ways take turns; medians and
best. "widened" is what experts were before they could stay narrow: float32 and MLX's own operations over them.
With ``--loads`` the model is loaded so often instead, its experts narrow: how fast they are read and laid out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from window_decode import GREEDY, Tables, _random

from headrace.config import EngineConfig
from headrace.core.step import ScheduledRow
from headrace.runner.cpu import blas

WAYS = ("widened", "narrow")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prompts", type=int, nargs="+", default=(256,))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--loads", type=int, help="times to load the model; nothing else is timed")
    parser.add_argument("--only", choices=WAYS, help="one way alone")
    arguments = parser.parse_args()
    blas.prepare()  # before MLX is imported
    if arguments.loads:
        return time_loads(arguments.model, arguments.loads)
    ways = [arguments.only] if arguments.only else WAYS
    runners = {way: Runner(arguments, experts=way == "narrow") for way in ways}
    cells = [("rows", rows) for rows in arguments.rows] + [("prompt", length) for length in arguments.prompts]
    print("| | " + " | ".join(f"{way}: median, best ms" for way in ways) + " |")
    print("|---|" + "---|" * len(ways))
    for kind, size in cells:
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(-1, arguments.rounds):  # the first one warms up
            for way, runner in runners.items():
                taken = runner.seconds(kind, size, seed=turn)
                if turn >= 0:
                    times[way].append(taken)
        shown = [f"{statistics.median(times[way]) * 1e3:.1f}, {min(times[way]) * 1e3:.1f}" for way in ways]
        print(f"| {size} {'rows' if kind == 'rows' else 'tokens of a prompt'} | " + " | ".join(shown) + " |")
    return 0


def time_loads(model: str, loads: int) -> int:
    """Seconds of each load, and of its part that lays out experts; bytes are those that are held."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from headrace.checkpoint.model_folder import describe
    from headrace.runner.cpu import products as cpu_products
    from headrace.runner.loading import loader

    choice, substitute, parts = cpu_products.choose(), loader.substitute_narrow_experts, []

    def timed(*given: object) -> int:
        began = time.perf_counter()
        count = substitute(*given)  # type: ignore[arg-type]
        parts.append(time.perf_counter() - began)
        return count

    loader.substitute_narrow_experts = timed
    mx.set_cache_limit(256 << 20)  # as the server
    for _ in range(loads):
        mx.reset_peak_memory()
        began = time.perf_counter()
        loaded = loader.load_model(describe(model), device="cpu", narrow=choice.kinds, products=choice.products)
        taken = time.perf_counter() - began
        held = [(path, array.nbytes) for path, array in tree_flatten(loaded.model.parameters())]
        experts, whole = sum(size for path, size in held if ".switch_mlp." in path), loaded.weights_bytes
        print(
            f"{whole / 2**30:.2f} GiB in {taken:.2f} s, {whole / 2**30 / taken:.2f} GiB/s, "
            f"peak {mx.get_peak_memory() / 2**30:.2f} GiB; "
            f"experts laid out in {parts.pop():.2f} s, {experts / 2**30:.2f} GiB"
        )
        del loaded
    return 0


class Runner:
    """The real runner over the model, its pools filled; ``experts``: whether their weights stay narrow."""

    def __init__(self, arguments: argparse.Namespace, *, experts: bool) -> None:
        import mlx.core as mx

        from headrace.runner import build
        from headrace.runner.cpu import products as cpu_products

        choose = cpu_products.choose
        if not experts:
            cpu_products.choose = lambda: replace(choose(), experts=False)  # type: ignore[assignment]
        longest = max(arguments.context + 1, *arguments.prompts)
        rows = max(arguments.rows)
        config = EngineConfig(
            model=arguments.model,
            max_num_seqs=rows,
            max_model_len=longest,
            memory_headroom=0.02,
            max_cache_blocks=rows * (longest // 16 + 2),
        )
        self._built = build.build_runner(config, lambda stage, fraction: None)
        cpu_products.choose = choose
        plan = self._built.ready_info.plan
        mib = {key: int(plan[key]) >> 20 for key in ("weights_bytes", "activations_bytes")}
        print(f"{WAYS[experts]}: weights {mib['weights_bytes']} MiB, activations {mib['activations_bytes']} MiB")
        pool = self._built.runner._pool
        keys = mx.random.split(mx.random.key(1), len(pool.state))
        pool.state = [_random(array, key) for array, key in zip(pool.state, keys, strict=True)]
        mx.eval(pool.state)
        self._context = arguments.context

    def seconds(self, kind: str, size: int, seed: int) -> float:
        """Of a decode step of ``size`` rows, or of a prompt of so many tokens."""
        import mlx.core as mx

        runner = self._built.runner
        tokens = partial(random.Random(seed).choices, range(self._built.ready_info.vocab_size - 4))
        began = time.perf_counter()
        if kind == "rows":
            rows = [self._row(size, row, self._context, tokens(k=1)) for row in range(size)]
            logits = runner.decode_logits(rows)
        else:
            logits = runner.prefill_logits([self._row(1, 0, 0, tokens(k=size))])
        mx.eval(logits, runner._pool.changes)
        return time.perf_counter() - began

    def _row(self, rows: int, row: int, start: int, tokens: Sequence[int]) -> ScheduledRow:
        end = start + len(tokens)
        return ScheduledRow(
            seq_id=row,
            start=start,
            num_tokens=len(tokens),
            token_ids=tuple(tokens),
            block_tables=Tables(self._built.layout, self._built.num_blocks, rows).of(row, end - 1),
            samples=True,
            sample_position=end,
            seed=0,
            params=GREEDY,
            num_prompt_tokens=end,
        )


if __name__ == "__main__":
    sys.exit(main())
