"""Drives the scheduler with thousands of requests and a fitted device model; no weights, no clock.

    python benchmarks/simulate.py                  10,000 requests, a GPU-like device, bursts, shared prefixes
    python benchmarks/simulate.py --stall-ms 50    the same with a bound on stalls
    python benchmarks/simulate.py --overhead       the scheduler's own time per step at 256 sequences

The device costs  launch + decode rows · row + context · read  per decode forward and
tokens · (token + context · attention)  per prefill forward, padding included, one step after the other. Times
are simulated; only "scheduler µs per step" is measured, on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from headrace.core.collector import settle_collector
from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.scheduler import Scheduler, SchedulerConfig
from headrace.core.step import SampledToken, ScheduledRow, SchedulerOutput, StepResult
from headrace.params import SamplingParams
from headrace.request import EngineRequest


@dataclass(frozen=True)
class Device:
    """Seconds; the defaults are near an 8B model at 16 bits on a GPU with 4 TB/s."""

    launch_s: float = 6e-3
    row_s: float = 2e-5
    read_s: float = 3e-9  # per token of context of a decode row
    token_s: float = 4e-5
    attention_s: float = 1.5e-9  # per prompt token and token of context

    def step_s(self, output: SchedulerOutput) -> float:
        seconds = 0.0
        if output.decode:
            context = sum(row.start for row in output.decode)
            seconds += self.launch_s + len(output.decode) * self.row_s + context * self.read_s
        if output.prefill:
            longest = max(row.num_tokens for row in output.prefill)
            deepest = max(row.start for row in output.prefill) + longest / 2
            area = longest * len(output.prefill)
            seconds += self.launch_s + area * (self.token_s + deepest * self.attention_s)
        return seconds


@dataclass
class Timeline:
    """What one request lived through."""

    arrival: float
    first: float | None = None
    last: float | None = None
    worst_gap: float = 0.0
    tokens: int = 0


@dataclass
class Report:
    timelines: dict[str, Timeline] = field(default_factory=dict)
    rejected: int = 0
    scheduler_s: list[float] = field(default_factory=list)  # own time of each step


def trace(count: int, rate: float, seed: int) -> Iterable[tuple[float, EngineRequest]]:
    """Arrivals in bursts; log-normal lengths, a tenth long documents; half share one of 20 system prompts."""
    rng = random.Random(seed)
    systems = [[rng.randrange(32000) for _ in range(rng.choice([200, 800, 2500]))] for _ in range(20)]
    now = 0.0
    for i in range(count):
        burst = 3.0 if (now // 60) % 5 == 0 else 1.0
        now += rng.expovariate(rate * burst)
        length = 20_000 if rng.random() < 0.01 else int(min(6000, rng.lognormvariate(5.5, 1.0)) + 1)
        prompt = [rng.randrange(32000) for _ in range(length)]
        if rng.random() < 0.5:
            prompt = rng.choice(systems) + prompt
        tokens = int(min(1500, rng.lognormvariate(5.0, 0.8)) + 1)
        params = SamplingParams(max_tokens=tokens, seed=i)
        yield now, EngineRequest(id=str(i), prompt_token_ids=prompt, params=params, key=rng.choice("aaab"))


def fake_result(output: SchedulerOutput, duration_s: float) -> StepResult:
    rows: tuple[ScheduledRow, ...] = (*output.decode, *output.prefill)
    sampled = {row.seq_id: SampledToken(row.seq_id * 7919 + row.start & 0x7FFF) for row in rows if row.samples}
    return StepResult(output.step_id, sampled, {}, {}, duration_s)


def simulate(scheduler: Scheduler, device: Device, arrivals: Iterable[tuple[float, EngineRequest]]) -> Report:
    """Run all arrivals to their end, one step ahead of results."""
    report, now = Report(), 0.0
    queue = iter(arrivals)
    upcoming = next(queue, None)
    pending: StepResult | None = None
    while upcoming is not None or scheduler.has_work():
        if not scheduler.has_work() and upcoming is not None:
            now = max(now, upcoming[0])
        while upcoming is not None and upcoming[0] <= now:
            if scheduler.add_request(upcoming[1], now) is None:
                report.timelines[upcoming[1].id] = Timeline(upcoming[0])
            else:
                report.rejected += 1
            upcoming = next(queue, None)
        began = time.perf_counter()
        output = scheduler.schedule(now)
        own = time.perf_counter() - began
        result = None if output.is_empty else fake_result(output, device.step_s(output))
        if pending is not None:
            now += pending.duration_s
            began = time.perf_counter()
            outputs = scheduler.update(pending, now)
            own += time.perf_counter() - began
            for sequence in outputs:
                note(report.timelines[sequence.request_id], len(sequence.token_ids), now)
        pending = result
        report.scheduler_s.append(own)
    return report


def note(line: Timeline, tokens: int, now: float) -> None:
    if not tokens:
        return
    if line.last is not None:
        line.worst_gap = max(line.worst_gap, now - line.last)
    line.first = now if line.first is None else line.first
    line.last = now
    line.tokens += tokens


def quantiles(name: str, values: list[float], scale: float, unit: str) -> str:
    values = sorted(values)
    parts = [
        f"p{q} {values[min(len(values) - 1, math.ceil(len(values) * q / 100) - 1)] * scale:10.1f}"
        for q in (50, 90, 99)
    ]
    mean, most = statistics.fmean(values) * scale, values[-1] * scale
    return f"{name:<30} mean {mean:10.1f}  {'  '.join(parts)}  max {most:10.1f} {unit}"


def print_report(report: Report, scheduler: Scheduler) -> None:
    lines = [line for line in report.timelines.values() if line.first is not None and line.last is not None]
    last = max(line.last or 0.0 for line in lines)
    stats = scheduler.stats()
    print(f"{len(lines)} requests done, {report.rejected} refused")
    print(f"{len(report.scheduler_s)} steps in {last:.0f} simulated seconds")
    print(
        f"{sum(line.tokens for line in lines) / last:.0f} output tokens/s, {stats.preemptions_total} preemptions"
    )
    print(f"prefix cache: {stats.prefix_hits_total / max(1, stats.prefix_queries_total):.1%} of prompt tokens")
    print(quantiles("time to first token", [(line.first or 0) - line.arrival for line in lines], 1e3, "ms"))
    print(quantiles("worst gap of a stream", [line.worst_gap for line in lines if line.tokens > 1], 1e3, "ms"))
    print(quantiles("scheduler per step (measured)", report.scheduler_s, 1e6, "µs"))


def busy_requests(rng: random.Random) -> Iterator[EngineRequest]:
    """Without end: prompts of log-normal length around 500 tokens up to 8,000, outputs of 100 to 900."""
    for number in itertools.count():
        length = int(min(8000, rng.lognormvariate(6.2, 1.0)) + 1)
        prompt = [rng.randrange(32000) for _ in range(length)]
        yield EngineRequest(
            id=str(number), prompt_token_ids=prompt, params=SamplingParams(max_tokens=rng.randint(100, 900))
        )


def overhead(sequences: int, steps: int) -> None:
    """The scheduler's own time per step at ``sequences`` running ones; for each that ends another one joins.

    CPU time, so that other work on the machine does not count; the garbage collector is set as in a worker.
    Counting begins 500 steps after all run for the first time.
    """
    config = SchedulerConfig(max_num_seqs=sequences, max_model_len=16384)
    layout = KVLayout(16, (LayerGroup("full", 32, 131072),))
    scheduler = Scheduler(config, layout, (sequences * 160,))
    requests = busy_requests(random.Random(1))
    encode = msgspec.msgpack.Encoder().encode
    pending: StepResult | None = None
    times_s: list[tuple[float, float, float, float, bool]] = []
    warm_up, context = 500, 0
    while len(times_s) < steps:
        stats = scheduler.stats()
        for request in itertools.islice(requests, sequences - stats.running - stats.waiting):
            scheduler.add_request(request, 0.0)
        t0 = time.thread_time()
        output = scheduler.schedule(0.0)
        t1 = time.thread_time()
        result = fake_result(output, 0.01)
        t2 = time.thread_time()
        outputs = [] if pending is None else scheduler.update(pending, 0.0)
        t3 = time.thread_time()
        encode(outputs)
        t4 = time.thread_time()
        pending = result
        if warm_up and stats.running == sequences:
            warm_up -= 1
            if not warm_up:
                settle_collector()
        elif not warm_up:
            times_s.append((t1 - t0, t3 - t2, t1 - t0 + t3 - t2, t4 - t3, bool(output.prefill)))
            context += sum(row.start for row in output.decode)
    print(f"{sequences} running sequences, {context / steps / sequences:.0f} tokens of context, {steps} steps")
    names = ("  schedule", "  update", "  schedule + update", "  encoding the outputs")
    for has_prompt, title in ((False, "decode only"), (True, "a prompt begins or goes on")):
        chosen = [values for values in times_s if values[-1] == has_prompt]
        print(f"{len(chosen)} steps, {title}:")
        for name, values in zip(names, zip(*chosen, strict=True), strict=False):
            print(quantiles(name, list(values), 1e6, "µs"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second outside bursts")
    parser.add_argument("--blocks", type=int, default=24_000, help="blocks of 16 tokens in the pool")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-queue", type=int, default=1000)
    parser.add_argument("--stall-ms", type=float, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--overhead", action="store_true")
    args = parser.parse_args()
    if args.overhead:
        overhead(256, 2000)
        return
    config = SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_model_len=32768,
        max_queue=args.max_queue,
        max_decode_stall_ms=args.stall_ms,
    )
    scheduler = Scheduler(config, KVLayout(16, (LayerGroup("full", 32, 131072),)), (args.blocks,))
    report = simulate(scheduler, Device(), trace(args.requests, args.rate, args.seed))
    scheduler.check_integrity()
    print_report(report, scheduler)


if __name__ == "__main__":
    main()
