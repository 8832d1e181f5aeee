"""Headrace and other servers side by side, in one run: output rate and TTFT at several numbers of streams.

The same weights and the same prompts for everybody. Repetitions are interleaved, with the order reversed every
other time (A B C, C B A, …), because a machine's speed drifts; each turn starts its server afresh, warms it up,
measures every number of streams and stops it, so an idle server never takes part of another one's cores. The
table gives medians over the repetitions. A failed request counts as zero tokens and is listed.

    python benchmarks/serving_cpu.py --model FOLDER --peer 'NAME=COMMAND --port {port} {model}' --json out.json
    … --cell 1:2:1800 --cell 4:8:1800 --cell 1:1:7000     streams, requests, words of a prompt: 2k and 8k tokens

benchmarks/README.md says how to install the peers and what the figures mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from server_process import Candidate, RunningServer, ServerDied, cpu_times, running, wait_until_listed

from headrace.bench.load import LoadOptions, LoadResult, run_closed_loop
from headrace.bench.stats import Summary, summarize
from headrace.bench.workload import chat_requests

HEADRACE = "{python} -m headrace.cli.main serve {model} --port {port} --served-model-name m"


@dataclass(frozen=True, slots=True)
class Cell:
    """So many concurrent streams, requests in all, and words in each prompt."""

    streams: int
    requests: int
    words: int

    def __str__(self) -> str:
        return f"{self.streams} streams, {self.words} words"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    cells: tuple[Cell, ...]
    repetitions: int
    output_tokens: int
    seed: int
    startup_timeout_s: float
    silence_timeout_s: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One cell of one repetition; ``fault``, and no cell, when the server did not come up."""

    name: str
    repetition: int
    cell: Cell | None
    summary: Summary | None
    result: LoadResult | None
    server_cores: float | None
    other_cores: float | None
    fault: str = ""


def main() -> int:
    arguments = _parser().parse_args()
    candidates = make_candidates(arguments)
    plan = make_plan(arguments)
    logs = Path(arguments.logs)
    logs.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    for repetition in range(plan.repetitions):
        for candidate in candidates if repetition % 2 == 0 else reversed(candidates):
            for measurement in asyncio.run(measure_turn(candidate, plan, repetition, logs)):
                measurements.append(measurement)
                print(_progress(measurement), file=sys.stderr, flush=True)
        if arguments.json:  # after each round, so that a long run that is cut short leaves what it measured
            Path(arguments.json).write_text(json.dumps(report(candidates, plan, measurements), indent=1))
    print(table(candidates, plan, measurements))
    return 1 if any(m.fault or (m.summary and m.summary.failed) for m in measurements) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Headrace and other servers side by side on this machine.")
    add = parser.add_argument
    add("--model", action="append", required=True, metavar="[NAME=]FOLDER", help="for all, or for one server")
    add("--peer", action="append", default=[], metavar="NAME=COMMAND", help="{port}, {model} are filled in")
    add("--request-model", action="append", default=[], metavar="NAME=ID", help="model name in requests")
    add("--headrace", default=HEADRACE, metavar="COMMAND", help="Headrace's command; empty: leave it out")
    add("--streams", default="1,8,32", help="numbers of concurrent streams")
    add("--requests", default="4,16,32", help="requests for each of them, in all")
    add("--repetitions", type=int, default=3)
    add("--prompt-words", type=int, default=40, help="1800 are about 2k tokens, 7000 about 8k")
    add("--cell", action="append", metavar="STREAMS:REQUESTS:WORDS", help="instead of --streams, --requests")
    add("--output-tokens", type=int, default=32)
    add("--seed", type=int, default=int(time.time()), help="of the prompts; a new one each run by default")
    add("--blas", metavar="FILE", help="LD_PRELOADed into every peer: the same BLAS for all")
    add("--startup-timeout", type=float, default=300)
    add("--silence-timeout", type=float, default=600, help="seconds without a byte before a request failed")
    add("--json", metavar="FILE", help="write all samples and figures")
    add("--logs", default="benchmark-logs", metavar="FOLDER", help="output of the servers")
    return parser


