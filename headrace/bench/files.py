"""Reports as files: JSON and SQLite hold everything and can be read back, CSV holds a row of figures per cell."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.bench.report import FORMAT, FORMAT_VERSION, Report, flat_cell
from headrace.bench.server import BenchFault

_SAMPLE_COLUMNS = (
    *("repetition", "index", "turn", "stream", "due_s", "sent_s", "end_s", "status", "prompt_tokens"),
    *("cached_tokens", "reasoning_tokens", "output_tokens", "estimated", "finish_reason", "failure", "detail"),
    "text_times_s",
)


def to_json(report: Mapping[str, Any]) -> str:
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def to_csv(report: Mapping[str, Any]) -> str:
    """One row per cell; nothing measured is an empty field."""
    rows = [flat_cell(cell) for cell in report["cells"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_text(path: str, text: str) -> None:
    """Whole or not at all."""
    staging = Path(f"{path}.part")
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)


def write_sqlite(report: Mapping[str, Any], path: str) -> None:
    """Tables ``report`` (JSON without the cells), ``cells`` (figures as columns, runs as JSON), ``samples``."""
    staging = Path(f"{path}.part")
    staging.unlink(missing_ok=True)
    with closing(sqlite3.connect(staging)) as database, database:
        database.execute("CREATE TABLE report (json TEXT NOT NULL)")
        rest = {name: value for name, value in report.items() if name != "cells"}
        database.execute("INSERT INTO report VALUES (?)", (json.dumps(rest, allow_nan=False),))
        cells = report["cells"]
        columns = list(flat_cell(cells[0])) if cells else ["name"]
        _create(database, "cells", ["cell", *columns, "json"])
        _create(database, "samples", ["cell", *_SAMPLE_COLUMNS])
        for number, cell in enumerate(cells):
            whole = {name: value for name, value in cell.items() if name != "samples"}
            row = flat_cell(cell)
            _insert(database, "cells", [number, *(row[name] for name in columns), json.dumps(whole)])
            for sample in cell["samples"]:
                times = json.dumps(sample["text_times_s"])
                _insert(database, "samples", [number, *(sample[name] for name in _SAMPLE_COLUMNS[:-1]), times])
    os.replace(staging, path)


def _create(database: sqlite3.Connection, table: str, columns: Sequence[str]) -> None:
    names = ", ".join(f'"{name}"' for name in columns)
    database.execute(f"CREATE TABLE {table} ({names})")


def _insert(database: sqlite3.Connection, table: str, values: Sequence[object]) -> None:
    database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", list(values))


def read_report(path: str) -> Report:
    """A report from JSON or SQLite. Raises BenchFault: no such file, or not such a report."""
    try:
        with open(path, "rb") as file:
            begin = file.read(16)
        report = (
            _from_sqlite(path) if begin.startswith(b"SQLite format 3") else json.loads(Path(path).read_bytes())
        )
    except OSError as error:
        raise BenchFault(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError, sqlite3.Error):
        raise BenchFault(f"{path}: neither JSON nor SQLite of bench-serve") from None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise BenchFault(f"{path}: not a result of bench-serve")
    if report.get("format_version") != FORMAT_VERSION:
        raise BenchFault(f"{path}: format {report.get('format_version')}; this version reads {FORMAT_VERSION}")
    return report


def _from_sqlite(path: str) -> Report:
    with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True)) as database:
        report: Report = json.loads(database.execute("SELECT json FROM report").fetchone()[0])
        report["cells"] = []
        for number, text in database.execute("SELECT cell, json FROM cells ORDER BY cell").fetchall():
            samples = database.execute("SELECT * FROM samples WHERE cell = ? ORDER BY rowid", (number,)).fetchall()
            report["cells"].append({**json.loads(text), "samples": [_sample_row(row[1:]) for row in samples]})
    return report


def _sample_row(row: Sequence[Any]) -> Report:
    data = dict(zip(_SAMPLE_COLUMNS, row, strict=True))
    data["estimated"] = bool(data["estimated"])
    data["text_times_s"] = json.loads(data["text_times_s"])
    return data
