"""What a system prompt that everybody shares costs: KV memory and time to the first token.

    python benchmarks/shared_prefix.py            the demo model, 12 users, 1,500 tokens, 3 repetitions

Memory: 12 users generate at the same time, once each with a system prompt of its own (of the same length) and once
all with the same one; the KV blocks that requests hold are read while all of them stream. Time: one user alone,
with a system prompt that the server has not seen (cold), then other users with the same one (warm), one by one.
Prompts are random token ids behind a first token that no other prompt has, so nothing else is shared.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from answers import Answer, get_json, start
from server_process import Candidate, running, wait_until_listed

from headrace.bench.http_stream import Server

# Without a bound on stalls, so that all users begin soon after another and have about the same length.
COMMAND = (
    "{python} -m headrace.cli.main serve {model} --port {port} --served-model-name m --kv-memory-mb {pool}"
    " --max-decode-stall-ms 0"
)
PATH = "/v1/completions"
TURN_TOKENS = 12
MAX_KV_SHARE = 1 / 5
MIN_SPEEDUP = 10.0


@dataclass
class Findings:
    """KV blocks held by all users at once; TTFT in seconds per attempt."""

    unshared_blocks: list[int] = field(default_factory=list)
    shared_blocks: list[int] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)

    @property
    def kv_share(self) -> float:
        return statistics.median(self.shared_blocks) / statistics.median(self.unshared_blocks)

    @property
    def speedup(self) -> float:
        return statistics.median(self.cold_s) / statistics.median(self.warm_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder or .gguf file; without it, the demo model")
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--pool-mb", type=int, default=1536)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    command = COMMAND.replace("{model}", arguments.model).replace("{pool}", str(arguments.pool_mb))
    with (
        tempfile.TemporaryDirectory() as logs,
        running(Candidate("shared-prefix", command, arguments.model, "m", {}), Path(logs)) as process,
    ):
        findings = asyncio.run(measure(process, arguments))
    print(table(findings, arguments))
    if arguments.json:
        numbers = {**asdict(findings), "kv_share": findings.kv_share, "ttft_ratio": findings.speedup}
        arguments.json.write_text(json.dumps(numbers, indent=1))
    return 0 if findings.kv_share <= MAX_KV_SHARE and findings.speedup >= MIN_SPEEDUP else 1


async def measure(process: Any, arguments: argparse.Namespace) -> Findings:
    await wait_until_listed(process, 300)
    server = Server.of(process.url)
    while (await get_json(server, "/v1/status"))["status"] != "ready":
        await asyncio.sleep(0.25)
    dice, marks, found = random.Random(1), itertools.count(100), Findings()
    await ask_alone(server, [50, *range(1000, 1040)])  # the first request ever may pay for more than itself

    def prompts(systems: list[list[int]]) -> list[list[int]]:
        return [[*system, *tokens(dice, TURN_TOKENS)] for system in systems]

    def system() -> list[int]:
        return [next(marks), *tokens(dice, arguments.system_tokens - 1)]

    for repetition in range(arguments.repetitions):
        print(f"repetition {repetition + 1}", file=sys.stderr)
        users = arguments.users
        found.unshared_blocks.append(await held_blocks(server, prompts([system() for _ in range(users)])))
        found.shared_blocks.append(await held_blocks(server, prompts([system()] * users)))
        cold, *warm = prompts([system()] * 4)
        found.cold_s.append(await ask_alone(server, cold))
        for prompt in warm:
            found.warm_s.append(await ask_alone(server, prompt))
    return found


def tokens(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(1000, 20000) for _ in range(count)]


def body(prompt: list[int], max_tokens: int) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def ask_alone(server: Server, prompt: list[int]) -> float:
    """TTFT of one user with nobody else there."""
    async with asyncio.TaskGroup() as group:
        answer, _ = start(server, PATH, body(prompt, 2), group)
    return check(answer).ttft_s or 0.0


async def held_blocks(server: Server, prompts: list[list[int]]) -> int:
    """Blocks that requests hold while all of these stream."""
    async with asyncio.TaskGroup() as group:
        started = [start(server, PATH, body(prompt, 4000), group) for prompt in prompts]
        for answer, _ in started:
            await answer.tokens(2)
            check(answer)
        held = 0
        while all(answer.end_s is None for answer, _ in started) and not held:
            stats = (await get_json(server, "/v1/status"))["stats"]
            held = stats["blocks_held"] if stats["running"] == len(prompts) else 0
            await asyncio.sleep(0.05)
        for _, task in started:
            task.cancel()
    while (await get_json(server, "/v1/status"))["stats"]["blocks_held"]:
        await asyncio.sleep(0.05)
    if not held:
        raise SystemExit("not all users were streaming at the same time: --pool-mb is too small for them")
    return int(held)


def check(answer: Answer) -> Answer:
    if answer.status != 200 or answer.fault or not answer.times_s:
        raise SystemExit(f"a request failed: {answer.status} {answer.message} {answer.fault}")
    return answer


def table(found: Findings, arguments: argparse.Namespace) -> str:
    def spread(values: list[float]) -> str:
        return f"{1000 * min(values):,.0f} to {1000 * max(values):,.0f}"

    return "\n".join(
        [
            f"{arguments.users} users, {arguments.system_tokens} tokens of system prompt, medians of "
            f"{arguments.repetitions}",
            "",
            f"KV blocks held, own system prompts     {statistics.median(found.unshared_blocks):>10,.0f}",
            f"KV blocks held, one system prompt      {statistics.median(found.shared_blocks):>10,.0f}",
            f"ratio                                  {found.kv_share:>10.3f}   goal <= {MAX_KV_SHARE:.3f}",
            f"TTFT cold, ms                          {1000 * statistics.median(found.cold_s):>10,.0f}   "
            f"{spread(found.cold_s)}",
            f"TTFT warm, ms                          {1000 * statistics.median(found.warm_s):>10,.0f}   "
            f"{spread(found.warm_s)}",
            f"ratio                                  {found.speedup:>10.1f}   goal >= {MIN_SPEEDUP:.0f}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
