"""The whole server over HTTP on a GPU: rates, latencies, and how much of the time the engine computes.

    python benchmarks/gpu_serving.py --shape llama-1b --budget 420 --json serving.json

The checkpoint (random weights, random_checkpoint.py) is written first. Three servers follow, one after the other:

1. Headrace: 4 clients of 512-token prompts with 128 output tokens, one such client alone, and 32, 1, 8 and 128
   closed-loop streams (``--streams`` is the order).
2. Headrace with ``--max-num-seqs 1``: one request at a time, the same 4 clients. The ratio of the two mean TTFTs
   is what batching is worth to somebody who waits. When the time does not allow for this server, the client alone
   gives an estimate: who is one of 4 waits for 3 others from end to end.
3. With ``--peer``, mlx_lm.server on the same checkpoint at the same numbers of streams.

Before each cell a round of short requests goes out at its number of streams and length of prompts and is not
counted: what is compiled or planned at first use has been by then. A line tells every few seconds what a server
that starts is doing; nothing is begun after the budget and nothing goes on 20 seconds beyond it; the JSON is
written after every cell.

**Engine time share**: what ``headrace:step_seconds`` grew by during a cell, over the cell's wall time. A step
counts from its start, or from the end of the one before when that came later, until the host has read its tokens,
so nothing is counted twice; the rest of the wall time had no step on the device. That is an upper bound: a
step whose tokens wait for the host still counts. Two other figures stand beside it: ``alone``, steps times the
time of such a step in the benchmark that does nothing else (``--decode decode.json``, written by gpu_decode.py),
over the wall time; and ``GPU busy``, the share of time in which a kernel ran, by nvidia-smi's own samples.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from random_checkpoint import TEMPLATE_TOKENS
from server_process import Candidate, RunningServer, ServerDied, running, wait_until_listed
from shapes import SHAPES

from headrace.bench.http_stream import Server, send
from headrace.bench.load import LoadOptions, LoadRequest, run_closed_loop
from headrace.bench.prometheus import Scrape, parse
from headrace.bench.stats import Summary, summarize
from headrace.bench.workload import make_prompt

CLIENT_PROMPT, CLIENT_OUTPUT = 512, 128  # tokens of the clients whose waiting is measured
HEADRACE = "{python} -m headrace.cli.main serve {model} --port {port} --served-model-name m --max-queue 1024"
PEER = "{python} -m mlx_lm.server --model {model} --port {port}"


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of requests that are equal in length."""

    streams: int
    requests: int
    prompt_tokens: int
    output_tokens: int

    def short(self) -> Load:
        """One request per stream, a few tokens each."""
        return replace(self, requests=self.streams, output_tokens=min(8, self.output_tokens))

    def work(self, model: str, seed: int) -> list[LoadRequest]:
        """Greedy chats, each prompt different from its first words on."""
        room = self.prompt_tokens - TEMPLATE_TOKENS
        prompts = [make_prompt(max(14, room // 3), seed, index)[:room] for index in range(self.requests)]
        fields = {"model": model, "max_tokens": self.output_tokens, "temperature": 0, "ignore_eos": True}
        return [
            LoadRequest("/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": prompt}]})
            for prompt in prompts
        ]


@dataclass(frozen=True, slots=True)
class Measured:
    """One cell. ``steps``, ``step_s``: what the server counted; None for a peer. ``gpu_busy``: 0 to 1."""

    server: str
    load: Load
    summary: Summary
    steps: float | None = None
    step_s: float | None = None
    gpu_busy: float | None = None
    failures: tuple[str, ...] = ()

    @property
    def engine_share(self) -> float | None:
        return None if self.step_s is None else self.step_s / self.summary.duration_s


