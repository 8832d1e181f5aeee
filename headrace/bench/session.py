"""One use of the tool: find out who answers, measure all cells or search the envelope, make the report."""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import resource
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from headrace.bench.campaign import Campaign, CellRuns
from headrace.bench.cells import Cell, Load, all_cells
from headrace.bench.compose import Composer, Shape
from headrace.bench.cost import cost_from
from headrace.bench.envelope import find_envelope, keeps_objectives
from headrace.bench.http_stream import Server
from headrace.bench.load import Interrupted, LoadOptions
from headrace.bench.observe import Sample
from headrace.bench.prometheus import Watcher
from headrace.bench.report import FORMAT, FORMAT_VERSION, Report, cell_report
from headrace.bench.server import Api, BenchFault, ServerInfo, TokenCounter, read_info
from headrace.bench.stats import Objectives, summarize_runs
from headrace.bench.workload_file import read_workload

_OTHER_FILES = 64


class Progress(Protocol):
    """What a session tells while it goes on."""

    def expect(self, requests: int) -> None: ...
    def title(self, title: str) -> None: ...
    def request(self, sample: Sample) -> None: ...
    def line(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What is to be measured. ``model`` None: the first one listed; ``seed`` None: drawn."""

    url: str
    model: str | None
    api_key: str | None
    route: str
    silence_timeout_s: float
    prompts: tuple[str, ...]
    workload: str | None
    output_tokens: tuple[int, ...]
    shared_prefix_tokens: int
    turns: int
    ignore_eos: bool
    temperature: float
    caches: tuple[str, ...]
    seed: int | None
    loads: tuple[Load, ...]
    num_requests: int | None
    repetitions: int
    warmup: int
    objectives: Objectives
    find_envelope: bool
    capacity_max: float
    cost: dict[str, float] | None
    scrape_metrics: bool


async def run_session(session: Session, command_line: Sequence[str], version: str, progress: Progress) -> Report:
    """Measure and report. Raises BenchFault: nothing can be measured.

    Cancelled, it reports what was measured by then, if anything was; the report's ``incomplete`` says so.
    """
    began = datetime.datetime.now(datetime.UTC)
    began_s = time.perf_counter()
    workload = read_workload(session.workload, session.turns) if session.workload else []
    api = Api(_server(session.url), {"Authorization": f"Bearer {session.api_key}"} if session.api_key else {})
    info, model = await _find_model(api, session.model)
    known = TokenCounter(api, model)
    counter = known if await _counts(known) else None
    watcher = Watcher(api, model) if session.scrape_metrics else None
    scraped = watcher is not None and await watcher.scrape() is not None
    seed = secrets.randbits(32) if session.seed is None else session.seed
    shape = Shape(model, session.route, session.temperature, session.ignore_eos)
    _allow_open_files(_most_open(session))
    campaign = Campaign(
        url=_base(session.url),
        options=LoadOptions(headers=api.headers, silence_timeout_s=session.silence_timeout_s),
        composer=Composer(shape, seed, counter, session.shared_prefix_tokens, session.turns, workload),
        watcher=watcher if scraped else None,
        counter=counter,
        num_requests=session.num_requests,
        max_model_len=info.max_model_lens.get(model),
        on_request=progress.request,
    )
    if session.scrape_metrics and not scraped:
        progress.line("the server has no /metrics for us: its own figures will be missing")
    envelopes: list[Report] = []
    measured: list[CellRuns] = []
    is_whole = await _measure(session, campaign, progress, envelopes, measured)
    cells = [cell_report(one, session.objectives) for one in measured]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "meta": {
            "model": model,
            "url": _base(session.url),
            "route": session.route,
            "began_at": began.isoformat(timespec="seconds"),
            "duration_s": time.perf_counter() - began_s,
            "seed": seed,
            "command_line": list(command_line),
            "prompt_lengths": "workload" if workload else "server's tokenizer" if counter else "estimated",
            "objectives": asdict(session.objectives),
            "server": _server_meta(info),
            "client": _client_meta(version),
        },
        "incomplete": not is_whole,
        "cells": cells,
        "envelopes": envelopes,
        "cost": _cost(session.cost, cells),
    }


def _base(url: str) -> str:
    """Without the ``/v1`` that clients' base URLs end with: routes here have it."""
    return url.rstrip("/").removesuffix("/v1")


def _server(url: str) -> Server:
    try:
        return Server.of(_base(url))
    except ValueError as error:
        raise BenchFault(f"--url: {error}") from None


def _most_open(session: Session) -> int:
    """Connections that may be open at once."""
    if session.find_envelope:
        return int(session.capacity_max)
    counts = [session.num_requests or load.default_requests() for load in session.loads]
    return max(
        int(load.value) if load.kind == "concurrency" else count
        for load, count in zip(session.loads, counts, strict=True)
    )


def _allow_open_files(connections: int) -> None:
    """Raise this process's limit where it is too low: failures to connect would look like the server's.

    Raises BenchFault: the system does not allow so many.
    """
    needed = connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):
        line = f"{connections} requests at once need {needed} open files; the limit here is {soft}"
        raise BenchFault(f"{line}: ask for fewer, or raise it (ulimit -n)") from None


