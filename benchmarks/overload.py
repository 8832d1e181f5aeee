"""Four times the load that fits, for minutes: memory as planned, refusals that say when, answers exact.

    python benchmarks/overload.py                  10 minutes
    python benchmarks/overload.py --minutes 3

The model is the scripted checkpoint of the tests, whose right answer is known for every prompt: wrong, stale or
foreign KV is a wrong word. Clients send prompts and outputs of very different lengths, as many at once as need
``--load`` times the pool. Three in ten ask little and get a long answer: admission counts prompts, so they are let
in and outgrow the pool together, and some must be preempted. Some hang up in the middle; some ask for more than
can ever fit and must be told so at once. A refused client comes back after a while. Every second the worker's
memory is read: what MLX has allocated and keeps for reuse, MLX's own peak, and the physical memory of the process.

Must hold, else the exit code is 1:
- MLX's memory <= the memory plan, and resident memory <= the plan and what the process had before, both within 2 %
- every refusal is a 429 with Retry-After, or a 400 for what never fits; never anything else
- every accepted answer is right to the byte, also of those that were preempted; some were
- afterwards no block is held, free + cached = total, and a last request is answered rightly
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from answers import Answer, get_json, start
from server_process import Candidate, RunningServer, running, wait_until_listed

from headrace.bench.http_stream import Server

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support import scripted

COMMAND = (
    "{python} -m headrace.cli.main serve {model} --port {port} --served-model-name m"
    " --kv-memory-mb {pool} --max-queue {queue}"
)
PATH = "/v1/chat/completions"
TOLERANCE = 1.02
LONGEST_PROMPT, SHORTEST_PROMPT = 4000, 20
MAX_TOKENS = (1, 8, 40, 200)
# Short prompts with long answers: what admission does not see coming.
LONG_ANSWERS, LONG_ANSWER_PROMPT, LONG_ANSWER_TOKENS = 0.3, 60, (300, 600, 1200)
SCRIPTS = ("s00", "s01", "s02", "s05", "s07")
HANG_UP, TOO_LONG = 0.05, 0.02


@dataclass
class Findings:
    """Counts and highest values of one run; bytes."""

    seconds: float = 0.0
    clients: int = 0
    pool_tokens: int = 0
    max_tokens: int = 0
    offered_tokens: float = 0.0
    plan_bytes: int = 0
    base_bytes: int = 0
    max_mlx_bytes: int = 0
    max_resident_bytes: int = 0
    samples: int = 0
    exact: int = 0
    hung_up: int = 0
    refused: int = 0
    retry_after_s: list[float] = field(default_factory=list)
    told_too_long: int = 0
    preemptions: int = 0
    worker_restarts: int = 0
    most_running: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def fault(self, text: str) -> None:
        self.faults[text[:200]] = self.faults.get(text[:200], 0) + 1


@dataclass(frozen=True)
class Question:
    content: str
    script: str
    max_tokens: int
    hangs_up: bool

    @property
    def tokens(self) -> int:
        return scripted.expected_prompt_tokens(self.content) + self.max_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--pool-mb", type=int, default=64)
    parser.add_argument("--load", type=float, default=4.0, help="times the pool")
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = scripted.build(Path(folder) / "scripted")
        command = COMMAND.replace("{pool}", str(arguments.pool_mb)).replace("{queue}", str(arguments.queue))
        candidate = Candidate("overload", command, str(model), "m", {})
        with running(candidate, Path(folder)) as process:
            findings = asyncio.run(measure(process, arguments))
    print(table(findings))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(findings), indent=1))
    return 1 if findings.faults else 0


async def measure(process: RunningServer, arguments: argparse.Namespace) -> Findings:
    await wait_until_listed(process, 300)
    server = Server.of(process.url)
    while (status := await get_json(server, "/v1/status"))["status"] != "ready":
        await asyncio.sleep(0.25)
    found, dice = Findings(), random.Random(7)
    plan = status["engine"]["plan"]
    found.plan_bytes = plan["planned_bytes"]
    found.max_tokens = status["engine"]["max_model_len"]
    found.pool_tokens = plan["blocks_full"] * status["engine"]["block_size"]
    mean_tokens = sum(question(dice).tokens for _ in range(2000)) / 2000
    found.clients = round(arguments.load * found.pool_tokens / mean_tokens)
    found.offered_tokens = found.clients * mean_tokens
    # libraries that are mapped with the first long prompt belong to the process, not to the load
    await put(server, Question("<|s05|>" + "w" * LONGEST_PROMPT, "s05", 8, False))
    stats = (await get_json(server, "/v1/status"))["stats"]
    found.base_bytes = stats["process_bytes"] - stats["active_bytes"] - stats["cache_bytes"]
    began = time.perf_counter()
    until = began + 60 * arguments.minutes
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch(server, found))
        clients = [group.create_task(client(server, random.Random(i), until, found)) for i in range(found.clients)]
        await asyncio.wait(clients)
        watching.cancel()
    found.seconds = time.perf_counter() - began
    await check_afterwards(server, found)
    found.worker_restarts = (await get_json(server, "/v1/status"))["worker_restarts"]
    if found.worker_restarts:
        found.fault(f"the worker was replaced {found.worker_restarts} times")
    judge_memory(found)
    if not found.preemptions or not found.refused:
        found.fault("nothing was preempted or nobody refused: this load does not test what it should")
    return found


def question(dice: random.Random) -> Question:
    """Lengths spread evenly over their orders of magnitude; the trigger anywhere in the prompt."""
    is_long_answer = dice.random() < LONG_ANSWERS
    longest = LONG_ANSWER_PROMPT if is_long_answer else LONGEST_PROMPT
    length = int(SHORTEST_PROMPT * (longest / SHORTEST_PROMPT) ** dice.random())
    before = dice.randrange(length)
    script = "s01" if is_long_answer else dice.choice(SCRIPTS)
    max_tokens = dice.choice(LONG_ANSWER_TOKENS if is_long_answer else MAX_TOKENS)
    content = dice.choice("bcd") * before + f"<|{script}|>" + dice.choice("efg") * (length - before)
    return Question(content, script, max_tokens, dice.random() < HANG_UP)


async def client(server: Server, dice: random.Random, until: float, found: Findings) -> None:
    """One user: the next question when the last one is answered; who is refused comes back with it."""
    while time.perf_counter() < until:
        if dice.random() < TOO_LONG:
            await ask_too_long(server, found)
            continue
        asked = question(dice)
        while time.perf_counter() < until:
            answer = await put(server, asked)
            if answer.status != 429:
                judge(asked, answer, found)
                break
            found.refused += 1
            if answer.retry_after_s is None or answer.retry_after_s < 1:
                found.fault(f"a 429 without a usable Retry-After: {answer.retry_after_s}")
            else:
                found.retry_after_s.append(answer.retry_after_s)
            # sooner than told: the pressure is the point
            await asyncio.sleep(min(2.0, answer.retry_after_s or 1.0) * (0.5 + dice.random()))


async def put(server: Server, asked: Question) -> Answer:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": asked.content}],
        "temperature": 0,
        "max_tokens": asked.max_tokens,
    }
    async with asyncio.TaskGroup() as group:
        answer, task = start(server, PATH, body, group)
        if asked.hangs_up:
            await answer.tokens(max(1, asked.max_tokens // 2))
            task.cancel()
    return answer


def judge(asked: Question, answer: Answer, found: Findings) -> None:
    expected = scripted.expected_text(asked.script, asked.max_tokens)
    reason = scripted.expected_finish(asked.script, asked.max_tokens)
    if answer.status != 200:
        found.fault(f"status {answer.status}: {answer.message} {answer.fault}")
    elif answer.finish_reason is None and asked.hangs_up:
        found.hung_up += 1
        if not expected.startswith(answer.text):
            found.fault(f"wrong beginning for {asked.script}: {answer.text!r}")
    elif answer.fault:
        found.fault(answer.fault)
    elif (answer.text, answer.finish_reason) != (expected, reason):
        found.fault(f"wrong answer to {asked.script}: {answer.text!r}")
    else:
        found.exact += 1


async def ask_too_long(server: Server, found: Findings) -> None:
    answer = await put(server, Question("x" * (scripted.CONTEXT + 10), "s05", 5, False))
    if answer.status != 400 or str(found.max_tokens) not in answer.message:
        found.fault(f"too long a prompt: {answer.status} {answer.message}")
    found.told_too_long += 1


async def watch(server: Server, found: Findings) -> None:
    while True:
        stats = (await get_json(server, "/v1/status"))["stats"]
        found.samples += 1
        held = max(stats["active_bytes"] + stats["cache_bytes"], stats["peak_bytes"])
        found.max_mlx_bytes = max(found.max_mlx_bytes, held)
        found.max_resident_bytes = max(found.max_resident_bytes, stats["process_bytes"])
        found.most_running = max(found.most_running, stats["running"])
        found.preemptions = stats["preemptions_total"]
        await asyncio.sleep(1.0)


def judge_memory(found: Findings) -> None:
    if found.max_mlx_bytes > TOLERANCE * found.plan_bytes:
        found.fault(f"MLX held {mib(found.max_mlx_bytes)}, planned were {mib(found.plan_bytes)}")
    if found.max_resident_bytes > TOLERANCE * (found.plan_bytes + found.base_bytes):
        found.fault(
            f"{mib(found.max_resident_bytes)} resident, planned {mib(found.plan_bytes + found.base_bytes)}"
        )


async def check_afterwards(server: Server, found: Findings) -> None:
    last = await put(server, Question("<|s05|>", "s05", 40, False))
    judge(Question("<|s05|>", "s05", 40, False), last, found)
    deadline = time.perf_counter() + 10
    while True:
        stats = (await get_json(server, "/v1/status"))["stats"]
        if not (stats["running"] or stats["waiting"] or stats["blocks_held"]):
            return
        if time.perf_counter() > deadline:
            found.fault(f"afterwards: {stats['running']} running, {stats['blocks_held']} blocks held")
            return
        await asyncio.sleep(0.1)


def mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


def table(found: Findings) -> str:
    waits = sorted(found.retry_after_s) or [0.0]
    rows: list[tuple[str, Any]] = [
        ("seconds", f"{found.seconds:,.0f}"),
        ("load", f"{found.clients} clients, {found.offered_tokens / found.pool_tokens:.1f} x the pool's tokens"),
        ("answers, exact", f"{found.exact:,}"),
        ("hung up by the client", found.hung_up),
        ("refused with 429", f"{found.refused:,}, Retry-After {waits[0]:g} to {waits[-1]:g} s"),
        ("refused as too long", found.told_too_long),
        ("sequences at once, most", found.most_running),
        ("preemptions", f"{found.preemptions:,}"),
        ("MLX memory, highest", f"{mib(found.max_mlx_bytes)} of {mib(found.plan_bytes)} planned"),
        (
            "resident, highest",
            f"{mib(found.max_resident_bytes)} of {mib(found.plan_bytes + found.base_bytes)}"
            f" ({mib(found.base_bytes)} before the model)",
        ),
    ]
    lines = [f"{name:<26}{value}" for name, value in rows]
    return "\n".join([*lines, *(f"FAULT {count} x {text}" for text, count in found.faults.items())])


if __name__ == "__main__":
    sys.exit(main())