class Bench:
    """Measures servers one after the other until the time is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.deadline_s = time.monotonic() + args.budget
        self.end_s = self.deadline_s + 20  # of what has begun
        self.folder = Path(args.folder or f"/tmp/headrace-{args.shape}")
        self.logs = Path(args.logs)
        self.logs.mkdir(parents=True, exist_ok=True)
        self.cells: list[Measured] = []
        self.notes: list[str] = []

    def run(self) -> None:
        self.checkpoint()
        counts = [int(word) for word in self.args.streams.split(",")]
        words = self.args.prompt_tokens, self.args.output_tokens
        loads = [Load(count, max(2, count * self.args.rounds), *words) for count in counts]
        clients = Load(4, self.args.clients_requests, CLIENT_PROMPT, CLIENT_OUTPUT)
        alone = Load(1, max(2, self.args.clients_requests // 4), CLIENT_PROMPT, CLIENT_OUTPUT)
        self.server("headrace", HEADRACE, [clients, alone, *loads])
        self.server("headrace, one at a time", f"{HEADRACE} --max-num-seqs 1", [clients])
        if self.args.peer:
            self.server("mlx_lm.server", PEER, [clients, *loads], request_model=str(self.folder))

    def checkpoint(self) -> None:
        """Written by a process of its own, so that this one holds no device memory."""
        if not (self.folder / "model.safetensors").exists():
            script = Path(__file__).parent / "random_checkpoint.py"
            subprocess.run([sys.executable, str(script), self.args.shape, str(self.folder)], check=True)
            self.note("checkpoint written")

    def server(self, name: str, command: str, loads: Sequence[Load], request_model: str = "m") -> None:
        if time.monotonic() > self.deadline_s:
            self.notes.append(f"{name}: out of time")
            return
        candidate = Candidate(re.sub(r"\W+", "_", name), command, str(self.folder), request_model, {})
        try:
            with running(candidate, self.logs) as server:
                asyncio.run(self._measure_all(candidate, name, server, loads))
        except ServerDied as died:
            self.notes.append(f"{name}: {died}")
            self.note(f"{name}: {died}\n{log_tail(self.log(candidate), 25)}")
        except TimeoutError:
            self.notes.append(f"{name}: stopped in the middle of a cell, out of time")
            self.note(f"{name}: out of time\n{log_tail(self.log(candidate), 5)}")
        self.write()

    def log(self, candidate: Candidate) -> Path:
        return self.logs / f"{candidate.name}.log"

    async def _measure_all(
        self, candidate: Candidate, name: str, server: RunningServer, loads: Sequence[Load]
    ) -> None:
        model = candidate.request_model or "m"
        async with asyncio.timeout(self.end_s - time.monotonic()):
            began_s = time.monotonic()
            left_s = min(self.args.startup_timeout, self.deadline_s - began_s)
            telling = asyncio.create_task(self._tell(name, self.log(candidate)))
            try:
                await wait_until_listed(server, left_s)
                await warm_up(server, model, loads[0], left_s)
            finally:
                telling.cancel()
            self.note(f"{name}: ready after {time.monotonic() - began_s:.0f} s")
            for number, load in enumerate(loads):
                if time.monotonic() > self.deadline_s:
                    self.notes.append(f"{name}: out of time before {load.streams} streams")
                    return
                seed = self.args.seed + 1000 * number
                await run_closed_loop(server.url, load.short().work(model, seed + 500), load.streams)
                cell = await measure(name, server, load, model, seed)
                self.cells.append(cell)
                self.note(progress(cell))
                self.write()

    async def _tell(self, name: str, log: Path) -> None:
        """What a starting server says, every few seconds."""
        while True:
            await asyncio.sleep(10)
            self.note(f"{name} is starting: {log_tail(log, 1).strip()[:160]}")

    def note(self, line: str) -> None:
        print(f"[{self.args.budget - (self.deadline_s - time.monotonic()):5.0f} s] {line}", flush=True)

    def write(self) -> None:
        if self.args.json:
            report = {
                "command_line": sys.argv,
                "cells": [{**asdict(c), "engine_share": c.engine_share} for c in self.cells],
                "verdicts": verdicts(self.cells),
                "notes": self.notes,
            }
            Path(self.args.json).write_text(json.dumps(report, indent=1))


async def warm_up(server: RunningServer, model: str, load: Load, timeout_s: float) -> None:
    """One short request, tried again until the model is loaded. Raises ServerDied."""
    deadline_s = time.monotonic() + timeout_s
    short = Load(1, 1, load.prompt_tokens, 4)
    while True:
        result = await run_closed_loop(
            server.url, short.work(model, -1), 1, LoadOptions(silence_timeout_s=timeout_s)
        )
        failures = [sample.detail for sample in result.samples if sample.failure]
        if not failures:
            return
        if server.process.poll() is not None or time.monotonic() > deadline_s:
            raise ServerDied(f"warm-up failed: {failures[0]}")
        await asyncio.sleep(0.5)


async def measure(name: str, server: RunningServer, load: Load, model: str, seed: int) -> Measured:
    before = await scrape(server)
    with gpu_samples() as busy:
        result = await run_closed_loop(server.url, load.work(model, seed), load.streams)
    after = await scrape(server)
    failures = tuple(f"{sample.failure}: {sample.detail}" for sample in result.samples if sample.failure)
    return Measured(
        name,
        load,
        summarize(result),
        grown(before, after, "headrace:step_seconds_count"),
        grown(before, after, "headrace:step_seconds_sum"),
        busy.mean(),
        failures,
    )


async def scrape(server: RunningServer) -> Scrape:
    """The server's metrics; empty when it has none."""
    async with send(Server.of(server.url), "GET", "/metrics", {}) as answer:
        text = (await answer.read()).decode("utf-8", "replace")
    return Scrape(parse(text) if answer.status == 200 else {}, "m")