async def _find_model(api: Api, wished: str | None) -> tuple[ServerInfo, str]:
    """A server need not list its models when the model is named."""
    try:
        info = await read_info(api)
    except BenchFault:
        if wished is None:
            raise
        info = ServerInfo((), {}, None, None)
    if wished is None and not info.models:
        raise BenchFault("the server lists no model: give --model")
    return info, wished or info.models[0]


async def _counts(counter: TokenCounter) -> bool:
    try:
        return await counter.available()
    except BenchFault:
        return False


async def _measure(
    session: Session, campaign: Campaign, progress: Progress, envelopes: list[Report], measured: list[CellRuns]
) -> bool:
    """Fill ``measured``. False: cancelled on the way; raises CancelledError where nothing was measured by then."""
    try:
        if session.find_envelope:
            await _envelopes(session, campaign, progress, envelopes, measured)
        else:
            await _cells(session, campaign, progress, measured)
    except (asyncio.CancelledError, Interrupted):
        if not any(one.runs for one in measured):
            raise asyncio.CancelledError from None
        progress.line("interrupted: what was measured is reported")
        _mark_incomplete(measured, session.repetitions)
        return False
    return True


def _mark_incomplete(measured: Sequence[CellRuns], repetitions: int) -> None:
    """Say in each cell what is missing of it."""
    for one in measured:
        cut = sum(run.result.interrupted for run in one.runs)
        whole = len(one.runs) - cut
        if not one.runs:
            one.skipped = one.skipped or "interrupted before it was measured"
        elif whole < repetitions:
            part = " and a part of the next, which has no rates" if cut else ""
            one.incomplete = f"interrupted after {whole} of {repetitions} repetitions{part}"


async def _cells(session: Session, campaign: Campaign, progress: Progress, measured: list[CellRuns]) -> None:
    cells = all_cells(session.prompts, session.output_tokens, session.loads, session.caches)
    progress.title("warming up")
    await campaign.warm_up(cells[0], session.warmup)
    per_round = sum(campaign.num_requests or cell.load.default_requests() for cell in cells)
    progress.expect(per_round * session.repetitions * session.turns)

    def on_run(one: CellRuns) -> None:
        progress.line(_line(one))

    progress.title("measuring")
    measured += map(CellRuns, cells)
    await campaign.run(measured, session.repetitions, on_run)


def _line(one: CellRuns) -> str:
    if one.skipped:
        return f"{one.cell}: not measured: {one.skipped}"
    summary = summarize_runs([one.runs[-1].result])
    rate = summary.output_tokens_per_s
    failed = f", failed: {summary.failed}" if summary.failed else ""
    return f"#{len(one.runs)} {one.cell}: " + ("-" if rate is None else f"{rate:.1f} tok/s") + failed


async def _envelopes(
    session: Session, campaign: Campaign, progress: Progress, found: list[Report], measured: list[CellRuns]
) -> None:
    """A search per kind of prompt, length and cache; every probe is a cell of the report."""
    axis = "rate" if session.loads[0].kind == "rate" else "concurrency"
    cells = all_cells(session.prompts, session.output_tokens, session.loads[:1], session.caches)
    await campaign.warm_up(cells[0], session.warmup)
    for cell in cells:

        async def keeps(value: float, cell: Cell = cell) -> bool:
            one = CellRuns(replace(cell, load=Load(cell.load.kind, value)))
            measured.append(one)
            await _probe(session, campaign, progress, one)
            return not one.skipped and keeps_objectives(
                summarize_runs([run.result for run in one.runs]), session.objectives
            )

        whole = axis == "concurrency"
        low = min(session.loads[0].value, session.capacity_max)
        result = await find_envelope(keeps, low, session.capacity_max, whole=whole)
        found.append(
            {
                "axis": axis,
                "prompts": cell.prompts,
                "output_tokens": cell.output_tokens,
                "cache": cell.cache,
                "highest_kept": result.highest_kept,
                "lowest_broken": result.lowest_broken,
                "probed": list(result.probed),
            }
        )


async def _probe(session: Session, campaign: Campaign, progress: Progress, one: CellRuns) -> None:
    load = one.cell.load
    progress.title(str(one.cell))
    for repetition in range(session.repetitions):
        progress.expect((campaign.num_requests or load.default_requests()) * session.turns)
        await campaign.repeat(one, repetition)
        progress.line(_line(one))
        if one.skipped:
            break


def _server_meta(info: ServerInfo) -> dict[str, Any]:
    """None where the server does not tell."""
    status = info.status or {}
    engine: Mapping[str, Any] = status["engine"] if isinstance(status.get("engine"), dict) else {}
    return {
        "version": info.version or status.get("version"),
        "device": engine.get("device"),
        "attention": engine.get("attention"),
        "max_model_len": engine.get("max_model_len"),
        "plan": engine.get("plan"),
    }


def _client_meta(version: str) -> dict[str, Any]:
    return {
        "headrace": version,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
    }


def _cost(values: dict[str, float] | None, cells: Sequence[Report]) -> Report | None:
    """At the highest output rate of all cells, unless a rate was given."""
    if values is None:
        return None
    rates = [rate for cell in cells if (rate := cell["figures"]["output_tokens_per_s"])]
    best = max(rates, default=None)
    cost = cost_from(values, best)
    return None if cost is None else {"tokens_per_s": values.get("tokens_per_s", best), **asdict(cost)}
