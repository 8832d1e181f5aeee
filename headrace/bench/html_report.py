"""A report as one HTML file: charts as inline SVG, figures as a table, light and dark. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from headrace.bench.report import runs_of, warnings
from headrace.bench.stats import gaps_s, percentile, ttft_s
from headrace.bench.svg import Axis, Line, line_chart
from headrace.bench.table import COLUMNS, cost_lines, envelope_lines

_CURVE_POINTS = 101

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c2430; --soft: #5b6675; --rule: #dde2e9;
  --c0: #2563c9; --c1: #c2571a; --c2: #16805a; --c3: #8a3fb5; --c4: #b3890b; --c5: #c22f55; --c6: #3d7f96; --c7: #6b6f3a; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e4e9f0; --soft: #98a4b3; --rule: #2c3542;
  --c0: #6ea3ff; --c1: #f09a5e; --c2: #4fc796; --c3: #c590ee; --c4: #e0bb4b; --c5: #f0809c; --c6: #7cc4dc; --c7: #b9bd78; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
  max-width: 1200px; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 1.5rem; }
figure { margin: 0; } svg { width: 100%; height: auto; }
text { fill: var(--ink); font: 12px system-ui, sans-serif; } .title { font-weight: 600; font-size: 14px; }
.tick, .label { fill: var(--soft); } .grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.line { fill: none; stroke-width: 2; } .dot { stroke: var(--paper); stroke-width: 1.5; }
.legend { margin: .2rem 0 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; color: var(--soft); font-size: 13px; }
.key { display: inline-block; width: 12px; height: 3px; margin: 0 .4rem .25rem 0; vertical-align: middle; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
""" + "\n".join(
    f".line.c{n} {{ stroke: var(--c{n}); }} .dot.c{n} {{ fill: var(--c{n}); }} .key.c{n} {{ background: var(--c{n}); }}"
    for n in range(8)
)


def to_html(report: Mapping[str, Any]) -> str:
    meta = report["meta"]
    title = f"{meta['model']} under load"
    charts = "\n".join(f"<figure>{chart}</figure>" for chart in _charts(report) if chart)
    remarks = [*envelope_lines(report), *cost_lines(report), *warnings(report)]
    listed = "".join(f"<li>{escape(line)}</li>" for line in remarks)
    notes = f"<h2>Remarks</h2><ul>{listed}</ul>" if listed else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<div class="charts">{charts}</div>
<h2>Figures</h2><div class="scroll">{_table(report)}</div>
<p>Times are median / 95th percentile. A dash: not measured. Failed requests are in no other figure.</p>
{notes}
<h2>How it was measured</h2>{_meta(meta)}
</body></html>
"""


def _charts(report: Mapping[str, Any]) -> list[str]:
    cells = [cell for cell in report["cells"] if cell["figures"]["completed"]]
    charts = []
    for kind, label in (("concurrency", "requests at once"), ("rate", "requests per second asked for")):
        loaded = [cell for cell in cells if cell["load"]["kind"] == kind and cell["load"]["value"] != "inf"]
        charts.append(_throughput(loaded, label))
        charts.append(_latency_against_throughput(loaded, label))
    charts += _curves(cells, "TTFT", ttft_values)
    charts += _curves(cells, "ITL", gap_values)
    charts.append(_kv_use(cells))
    return charts


def _groups(cells: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Cells that differ in their load only, in order of it."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        warm = "" if cell["cache"] == "cold" else ", warm cache"
        groups.setdefault(f"{cell['prompts']} -> {cell['output_tokens_wished']}{warm}", []).append(cell)
    for group in groups.values():
        group.sort(key=lambda cell: float(cell["load"]["value"]))
    return groups


def _throughput(cells: Sequence[Mapping[str, Any]], label: str) -> str:
    lines = [
        Line(name, [(cell["load"]["value"], cell["figures"]["output_tokens_per_s"]) for cell in group])
        for name, group in _groups(cells).items()
    ]
    return line_chart(f"Throughput against {label}", Axis(label, log2=True), Axis("output tokens/s"), lines)


def _latency_against_throughput(cells: Sequence[Mapping[str, Any]], label: str) -> str:
    """A line per group; its points are the loads, so they need not go from left to right."""
    lines = [
        Line(
            name,
            [
                (cell["figures"]["output_tokens_per_s"], cell["figures"]["e2e_s"]["p50"])
                for cell in group
                if cell["figures"]["e2e_s"]["p50"] is not None
            ],
        )
        for name, group in _groups(cells).items()
    ]
    title = f"Latency against throughput, one point per number of {label}"
    return line_chart(title, Axis("output tokens/s"), Axis("median E2E, s"), lines)


def ttft_values(cell: Mapping[str, Any]) -> list[float]:
    samples = [sample for run in runs_of(cell) for sample in run.result.samples if sample.failure is None]
    return [value for sample in samples if (value := ttft_s(sample)) is not None]


def gap_values(cell: Mapping[str, Any]) -> list[float]:
    samples = [sample for run in runs_of(cell) for sample in run.result.samples if sample.failure is None]
    return [gap for sample in samples for gap in gaps_s(sample)]


def _curves(
    cells: Sequence[Mapping[str, Any]], what: str, values_of: Callable[[Mapping[str, Any]], list[float]]
) -> list[str]:
    """A distribution per cell: milliseconds against the share of requests (gaps) that took at most so long."""
    charts = []
    for name, group in _groups(cells).items():
        lines = []
        for cell in group:
            values = sorted(values_of(cell))
            points = [
                (1000 * value, float(percent))
                for percent in range(_CURVE_POINTS)
                if (value := percentile(values, percent)) is not None
            ]
            unit = " at once" if cell["load"]["kind"] == "concurrency" else "/s"
            value = cell["load"]["value"]
            number = value if isinstance(value, str) else f"{value:g}"
            lines.append(Line(number + unit, points))
        charts.append(
            line_chart(f"{what} distribution, {name}", Axis(f"{what}, ms"), Axis("% at most", top=100), lines)
        )
    return charts


def _kv_use(cells: Sequence[Mapping[str, Any]]) -> str:
    moments = sorted(
        (moment["at_s"], 100 * moment["kv_usage"])
        for cell in cells
        for run in cell["runs"]
        for moment in (run["server"] or {}).get("moments", ())
        if moment["kv_usage"] is not None
    )
    return line_chart(
        "KV use over time", Axis("seconds since the beginning"), Axis("% of KV blocks"), [Line("KV", moments)]
    )


def _table(report: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title, _ in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(read(cell))}</td>" for _, read in COLUMNS) + "</tr>"
        for cell in report["cells"]
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _meta(meta: Mapping[str, Any]) -> str:
    pairs = []
    for name, value in meta.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {item}" for key, item in value.items() if not isinstance(item, Mapping))
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        pairs.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>")
    return f"<dl>{''.join(pairs)}</dl>"
