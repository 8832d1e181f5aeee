"""A report as one HTML file: charts as inline SVG, figures as a table. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from headrace.bench.html_style import STYLE
from headrace.bench.report import runs_of, warnings
from headrace.bench.stats import gaps_s, percentile, ttft_s
from headrace.bench.svg import Axis, Line, line_chart
from headrace.bench.table import COLUMNS, cost_lines, envelope_lines

_CURVE_POINTS = 101


def to_html(report: Mapping[str, Any]) -> str:
    meta = report["meta"]
    title = f"{meta['model']} under load"
    charts = "\n".join(f"<figure>{chart}</figure>" for chart in _charts(report) if chart)
    remarks = [*envelope_lines(report), *cost_lines(report), *warnings(report)]
    listed = "".join(f"<li>{escape(line)}</li>" for line in remarks)
    notes = f"<h2>Remarks</h2><ul>{listed}</ul>" if listed else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
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
    across = Axis(f"output tokens/s; a point for each number of {label}")
    return line_chart("Latency against throughput", across, Axis("median E2E, s"), lines)


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
