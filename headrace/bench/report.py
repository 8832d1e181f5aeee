"""A campaign's result as plain data that JSON can hold: metadata, cells with figures, and the samples behind them.

Every figure of a cell can be computed again from its samples and runs (``runs_of``); what the client observes
about itself is a summary only. A number that was not measured is null. An infinite rate is spelled "inf".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from headrace.bench.campaign import CellRuns, Run
from headrace.bench.cells import Load
from headrace.bench.client_health import client_health
from headrace.bench.load import LoadResult
from headrace.bench.observe import Failure, Sample
from headrace.bench.prometheus import Moment, ServerRecord, server_figures
from headrace.bench.stats import Objectives, summarize_runs

FORMAT = "headrace-bench-serve"
FORMAT_VERSION = 1

Report = dict[str, Any]


def cell_report(one: CellRuns, objectives: Objectives | None = None) -> Report:
    """A measured (or skipped) cell."""
    results = [run.result for run in one.runs]
    summary = summarize_runs(results, objectives)
    records = [run.server for run in one.runs if run.server]
    cell = one.cell
    return {
        "name": str(cell),
        "prompts": cell.prompts,
        "prompt_tokens_wished": one.prompt_tokens,
        "prompt_tokens_exact": one.exact,
        "output_tokens_wished": cell.output_tokens,
        "load": {"kind": cell.load.kind, "value": load_value(cell.load)},
        "cache": cell.cache,
        "skipped": one.skipped,
        "incomplete": one.incomplete,
        "figures": asdict(summary),
        "server": asdict(server_figures(records)),
        "client": asdict(client_health(results, summary)),
        "runs": [_run_report(run) for run in one.runs],
        "samples": [
            {"repetition": run.repetition, **_without_text(sample)}
            for run in one.runs
            for sample in run.result.samples
        ],
    }


def load_value(load: Load) -> float | str:
    return "inf" if math.isinf(load.value) else load.value


def _run_report(run: Run) -> Report:
    result = run.result
    tokens = sum(sample.output_tokens for sample in result.samples if sample.failure is None)
    is_rated = result.duration_s > 0 and tokens and not result.interrupted
    return {
        "repetition": run.repetition,
        "began_s": run.began_s,
        "streams": result.streams,
        "duration_s": result.duration_s,
        "client_cpu_s": result.client_cpu_s,
        "interrupted": result.interrupted,
        "output_tokens_per_s": tokens / result.duration_s if is_rated else None,
        "server": asdict(run.server) if run.server else None,
    }


def _without_text(sample: Sample) -> Report:
    data = asdict(sample)
    del data["text"]
    return data


def runs_of(cell: Mapping[str, Any]) -> list[Run]:
    """A cell's runs as they were when they were measured, but for what the client observed about itself."""
    return [
        Run(
            run["repetition"],
            run["began_s"],
            LoadResult(
                run["streams"],
                run["duration_s"],
                run["client_cpu_s"],
                tuple(_sample(data) for data in cell["samples"] if data["repetition"] == run["repetition"]),
                interrupted=run.get("interrupted", False),
            ),
            _record(run["server"]),
        )
        for run in cell["runs"]
    ]


def _sample(data: Mapping[str, Any]) -> Sample:
    known = {name: value for name, value in data.items() if name != "repetition"}
    failure = None if known["failure"] is None else Failure(known["failure"])
    return Sample(**{**known, "failure": failure, "text_times_s": tuple(known["text_times_s"])})


def _record(data: Mapping[str, Any] | None) -> ServerRecord | None:
    if data is None:
        return None
    values = {field.name: data[field.name] for field in fields(ServerRecord)}
    values["queue_buckets"] = tuple((bound, count) for bound, count in data["queue_buckets"])
    values["moments"] = tuple(Moment(**moment) for moment in data["moments"])
    return ServerRecord(**values)


def flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings, names joined with dots; lists are left out."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            yield prefix + name, value


def flat_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's row in CSV and SQLite: everything but samples and runs; all kinds of failure are columns."""
    kinds = {str(kind): cell["figures"]["failed"].get(str(kind), 0) for kind in Failure}
    return dict(flat({**cell, "figures": {**cell["figures"], "failed": kinds}}))


def failures(report: Mapping[str, Any]) -> dict[str, int]:
    """Failed requests of all cells by kind."""
    total: dict[str, int] = {}
    for cell in report["cells"]:
        for kind, count in cell["figures"]["failed"].items():
            total[kind] = total.get(kind, 0) + count
    return total


def warnings(report: Mapping[str, Any]) -> list[str]:
    """What a reader of the figures has to know, one line each."""
    lines = []
    for cell in report["cells"]:
        lines += [f"{cell['name']}: {line}" for line in _cell_warnings(cell)]
    return lines


def _cell_warnings(cell: Mapping[str, Any]) -> Sequence[str]:
    if cell["skipped"]:
        return [f"not measured: {cell['skipped']}"]
    figures = cell["figures"]
    lines = list(cell["client"]["remarks"])
    if cell.get("incomplete"):
        lines.append(f"incomplete: {cell['incomplete']}")
    if failed := sum(figures["failed"].values()):
        kinds = ", ".join(f"{count} {kind}" for kind, count in figures["failed"].items())
        details = {sample["detail"] for sample in cell["samples"] if sample["failure"]}
        lines.append(f"{failed} of {failed + figures['completed']} requests failed ({kinds}): {min(details)}")
    if figures["estimated"]:
        lines.append(f"output tokens of {figures['estimated']} requests are estimates: the server sent no usage")
    if cell["prompt_tokens_exact"] is False:
        lines.append(f"prompts are of about {cell['prompt_tokens_wished']} tokens: the length is not exact")
    return lines