def grown(before: Scrape, after: Scrape, name: str) -> float | None:
    new = after(name)
    return None if new is None else new - (before(name) or 0.0)


@dataclass
class GpuSamples:
    """Shares of time in which a kernel ran, one per sample of nvidia-smi."""

    process: subprocess.Popen[str] | None = None
    found: list[float] = field(default_factory=list)

    def mean(self) -> float | None:
        return statistics.fmean(self.found) / 100 if self.found else None


@contextmanager
def gpu_samples() -> Iterator[GpuSamples]:
    """Samples while the block runs; none where there is no nvidia-smi."""
    samples = GpuSamples()
    if shutil.which("nvidia-smi"):
        words = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
        samples.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield samples
    finally:
        if samples.process is not None:
            samples.process.terminate()
            output, _ = samples.process.communicate(timeout=10)
            # the first sample is of the time before the load, the last one may be of the time behind it
            samples.found = [float(line) for line in output.split() if line.isdigit()][1:-1]


def log_tail(path: Path, count: int) -> str:
    """The last lines of a server's log, without those of requests; "" while there is none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join([line for line in lines if " INFO api: " not in line][-count:])


# -- reporting -----------------------------------------------------------------------------------------


def progress(cell: Measured) -> str:
    s = cell.summary
    failed = f", FAILED {len(cell.failures)}: {cell.failures[0]}" if cell.failures else ""
    return (
        f"{cell.server} at {cell.load.streams}: {s.output_tokens_per_s or 0:.0f} tok/s, "
        f"TTFT {_ms(s.ttft_s.mean)} ms, ITL {_ms(s.itl_s.p50)} ms, engine {_percent(cell.engine_share)}{failed}"
    )


def alone_ms(decode: Sequence[dict[str, Any]], shape: str, load: Load) -> float | None:
    """Milliseconds of a decode step of so many rows in gpu_decode.py, at the context nearest to this load's."""
    middle = load.prompt_tokens + load.output_tokens / 2
    fitting = [
        cell
        for cell in decode
        if cell["shape"] == shape and cell["bits"] == 16 and cell["rows"] == load.streams and "headrace_ms" in cell
    ]
    nearest = min(fitting, key=lambda cell: abs(cell["context"] - middle), default=None)
    return None if nearest is None else float(nearest["headrace_ms"])