def make_candidates(arguments: argparse.Namespace) -> list[Candidate]:
    commands = dict(_pair("--peer", word) for word in arguments.peer)
    if arguments.headrace:
        commands = {"headrace": arguments.headrace, **commands}
    named = [word for word in arguments.model if word.partition("=")[0] in commands]
    shared = [word for word in arguments.model if word not in named]
    models = dict(_pair("--model", word) for word in named)
    request_models = dict(_pair("--request-model", word) for word in arguments.request_model)
    for name in commands:
        if name not in models and not shared:
            sys.exit(f"no model for {name}: give --model FOLDER or --model {name}=FOLDER")
    preload = {"LD_PRELOAD": arguments.blas} if arguments.blas else {}
    return [
        Candidate(
            name,
            command,
            os.path.abspath(models.get(name, shared[-1] if shared else "")),
            request_models.get(name, "m" if name == "headrace" else None),
            {} if name == "headrace" else preload,
        )
        for name, command in commands.items()
    ]


def _pair(flag: str, word: str) -> tuple[str, str]:
    name, separator, value = word.partition("=")
    if not (name and separator and value):
        sys.exit(f"{flag} must be NAME=VALUE; got {word!r}")
    return name, value


def make_plan(arguments: argparse.Namespace) -> Plan:
    streams = [int(word) for word in arguments.streams.split(",")]
    requests = [int(word) for word in arguments.requests.split(",")]
    if len(streams) != len(requests):
        sys.exit("--streams and --requests must have the same length")
    words = arguments.prompt_words
    cells = [Cell(*pair, words) for pair in zip(streams, requests, strict=True)]
    if arguments.cell:
        cells = [Cell(*map(int, word.split(":"))) for word in arguments.cell]
    return Plan(
        tuple(cells),
        arguments.repetitions,
        arguments.output_tokens,
        arguments.seed,
        arguments.startup_timeout,
        arguments.silence_timeout,
    )


# -- measuring -------------------------------------------------------------------------------------------


async def measure_turn(candidate: Candidate, plan: Plan, repetition: int, logs: Path) -> list[Measurement]:
    """Every cell on a fresh server of ``candidate``; one faulty measurement when it does not come up."""
    with running(candidate, logs) as server:
        try:
            listing = await wait_until_listed(server, plan.startup_timeout_s)
            model = candidate.request_model or _first_model(listing) or candidate.model
            await warm_up(server, plan, model)
        except ServerDied as died:
            fault = f"{died}; see {logs / candidate.name}.log"
            return [Measurement(candidate.name, repetition, None, None, None, None, None, fault)]
        return [await measure_cell(candidate, server, plan, repetition, model, cell) for cell in plan.cells]


def _first_model(listing: bytes) -> str | None:
    try:
        entries = json.loads(listing).get("data") or []
    except ValueError:
        return None
    return str(entries[0]["id"]) if entries else None


async def warm_up(server: RunningServer, plan: Plan, model: str) -> None:
    """Two short requests, tried again until the model has been loaded. Raises ServerDied."""
    deadline_s = time.monotonic() + plan.startup_timeout_s
    while True:
        words = min(cell.words for cell in plan.cells)
        requests = chat_requests(model, 2, words=words, output_tokens=4, seed=-1)
        result = await run_closed_loop(
            server.url, requests, 1, LoadOptions(silence_timeout_s=plan.startup_timeout_s)
        )
        failures = [sample.detail for sample in result.samples if sample.failure]
        if not failures:
            return
        if server.process.poll() is not None or time.monotonic() > deadline_s:
            raise ServerDied(f"warm-up failed: {failures[0]}")
        await asyncio.sleep(1)


async def measure_cell(
    candidate: Candidate, server: RunningServer, plan: Plan, repetition: int, model: str, cell: Cell
) -> Measurement:
    # prompts depend on the repetition and the cell, not on the candidate: everybody gets the same ones
    prompts = chat_requests(
        model,
        cell.requests,
        words=cell.words,
        output_tokens=plan.output_tokens,
        seed=plan.seed + 1000 * repetition + cell.streams,
    )
    before = cpu_times(server.process.pid)
    options = LoadOptions(silence_timeout_s=plan.silence_timeout_s)
    result = await run_closed_loop(server.url, prompts, cell.streams, options)
    after = cpu_times(server.process.pid)
    server_cores = other_cores = None
    if before and after:
        server_cores = (after.server_s - before.server_s) / result.duration_s
        all_cores = (after.machine_s - before.machine_s) / result.duration_s
        other_cores = max(0.0, all_cores - server_cores - result.client_cpu_s / result.duration_s)
    return Measurement(candidate.name, repetition, cell, summarize(result), result, server_cores, other_cores)


