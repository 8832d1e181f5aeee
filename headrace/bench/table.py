"""A report for a terminal: one line per cell, and what a reader has to know below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.bench.report import warnings

Cell = Mapping[str, Any]


def _load(cell: Cell) -> str:
    value = cell["load"]["value"]
    number = value if isinstance(value, str) else f"{value:g}"
    return number if cell["load"]["kind"] == "concurrency" else f"{number}/s"


def _number(pattern: str, *path: str, scale: float = 1.0) -> Callable[[Cell], str]:
    def read(cell: Cell) -> str:
        value: Any = cell
        for name in path:
            value = value[name]
        return "-" if value is None else format(value * scale, pattern)

    return read


def _pair(*path: str) -> Callable[[Cell], str]:
    """Median and 95th percentile in milliseconds."""
    low, high = (_number(".0f", *path, name, scale=1000) for name in ("p50", "p95"))
    return lambda cell: f"{low(cell)} / {high(cell)}"


COLUMNS: Sequence[tuple[str, Callable[[Cell], str]]] = (
    ("prompts", lambda cell: cell["prompts"] + ("" if cell["cache"] == "cold" else " (warm)")),
    ("out", lambda cell: str(cell["output_tokens_wished"])),
    ("load", _load),
    ("ok", lambda cell: str(cell["figures"]["completed"])),
    ("failed", lambda cell: str(sum(cell["figures"]["failed"].values()))),
    ("out tok/s", _number(".1f", "figures", "output_tokens_per_s")),
    ("all tok/s", _number(".1f", "figures", "total_tokens_per_s")),
    ("TTFT ms", _pair("figures", "ttft_s")),
    ("ITL ms", _pair("figures", "itl_s")),
    ("TPOT ms", _pair("figures", "tpot_s")),
    ("E2E ms", _pair("figures", "e2e_s")),
    ("queue ms", _pair("server", "queue_wait_s")),
    ("tok/s each", _number(".1f", "figures", "decode_tokens_per_s", "p50")),
    ("KV %", _number(".0f", "server", "kv_usage_max", scale=100)),
    ("hits %", _number(".0f", "server", "cache_hit_rate", scale=100)),
    ("peak MiB", _number(",.0f", "server", "peak_memory_bytes", scale=2**-20)),
)


def to_table(report: Mapping[str, Any]) -> str:
    rows = [[title for title, _ in COLUMNS]]
    rows += [[read(cell) for _, read in COLUMNS] for cell in report["cells"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += ["", "Times: median / 95th percentile. - : not measured. Failed requests are in no other figure."]
    lines += envelope_lines(report) + cost_lines(report)
    lines += [f"note: {line}" for line in warnings(report)]
    return "\n".join(lines) + "\n"


def envelope_lines(report: Mapping[str, Any]) -> list[str]:
    """What the search for the highest load found."""
    lines = []
    for found in report["envelopes"]:
        unit = "at once" if found["axis"] == "concurrency" else "requests/s"
        what = f"{found['prompts']} -> {found['output_tokens']}"
        if found["highest_kept"] is None:
            lines.append(f"capacity, {what}: not even {found['lowest_broken']:g} {unit} keep the objectives")
            continue
        broken = found["lowest_broken"]
        beyond = "the highest that was tried" if broken is None else f"{broken:g} break them"
        lines.append(f"capacity, {what}: {found['highest_kept']:g} {unit} keep the objectives ({beyond})")
    return lines


def cost_lines(report: Mapping[str, Any]) -> list[str]:
    cost = report["cost"]
    if not cost:
        return []
    lines = [
        f"cost: {cost['per_million_tokens']:.3g} per million tokens at {cost['tokens_per_s']:.1f} tok/s "
        f"({cost['owning_per_hour']:.3g} an hour to own, {cost['electricity_per_hour']:.3g} of electricity)"
    ]
    if cost["rented_per_million_tokens"] is not None:
        hours = cost["break_even_hours"]
        when = "never pays for itself" if hours is None else f"pays for itself after {hours:,.0f} hours of work"
        lines.append(f"rented: {cost['rented_per_million_tokens']:.3g} per million tokens; owning {when}")
    return lines