def table(cells: Sequence[Measured], decode: Sequence[dict[str, Any]], shape: str) -> str:
    lines = [
        "| server | streams | prompt, output | tok/s | TTFT mean, p50 ms | ITL p50, p99 ms | step ms "
        "| engine time | alone | GPU busy | client, of a core | failed |",
        "|---" * 12 + "|",
    ]
    for cell in cells:
        s, load = cell.summary, cell.load
        step = None if not cell.steps or cell.step_s is None else cell.step_s / cell.steps
        alone = alone_ms(decode, shape, load)
        share = None if alone is None or not cell.steps else cell.steps * alone / 1e3 / s.duration_s
        words = (
            cell.server, f"{load.streams}", f"{load.prompt_tokens}, {load.output_tokens}",
            f"{s.output_tokens_per_s or 0:.0f}", f"{_ms(s.ttft_s.mean)}, {_ms(s.ttft_s.p50)}",
            f"{_ms(s.itl_s.p50)}, {_ms(s.itl_s.p99)}", _ms(step), _percent(cell.engine_share), _percent(share),
            _percent(cell.gpu_busy), _percent(s.client_cpu_share), f"{len(cell.failures)}/{load.requests}",
        )  # fmt: skip
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def verdicts(cells: Sequence[Measured]) -> list[str]:
    """The two goals, met or not."""
    lines = []
    for cell in cells:
        if cell.server == "headrace" and cell.load.streams == 32 and cell.engine_share is not None:
            lines.append(f"engine time share at 32 streams: {cell.engine_share:.1%} (goal: 85 % or more)")
    clients = {
        (c.server, c.load.streams): c.summary
        for c in cells
        if (c.load.prompt_tokens, c.load.output_tokens) == (CLIENT_PROMPT, CLIENT_OUTPUT)
    }
    batched, serial = clients.get(("headrace", 4)), clients.get(("headrace, one at a time", 4))
    single = clients.get(("headrace", 1))
    together = batched.ttft_s.mean if batched else None
    waits = {"one at a time": serial.ttft_s.mean if serial else None}
    if single and single.ttft_s.mean and single.e2e_s.mean:
        waits["one at a time, estimated from one alone"] = 3 * single.e2e_s.mean + single.ttft_s.mean
    for name, wait in waits.items():
        if together and wait:
            lines.append(
                f"mean TTFT of 4 clients: {together * 1e3:.0f} ms, {name} {wait * 1e3:.0f} ms: "
                f"{wait / together:.1f} times lower (goal: 15 or more)"
            )
    return lines


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", default="llama-1b", help=",".join(SHAPES))
    add("--streams", default="32,1,8,128", help="in this order")
    add("--rounds", type=int, default=3, help="requests per stream")
    add("--prompt-tokens", type=int, default=256)
    add("--output-tokens", type=int, default=256)
    add("--clients-requests", type=int, default=16, help="requests of the 4 clients")
    add("--peer", action="store_true", help="mlx_lm.server too")
    add("--decode", metavar="FILE", help="JSON of gpu_decode.py, for the column alone")
    add("--budget", type=float, default=420, metavar="SECONDS", help="begin no cell after that")
    add("--startup-timeout", type=float, default=240, metavar="SECONDS")
    add("--folder", help="of the checkpoint; written unless it is there (default: /tmp/headrace-SHAPE)")
    add("--logs", default="/tmp/headrace-serving-logs", metavar="FOLDER")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE")
    args = parser.parse_args()
    decode = json.loads(Path(args.decode).read_text()) if args.decode else []  # a missing file is said at once
    bench = Bench(args)
    bench.run()
    print(table(bench.cells, decode, args.shape))
    print("\n".join([*verdicts(bench.cells), *bench.notes]))
    bench.write()
    return 1 if bench.notes or any(cell.failures for cell in bench.cells) else 0


if __name__ == "__main__":
    sys.exit(main())
