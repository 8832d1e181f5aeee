"""``headrace bench-serve compare A B``: two results, cell by cell, with 95 % intervals of the differences."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli.flags import Flag, FlagTable, UsageError, collect, make_parser, read_arguments
from headrace.cli.values import choice, integer

if TYPE_CHECKING:
    from headrace.bench.compare import Difference

_FLAGS = FlagTable.of(
    {
        "output": (
            Flag("--format", "what is written", "compare.format", choice("table", "json"), "table"),
            Flag("--draws", "bootstrap draws", "compare.draws", integer(100), "1000"),
        )
    }
)
_DESCRIPTION = (
    "Compares two results of bench-serve (json or sqlite): B against A, cells with the same prompts, lengths, "
    "load and cache. Intervals are 95 %, by the bootstrap."
)


def run(argv: Sequence[str]) -> int:
    """Raises BenchFault: a file is missing or no result."""
    positional, given = read_arguments(
        make_parser("bench-serve compare", "A B [options]", _DESCRIPTION, _FLAGS), _FLAGS, argv
    )
    if len(positional) != 2:
        raise UsageError("two files that bench-serve wrote as json or sqlite")
    values = collect(given)

    from headrace.bench.compare import compare, only_in_one
    from headrace.bench.files import read_report

    a, b = (read_report(path) for path in positional)
    found = compare(a, b, draws=int(str(values.get("compare.draws", 1000))))
    if values.get("compare.format") == "json":
        import json
        from dataclasses import asdict

        rows = [{**asdict(one), "verdict": one.verdict} for one in found]
        sys.stdout.write(json.dumps(rows, indent=1, allow_nan=False) + "\n")
    else:
        sys.stdout.write(to_table(found))
    for path, report in zip(positional, (a, b), strict=True):
        if report.get("incomplete"):
            print(f"headrace bench-serve compare: {path} is incomplete: it was interrupted", file=sys.stderr)
    for path, names in zip(positional, only_in_one(a, b), strict=True):
        for name in names:
            print(f"headrace bench-serve compare: only in {path}: {name}", file=sys.stderr)
    return 0 if found else 1


def to_table(found: Sequence[Difference]) -> str:
    lines = []
    cell = ""
    for one in found:
        if one.cell != cell:
            cell = one.cell
            lines.append(f"{cell}\n{'':<14}{'A':>12}{'B':>12}{'change':>10}   95 % interval")
        before, after = (_figure(value, one.unit) for value in (one.a, one.b))
        change = "-" if one.change is None else f"{one.change:+.1%}"
        between = "-" if one.low is None or one.high is None else f"{one.low:+.1%} to {one.high:+.1%}"
        lines.append(f"  {one.figure:<12}{before:>12}{after:>12}{change:>10}   {between}  {one.verdict}")
    lines.append(
        "Rates are tokens per second, times milliseconds, shares percent, memory MiB. ?: too few repetitions or"
        " requests to say."
    )
    return "\n".join(lines) + "\n"


_SCALES = {"s": 1000.0, "share": 100.0, "bytes": 1 / 2**20}


def _figure(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value * _SCALES.get(unit, 1.0):,.1f}"
