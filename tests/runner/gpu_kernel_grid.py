"""The paged decode kernel over a grid of forms on a GPU, against attention by its definition (on the host).

    python tests/runner/gpu_kernel_grid.py [--seconds 225] [--jobs 4] [--no-tiles]

A form is what is compiled: widths, packing, dtype, queries per KV head, sinks, soft-capping, splits or none; each
costs seconds of compilation, so there are few, and each runs over many lengths and windows; several processes
share them, as one compiles on one core. Every failure is reported, none stops the run; forms that the time does
not reach are named.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import mlx.core as mx
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent.parent))

from kernel_cases import WIDTHS, Case, build, definition, fault

from headrace.runner.attention import paged_decode
from headrace.runner.attention.paged_decode import PagedDecodeKernel

EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300, 1025)
MANY = tuple(1 + 89 * row % 401 for row in range(40))
LONG = (4099, 5, 2048)
RUNS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    (EDGES, None),
    (EDGES, 100),
    (EDGES, 1),
    (MANY, None),
    (LONG, None),
    (LONG, 512),
)
SPLIT = 2  # stands for the most that there can be
_AXES: dict[str, tuple[object, ...]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "ratio": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
    "kv_heads": (1, 2, 8),
    "sinks": (False, True),
    "softcap": (0.0, 20.0),
    "splits": (1, SPLIT),
    "block_size": (32, 16),
}


def forms() -> list[Case]:
    """The commonest first, in both ways of splitting; then each widths with each packing once."""
    chosen = []
    for widths in ((128, 128), (64, 64)):
        for bits in (None, 8, 4):
            common = Case("bfloat16", widths, 4, 8, bits, block_size=32)
            chosen += [common, replace(common, splits=SPLIT)] if widths[0] == 128 else [common]
    rest = [(widths, bits) for widths in WIDTHS for bits in (None, 8, 4)]
    rng, seen = random.Random(1), {pair for case in chosen for pair in _pairs(case)}
    for widths, bits in rest:
        if any(case.widths == widths and case.bits == bits for case in chosen):
            continue
        found = [_random_form(rng, widths, bits) for _ in range(200)]
        best = max(found, key=lambda case: len(_pairs(case) - seen))
        seen |= _pairs(best)
        chosen.append(best)
    return chosen


def _random_form(rng: random.Random, widths: tuple[int, int], bits: int | None) -> Case:
    values = {name: rng.choice(options) for name, options in _AXES.items()}
    if widths[0] > 256:
        values["kv_heads"] = 1
    return replace(Case(), widths=widths, bits=bits, **values)  # type: ignore[arg-type]


def _pairs(case: Case) -> set[tuple[str, object, str, object]]:
    names = ("widths", "bits", *_AXES)
    return {(a, getattr(case, a), b, getattr(case, b)) for a, b in combinations(names, 2)}


def compilations(chosen: list[Case]) -> int:
    """Kernels that MLX compiles for these forms; by tensor cores, up to three for each that is not split."""
    combined = {(c.dtype, c.widths[1], c.heads, c.sinks) for c in chosen if c.splits > 1}
    return len(chosen) + len(combined)


def cases(form: Case) -> Iterator[Case]:
    for lengths, window in RUNS:
        yield replace(form, lengths=lengths, window=window)


def run_form(kernel: PagedDecodeKernel, form: Case) -> list[str]:
    """What is wrong with a form's cases."""
    # One split, or the most that there can be, empty ones too.
    splits = 1 if form.splits == 1 else paged_decode.MAX_SPLITS
    paged_decode.Form.splits = lambda *_: splits  # type: ignore[method-assign]
    faults = []
    for case in cases(form):
        try:
            queries, view, sinks = build(case)
            if not kernel.supports(queries, view):
                raise ValueError("not supported")
            got = kernel(queries, view, case.scale, case.window, sinks, case.softcap)
            out = np.array(got.astype(mx.float32), np.float64)[:, :, 0]
            what = fault(case, out, definition(case, queries, view, sinks))
        except Exception as error:
            what = " | ".join(f"{type(error).__name__}: {error}".splitlines()[:6])[:600]
            if "compile" in what or "not supported" in what:
                return [*faults, f"{case}: {what}"]
        if what is not None:
            faults.append(f"{case}: {what}")
    return faults


def run_grid(
    seconds: float, report: Callable[[str], None], part: int = 0, jobs: int = 1, *, tiles: bool = True
) -> list[str]:
    """All faults of every ``jobs``-th form from ``part`` on, and one line for each that was not reached."""
    kernel = PagedDecodeKernel.for_device(tiles=tiles)
    assert kernel is not None
    chosen, start = forms()[part::jobs], time.monotonic()
    usual = paged_decode.Form.splits
    report(f"{len(chosen)} forms, {compilations(chosen)} compilations")
    faults: list[str] = []
    try:
        for index, form in enumerate(chosen):
            begun = time.monotonic()
            if begun - start > seconds:
                faults.append(f"not run, {seconds:.0f} s are over: {form}")
                continue
            found = run_form(kernel, form)
            faults += found
            took = time.monotonic() - begun
            report(
                f"[{index + 1}/{len(chosen)}] {'FAULT' if found else 'ok'} {form} bs{form.block_size} {took:.1f} s"
            )
            for line in found:
                report(f"    {line}")
    finally:
        paged_decode.Form.splits = usual  # type: ignore[method-assign]
    report(f"{len(faults)} faults, {time.monotonic() - start:.0f} s")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=225.0)
    parser.add_argument("--jobs", type=int, default=4, help="processes on the one GPU")
    parser.add_argument("--part", type=int, help="one of them, from 0 on")
    parser.add_argument("--no-tiles", action="store_true", help="without tensor cores")
    args = parser.parse_args()
    if mx.default_device() != mx.gpu:
        print("needs a GPU: MLX computes on the CPU here")
        return 2
    if args.part is None and args.jobs > 1:
        command = [sys.executable, __file__, "--seconds", str(args.seconds), "--jobs", str(args.jobs)]
        command += [*(["--no-tiles"] if args.no_tiles else []), "--part"]
        parts = [subprocess.Popen([*command, str(part)]) for part in range(args.jobs)]
        codes = [part.wait() for part in parts]
        print("all right" if not any(codes) else f"exit codes of the processes: {codes}", flush=True)
        return max(map(abs, codes))

    def report(line: str) -> None:
        print(line, flush=True)

    return 1 if run_grid(args.seconds, report, args.part or 0, args.jobs, tiles=not args.no_tiles) else 0


if __name__ == "__main__":
    sys.exit(main())
