"""How long a long prompt stops running streams, with and without ``--max-decode-stall-ms``.

    python benchmarks/decode_stall.py                        the demo model, 4 streams, a prompt of 6,000 tokens
    python benchmarks/decode_stall.py --stall-ms 100 250 0   these bounds (0: none)

For every bound, a server of its own: streams start and run alone for a while (their gaps are the baseline), then
the long prompt comes, and the gaps until its first token are the stalls. A gap is the time between two tokens of
one stream at the client. The goal for a bound is: no gap longer than the bound and one decode step, which is
the baseline's median gap. On a machine that others use the baseline's largest gap says what noise alone does.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from answers import Answer, start
from server_process import Candidate, RunningServer, running, wait_until_listed

from headrace.bench.http_stream import Server

COMMAND = "{python} -m headrace.cli.main serve {model} --port {port} --served-model-name m"
BASELINE_TOKENS = 40
PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Result:
    """Gaps in ms, over all streams; ``long_*``: of the long prompt."""

    stall_ms: float
    baseline_p50: float
    baseline_p99: float
    baseline_max: float
    gaps: int
    p50: float
    p99: float
    largest: float
    long_tokens: int
    long_ttft_s: float

    @property
    def goal_ms(self) -> float | None:
        return self.stall_ms + self.baseline_p50 if self.stall_ms else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or .gguf file; without it, the demo model")
    parser.add_argument("--stall-ms", type=float, nargs="+", default=[100, 250, 0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--flags", nargs="*", default=[], help="further flags of serve")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as logs:
        for stall_ms in arguments.stall_ms:
            result = asyncio.run(measure(arguments, stall_ms, Path(logs)))
            results.append(result)
            print(f"{stall_ms:g} ms: done", file=sys.stderr)
    print(table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    return 0


async def measure(arguments: argparse.Namespace, stall_ms: float, logs: Path) -> Result:
    flags = " ".join(["--max-decode-stall-ms", f"{stall_ms:g}", *arguments.flags])
    command = f"{COMMAND} {flags}".replace("{model}", arguments.model or "")
    candidate = Candidate(f"stall-{stall_ms:g}", command, arguments.model or "", "m", {})
    with running(candidate, logs) as process:
        await wait_until_listed(process, 300)
        server = Server.of(process.url)
        await until_ready(process, server)
        return await run(server, arguments.streams, arguments.prompt_tokens, stall_ms)


async def until_ready(process: RunningServer, server: Server) -> None:
    """Until a request is answered."""
    while process.process.poll() is None:
        async with asyncio.TaskGroup() as group:
            answer, _ = start(server, PATH, completion("Hello", 2), group)
        if answer.status == 200 and not answer.fault:
            return
        await asyncio.sleep(0.25)
    raise SystemExit(f"the server ended with code {process.process.returncode}")


def completion(prompt: object, max_tokens: int) -> dict[str, Any]:
    """A greedy request that runs to ``max_tokens``."""
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }


async def run(server: Server, streams: int, prompt_tokens: int, stall_ms: float) -> Result:
    dice = random.Random(int(stall_ms))
    long_prompt = [dice.randrange(1000, 20000) for _ in range(prompt_tokens)]
    async with asyncio.TaskGroup() as group:
        started = [
            start(server, PATH, completion(f"Story number {i}: Once upon a time", 2000), group)
            for i in range(streams)
        ]
        answers = [answer for answer, _ in started]
        for answer in answers:
            await answer.tokens(BASELINE_TOKENS)
        long, _ = start(server, PATH, completion(long_prompt, 2), group)
        await long.tokens(1)
        for answer in answers:
            await answer.tokens(len(answer.times_s) + 2)
        for _, task in started:
            task.cancel()
    if not long.times_s or any(answer.fault for answer in answers):
        raise SystemExit(f"a request failed: {long.status} {long.message} {long.fault}")
    return judge(answers, long, stall_ms)


def judge(answers: list[Answer], long: Answer, stall_ms: float) -> Result:
    before, during = [], []
    for answer in answers:
        for left, right in itertools.pairwise(answer.times_s[5:]):
            if right <= long.sent_s:
                before.append(1000 * (right - left))
            elif left <= long.times_s[0]:
                during.append(1000 * (right - left))
    return Result(
        stall_ms,
        statistics.median(before),
        percentile(before, 99),
        max(before),
        len(during),
        statistics.median(during),
        percentile(during, 99),
        max(during),
        long.usage.get("prompt_tokens", 0),
        long.ttft_s or 0.0,
    )


def percentile(values: list[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def table(results: list[Result]) -> str:
    lines = [
        "gaps of running streams, ms; baseline: before the long prompt",
        "",
        f"{'bound':>8}{'base p50':>10}{'base p99':>10}{'base max':>10}{'gaps':>8}{'p50':>8}{'p99':>8}{'max':>8}"
        f"{'goal':>8}{'long TTFT s':>13}",
    ]
    for r in results:
        bound = f"{r.stall_ms:g}" if r.stall_ms else "none"
        goal = f"{r.goal_ms:.0f}" if r.goal_ms else "-"
        lines.append(
            f"{bound:>8}{r.baseline_p50:>10.0f}{r.baseline_p99:>10.0f}{r.baseline_max:>10.0f}{r.gaps:>8}"
            f"{r.p50:>8.0f}{r.p99:>8.0f}{r.largest:>8.0f}{goal:>8}{r.long_ttft_s:>13.1f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
