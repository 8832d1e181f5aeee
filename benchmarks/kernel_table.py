"""Where device time goes, from a profiler's trace: kernels by name, gaps between them, calls of the host.

A trace is what ``torch.profiler`` exports (Chrome's format): complete events ("ph": "X") with ``ts`` and ``dur``
in microseconds. Categories: ``kernel``, ``gpu_memcpy`` and ``gpu_memset`` ran on the device, ``cuda_runtime`` and
``cuda_driver`` are calls of the host. Kernels of several streams may overlap, so busy time is the union.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
HOST = {"cuda_runtime", "cuda_driver"}
NAME_WIDTH = 76
# Shorter idle times lie within a graph, between a kernel's end and the next one's start.
GAP_US = 1.0


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or call, in microseconds."""

    name: str
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


def spans(trace: dict[str, Any], categories: set[str]) -> list[Span]:
    """Events of the categories, by their start."""
    found = [
        Span(short_name(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace.get("traceEvents", [])
        if event.get("ph") == "X" and event.get("cat") in categories
    ]
    return sorted(found, key=lambda span: span.start_us)


def short_name(name: str) -> str:
    """A kernel's name without its return type, namespaces, parameters and hash; template values are kept."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    name = re.sub(r"\b(?:\w+::)+(\w)", r"\1", name)
    name = re.sub(r"\(.*\)$", "", name)
    name = re.sub(r"_?[0-9a-f]{16,}|_?\d{12,}", "", name)
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"


def added(found: Sequence[Span]) -> list[Span]:
    """What each adds to the time of those that ended before it: a kernel that began early waited until then.

    By their ends; together they are the busy time.
    """
    made = []
    last = float("-inf")
    for span in sorted(found, key=lambda span: span.end_us):
        made.append(Span(span.name, max(span.start_us, last), span.end_us))
        last = max(last, span.end_us)
    return made


@dataclass(frozen=True, slots=True)
class Line:
    """All events of one name: how many a step, microseconds of one, of a step, share of the total."""

    name: str
    per_step: float
    mean_us: float
    step_us: float
    share: float


def lines(found: Iterable[Span], steps: int) -> list[Line]:
    """By the time that they take, longest first."""
    by_name: dict[str, list[float]] = {}
    for span in found:
        by_name.setdefault(span.name, []).append(span.us)
    total = sum(sum(times) for times in by_name.values()) or 1.0
    made = [
        Line(name, len(times) / steps, sum(times) / len(times), sum(times) / steps, sum(times) / total)
        for name, times in by_name.items()
    ]
    return sorted(made, key=lambda line: -line.step_us)


@dataclass(frozen=True, slots=True)
class Device:
    """Of one step, in microseconds: from the first kernel to the last, how much of it one ran, and the rest.

    ``gaps``: waits of more than ``GAP_US``, by the kernels around them, as lines like those of kernels.
    """

    span_us: float
    busy_us: float
    small_gaps_us: float
    gaps: Sequence[Line]


def device(found: Sequence[Span], steps: int) -> Device:
    """``found`` by their start; several streams may overlap."""
    if not found:
        return Device(0.0, 0.0, 0.0, ())
    busy, small = 0.0, 0.0
    gaps: list[Span] = []
    first, last = found[0].start_us, found[0]
    for _, span in pairwise(found):
        idle = span.start_us - last.end_us
        if idle > 0:
            busy += last.end_us - first
            first = span.start_us
            if idle > GAP_US:
                gaps.append(Span(f"{last.name} → {span.name}", last.end_us, span.start_us))
            else:
                small += idle
        if span.end_us > last.end_us:
            last = span
    busy += last.end_us - first
    total = last.end_us - found[0].start_us
    return Device(total / steps, busy / steps, small / steps, lines(gaps, steps))


def table(made: Sequence[Line], most: int, title: str) -> str:
    """Markdown, the rest as one line."""
    rows = [f"| {title} | per step | mean µs | µs per step | share |", "|---|---|---|---|---|"]
    for line in made[:most]:
        rows.append(
            f"| {line.name} | {line.per_step:.1f} | {line.mean_us:.1f} | {line.step_us:.1f} | {line.share:.1%} |"
        )
    rest = made[most:]
    if rest:
        time_us, count = sum(line.step_us for line in rest), sum(line.per_step for line in rest)
        share = sum(line.share for line in rest)
        rows.append(f"| {len(rest)} others | {count:.1f} | – | {time_us:.1f} | {share:.1%} |")
    return "\n".join(rows)
