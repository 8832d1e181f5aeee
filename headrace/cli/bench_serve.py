"""``headrace bench-serve``: load on an OpenAI-compatible server, measured from outside.

    bench-serve [options]          measure
    bench-serve compare A B        what changed between two results
    bench-serve report FILE …      a result in another format

Exit codes: 0 measured; 1 some requests failed; 2 wrong usage, or nothing could be measured; 3 this client was the
bottleneck, so the figures are not the server's; 130 interrupted, what was measured by then is written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.cli.bench_flags import BENCH_FLAGS, FORMATS, BenchSettings, read_settings
from headrace.cli.flags import Flag, FlagTable, UsageError, collect, make_parser, read_arguments
from headrace.cli.values import choice, output_file
from headrace.errors import StartupError

if TYPE_CHECKING:
    from headrace.bench.report import Report
    from headrace.bench.session import Session

INTERRUPTED = 130

_DESCRIPTION = (
    "Sends streamed requests to an OpenAI-compatible server and reports rates and latencies. "
    "bench-serve compare A B compares two results; bench-serve report FILE --format F converts one."
)

_REPORT_FLAGS = FlagTable.of(
    {
        "output": (
            Flag("--format", "what is written", "bench.format", choice(*FORMATS), "table"),
            Flag("--output", "write to this file", "bench.output", output_file("FILE"), "standard output"),
        )
    }
)


def run(argv: Sequence[str]) -> int:
    from headrace.bench.server import BenchFault

    try:
        if argv and argv[0] == "compare":
            from headrace.cli.compare import run as run_compare

            return run_compare(argv[1:])
        return _convert(argv[1:]) if argv and argv[0] == "report" else _measure(argv)
    except BenchFault as fault:
        raise StartupError(str(fault)) from None


def _measure(argv: Sequence[str]) -> int:
    parser = make_parser("bench-serve", "[options]", _DESCRIPTION, BENCH_FLAGS)
    positional, given = read_arguments(parser, BENCH_FLAGS, argv)
    if positional:
        raise UsageError(f"unexpected {positional[0]!r}: bench-serve takes flags, or compare, or report")
    settings = read_settings(collect(given))
    report = measure(settings, argv)
    write(report, settings.format, settings.output)
    code = exit_code(report)
    return INTERRUPTED if report["incomplete"] else code


def _convert(argv: Sequence[str]) -> int:
    from headrace.bench.files import read_report

    parser = make_parser(
        "bench-serve report", "FILE [options]", "Writes a result in another format.", _REPORT_FLAGS
    )
    positional, given = read_arguments(parser, _REPORT_FLAGS, argv)
    if len(positional) != 1:
        raise UsageError("one FILE that bench-serve wrote as json or sqlite")
    values = collect(given)
    form, output = str(values.get("bench.format", "table")), values.get("bench.output")
    if form in ("sqlite", "html") and output is None:
        raise UsageError(f"--format {form} needs --output FILE")
    write(read_report(positional[0]), form, None if output is None else str(output))
    return 0


def measure(settings: BenchSettings, argv: Sequence[str]) -> Report:
    """Do what was asked. Raises BenchFault: the server is not there, or refuses everything."""
    import asyncio

    import headrace
    from headrace.bench.session import run_session
    from headrace.cli.bench_progress import make_progress

    command_line = ["headrace", "bench-serve", *without_secrets(argv)]
    progress = make_progress(sys.stderr, wanted=settings.progress)
    try:
        return asyncio.run(run_session(session_of(settings), command_line, headrace.__version__, progress))
    finally:
        progress.close()


def session_of(settings: BenchSettings) -> Session:
    """The session that settings stand for."""
    from headrace.bench.cells import Load
    from headrace.bench.session import Session
    from headrace.bench.stats import Objectives

    loads = [Load("concurrency", value) for value in settings.concurrency]
    loads += [Load("rate", value) for value in settings.request_rate]
    slo_ttft, slo_itl = settings.slo_ttft_ms, settings.slo_itl_ms
    return Session(
        url=settings.url,
        model=settings.model,
        api_key=settings.api_key,
        route=settings.endpoint,
        silence_timeout_s=settings.timeout,
        prompts=("workload",) if settings.workload else settings.prompts,
        workload=settings.workload,
        output_tokens=settings.max_tokens,
        shared_prefix_tokens=settings.shared_prefix_tokens,
        turns=settings.turns,
        ignore_eos=settings.ignore_eos,
        temperature=settings.temperature,
        caches=settings.cache,
        seed=settings.seed,
        loads=tuple(loads),
        num_requests=settings.num_requests,
        repetitions=settings.repetitions,
        warmup=settings.warmup,
        objectives=Objectives(
            None if slo_ttft is None else slo_ttft / 1000, None if slo_itl is None else slo_itl / 1000
        ),
        find_envelope=settings.envelope,
        capacity_max=settings.capacity_max,
        cost=settings.cost,
        scrape_metrics=settings.scrape_metrics,
    )


def without_secrets(argv: Sequence[str]) -> list[str]:
    """The command line with keys replaced."""
    shown: list[str] = []
    for word in argv:
        hidden = bool(shown) and shown[-1] == "--api-key"
        shown.append("***" if hidden else "--api-key=***" if word.startswith("--api-key=") else word)
    return shown


def write(report: Report, form: str, output: str | None) -> None:
    """Raises BenchFault: the file cannot be written."""
    from headrace.bench import files
    from headrace.bench.server import BenchFault

    try:
        if form == "sqlite":
            files.write_sqlite(report, str(output))
            return
        rendered = _rendered(report, form)
        if output is None:
            sys.stdout.write(rendered)
        else:
            files.write_text(output, rendered)
    except OSError as error:
        raise BenchFault(f"--output {output}: {error.strerror}") from None


def _rendered(report: Report, form: str) -> str:
    from headrace.bench import files

    if form == "json":
        return files.to_json(report)
    if form == "csv":
        return files.to_csv(report)
    if form == "html":
        from headrace.bench.html_report import to_html

        return to_html(report)
    from headrace.bench.table import to_table

    return to_table(report)


def exit_code(report: Report) -> int:
    """Says on standard error what is wrong with the figures."""
    from headrace.bench.report import failures, warnings

    for line in warnings(report):
        print(f"headrace bench-serve: {line}", file=sys.stderr)
    if any(cell["client"]["is_bottleneck"] for cell in report["cells"]):
        return 3
    return 1 if failures(report) else 0