# -- reporting -------------------------------------------------------------------------------------------


def _progress(m: Measurement) -> str:
    if m.summary is None:
        return f"#{m.repetition} {m.name}: {m.fault}"
    failed = f", failed: {m.summary.failed}" if m.summary.failed else ""
    cores = (
        f", cores: server {m.server_cores:.1f}, others {m.other_cores:.1f}" if m.server_cores is not None else ""
    )
    return f"#{m.repetition} {m.name}, {m.cell}: {m.summary.output_tokens_per_s or 0:.1f} tok/s{cores}{failed}"


def _median(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


COLUMNS = (
    ("streams", 8),
    ("words", 7),
    ("tok/s", 9),
    ("range", 16),
    ("ratio", 8),
    ("TTFT p50", 10),
    ("tok/CPU-s", 11),
    ("failed", 9),
)


def table(candidates: Sequence[Candidate], plan: Plan, measurements: Sequence[Measurement]) -> str:
    """Medians over the repetitions; the ratio is the first candidate's rate over a row's."""
    lines = [f"{'server':<14}" + "".join(f"{title:>{width}}" for title, width in COLUMNS)]
    for cell in plan.cells:
        first: float | None = None
        for candidate in candidates:
            found = [m for m in measurements if m.name == candidate.name and m.cell == cell]
            summaries = [m.summary for m in found if m.summary]
            rates = [s.output_tokens_per_s or 0.0 for s in summaries]
            rate = _median(rates)
            first = rate if candidate is candidates[0] else first
            failed = sum(sum(s.failed.values()) for s in summaries)
            values = (
                str(cell.streams),
                str(cell.words),
                _figure(rate, ".1f"),
                f"{min(rates):.1f}–{max(rates):.1f}" if rates else "–",
                _figure(first / rate if first and rate else None, ".2f"),
                _figure(_median([s.ttft_s.p50 for s in summaries]), ".2f", " s"),
                _figure(_median([_tokens_per_cpu_s(m) for m in found]), ".1f"),
                f"{failed}/{cell.requests * len(summaries)}",
            )
            widths = (width for _, width in COLUMNS)
            row = "".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
            lines.append(f"{candidate.name:<14}{row}")
    lines.append("ratio: the first server's rate over this one's. A failed request counts as zero tokens.")
    return "\n".join([*lines, *_failures(measurements)])


def _tokens_per_cpu_s(m: Measurement) -> float | None:
    """Output tokens per second of CPU time of the server's processes (waiting in a spin loop counts as well)."""
    if m.summary is None or not m.server_cores:
        return None
    return m.summary.output_tokens / (m.server_cores * m.summary.duration_s)


def _figure(value: float | None, spec: str, unit: str = "") -> str:
    return "–" if value is None else format(value, spec) + unit


def _failures(measurements: Sequence[Measurement]) -> list[str]:
    lines = []
    for m in measurements:
        if m.fault:
            lines.append(f"#{m.repetition} {m.name}: {m.fault}")
        for sample in m.result.samples if m.result else ():
            if sample.failure:
                lines.append(f"#{m.repetition} {m.name}, {m.cell}: {sample.failure}: {sample.detail}")
    return lines


def report(candidates: Sequence[Candidate], plan: Plan, measurements: Sequence[Measurement]) -> dict[str, object]:
    """Everything measured, with what is needed to judge it."""
    return {
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "python": platform.python_version(),
        },
        "command_line": sys.argv,
        "plan": asdict(plan),
        "servers": [asdict(candidate) for candidate in candidates],
        "measurements": [asdict(measurement) for measurement in measurements],
    }


if __name__ == "__main__":
    sys.exit(main())
