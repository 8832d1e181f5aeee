"""The memory plan in force next to what is really used: for the log at start, ``/v1/status`` and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.gateway.service import EngineState
from headrace.worker.protocol import EngineStats

_LAST_ROW = "budget"
Plan = Mapping[str, int | float | str]


def plan_rows(plan: Plan) -> dict[str, int]:
    """The table's rows in order, parts first, then the budget they add up to; bytes. Empty without a plan."""
    rows: dict[str, int] = {}
    for name, value in plan.items():
        if name.endswith("_bytes") and isinstance(value, int):
            rows[name.removesuffix("_bytes").replace("_", " ")] = value
            if _LAST_ROW in rows:
                break
    return rows


def plan_lines(plan: Plan) -> list[str]:
    """The table as lines for the log."""
    lines = [f"memory plan: {name:<20}{_mib(size):>12}" for name, size in plan_rows(plan).items() if size]
    headroom = plan.get("headroom_bytes")
    if isinstance(headroom, int) and headroom:
        lines.append(f"memory plan: {'headroom (others)':<20}{_mib(headroom):>12}")
    return lines


def memory_report(state: EngineState) -> dict[str, Any] | None:
    """Planned rows, actual bytes, and every layer group's blocks; None before the first worker was ready."""
    if state.ready is None:
        return None
    plan, stats = state.ready.plan, state.stats
    return {
        "planned_bytes": plan_rows(plan),
        "headroom_bytes": plan.get("headroom_bytes"),
        "actual_bytes": {
            "arrays": stats.active_bytes,
            "arrays_peak": stats.peak_bytes,
            "buffer_cache": stats.cache_bytes,
            "process": stats.process_bytes or None,  # not known on every system
            "machine_available": stats.available_bytes,
        },
        "pressure": stats.pressure,
        "kv_blocks": [
            {
                "group": group.name,
                "total": group.total,
                "held": group.held,
                "cached": group.cached,
                "free": group.free,
                "block_bytes": group.block_bytes,
            }
            for group in stats.groups
        ],
    }


def block_counts(stats: EngineStats) -> dict[str, int]:
    """Blocks of all layer groups together: ``total`` is the sum of the others."""
    free = stats.blocks_total - stats.blocks_held - stats.blocks_cached
    return {"total": stats.blocks_total, "held": stats.blocks_held, "cached": stats.blocks_cached, "free": free}


def prefix_cache_report(stats: EngineStats, *, enabled: bool) -> dict[str, object]:
    """Prompt tokens looked up in the prefix cache, and those found there."""
    return {
        "enabled": enabled,
        "queried_tokens": stats.prefix_queries_total,
        "hit_tokens": stats.prefix_hits_total,
    }


def prefix_cache_bytes(state: EngineState) -> int:
    """KV that only the prefix cache keeps."""
    return sum(group.cached * group.block_bytes for group in state.stats.groups)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
