"""The paged prefill kernel over a grid of forms on a GPU, against attention by its definition (on the host).

    python tests/runner/gpu_prefill_grid.py [--seconds 120]

The commonest forms first, then random ones, each pair of values of two axes being tried early. Every failure is
reported, none stops the run; what the time does not reach is named.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent.parent))

from prefill_cases import Prompts, build, definition, fault

from headrace.runner.attention import paged_prefill
from headrace.runner.attention.paged_prefill import Form, PagedPrefillKernel

COUNT = 70
# Starts and lengths of a forward's rows: at edges of blocks and of tiles, and beside them.
ROWS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((0, 1, 31, 32, 33, 63, 64, 65), (1, 2, 40, 31, 32, 33, 64, 65)),
    ((0, 500, 128, 2), (130, 100, 128, 129)),
    ((1000,), (300,)),
    ((4001,), (17,)),
    ((700, 5, 2000), (8, 8, 5)),
)
AXES: dict[str, tuple[object, ...]] = {
    "dtype": ("bfloat16", "float16"),
    "widths": ((64, 64), (128, 128), (80, 80), (96, 96), (256, 256), (192, 128), (64, 128), (112, 112)),
    "ratio": (1, 2, 3, 4, 5, 7, 8, 16),
    "kv_heads": (1, 2, 3),
    "rows": ROWS,
    "block_size": (32, 16, 4),
    "window": (None, 1, 16, 100, 1024),
    "sinks": (False, True),
    "softcap": (0.0, 20.0),
    "bits": (None, 8, 4),
    "tiles": (0, 1, 2),
    "splits": (0, 1, 2, 8),
}


def cases() -> list[Prompts]:
    found = [
        Prompts("bfloat16", widths, 4, 8, *rows, block_size=32, bits=bits)
        for widths in ((128, 128), (64, 64))
        for bits in (None, 8, 4)
        for rows in ROWS[:3]
    ]
    rng, seen = random.Random(1), set[tuple[str, object, str, object]]()
    while len(found) < COUNT:
        drawn = [{name: rng.choice(options) for name, options in AXES.items()} for _ in range(50)]
        best = max(drawn, key=lambda values: len(_pairs(values) - seen))
        seen |= _pairs(best)
        starts, lengths = best.pop("rows")  # type: ignore[misc]
        case = replace(Prompts(), starts=starts, lengths=lengths, **best)  # type: ignore[arg-type]
        if max(case.widths) > 128:
            case = replace(case, tiles=min(case.tiles, 1))
        found.append(case)
    return found


def _pairs(values: dict[str, object]) -> set[tuple[str, object, str, object]]:
    return {(a, values[a], b, values[b]) for a, b in combinations(values, 2)}


def run(kernel: PagedPrefillKernel, case: Prompts) -> str | None:
    """What is wrong with a case."""
    usual = paged_prefill._chosen

    def chosen(*words: object, has_softcap: bool) -> tuple[Form, int]:
        form, splits = usual(*words, has_softcap=has_softcap)  # type: ignore[arg-type]
        return Form(form.layer, form.heads, case.tiles or form.tiles, has_softcap), case.splits or splits

    queries, view, sinks = build(case)
    paged_prefill._chosen = chosen
    try:
        got = kernel(queries, view, case.scale, case.window, sinks, case.softcap)
    finally:
        paged_prefill._chosen = usual
    return fault(case, got, definition(case, queries, view, sinks))


def run_grid(seconds: float, report: Callable[[str], None]) -> int:
    """How many cases are wrong or were not reached."""
    kernel = PagedPrefillKernel.for_device()
    assert kernel is not None
    begun, faults, chosen = time.monotonic(), 0, cases()
    for index, case in enumerate(chosen):
        if time.monotonic() - begun > seconds:
            report(f"not run, {seconds:.0f} s are over: {len(chosen) - index} cases from {case}")
            return faults + len(chosen) - index
        try:
            what = run(kernel, case)
        except Exception as error:
            what = " | ".join(f"{type(error).__name__}: {error}".splitlines()[:4])[:400]
        if what is not None:
            faults += 1
            report(f"FAULT {case}: {what}")
    report(f"{len(chosen)} cases, {faults} faults, {time.monotonic() - begun:.0f} s")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    args = parser.parse_args()
    if mx.default_device() != mx.gpu or mx.metal.is_available():
        print("needs a GPU of CUDA")
        return 2
    return 1 if run_grid(args.seconds, lambda line: print(line, flush=True)) else 0


if __name__ == "__main__":
    sys.exit(main())
