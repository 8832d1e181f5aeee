"""``headrace plan [MODEL]``: the memory plan that ``serve`` would make, from the files' headers alone.

Weights and KV are exact, the activation peak is an estimate (a start measures it). With ``--memory-gb`` or
``--device`` the plan is for another machine, all of whose memory is taken to be free.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from headrace.cli.bench_flags import COST
from headrace.cli.flags import Flag, FlagTable, UsageError, collect, make_parser, read_arguments
from headrace.cli.serve_flags import SERVE_FLAGS
from headrace.cli.values import choice, number

if TYPE_CHECKING:
    from headrace.core.memory_plan import DeviceMemory, MemoryPlan
    from headrace.runner.estimate import Estimate

_DESCRIPTION = (
    "Prints how memory would be divided and how many sequences would fit, without loading weights. "
    "MODEL and the engine's flags are those of serve."
)
# Share of a Mac's memory that Metal recommends to one process at most, where the device itself cannot be asked.
_METAL_SHARE = 0.75

_OWN = (
    Flag("--memory-gb", "plan for a machine with this much memory (GiB)", "plan.memory_gb", number(0, above=True)),
    Flag(
        "--device", "plan for this kind of device", "plan.device", choice("cpu", "metal", "cuda"), "this machine's"
    ),
    COST,
    Flag("--json", "print the numbers as JSON", "plan.json"),
)


def _table() -> FlagTable:
    """The flags of serve that set something of the engine or of a download, and our own."""
    shared = [
        (title, tuple(flag for flag in flags if flag.target.startswith(("engine.", "download."))))
        for title, flags in SERVE_FLAGS.groups
    ]
    return FlagTable((("plan", _OWN), *((title, flags) for title, flags in shared if flags)))


def run(argv: Sequence[str]) -> int:
    from headrace.cli.serve import locate
    from headrace.cli.settings import check, engine_config, section

    table = _table()
    positional, given = read_arguments(make_parser("plan", "[MODEL] [options]", _DESCRIPTION, table), table, argv)
    if len(positional) > 1:
        raise UsageError(f"one MODEL, not {len(positional)}: unexpected {positional[1]!r}")
    values = collect(given)
    check(values)
    path, name = locate(positional[0] if positional else None, section(values, "download"))

    from headrace.checkpoint.model_folder import describe
    from headrace.core.memory_plan import plan_memory
    from headrace.runner.estimate import estimate

    cost = _cost(cast("dict[str, float] | None", values.get("bench.cost")))
    config = engine_config(values, path)
    files = describe(path)
    device, title = _device(section(values, "plan"))
    found = estimate(files, config, device)
    plan = plan_memory(found.layout, device, found.fixed, config, found.trained_len, found.own_attention)
    if values.get("plan.json"):
        numbers = {"model": name, "device": title, "weights_held_as": found.form, **plan.numbers()}
        print(json.dumps(numbers | ({"cost": cost} if cost else {}), indent=1))
        return 0
    print(render(name, title, found, plan, files.warnings))
    if cost:
        from headrace.bench.table import cost_lines

        print("\n".join(cost_lines({"cost": cost})))
    return 0


def _cost(values: dict[str, float] | None) -> dict[str, float | None] | None:
    """Cost per million tokens at a speed somebody measured; a plan measures none. Raises UsageError without it."""
    if values is None:
        return None
    from dataclasses import asdict

    from headrace.bench.cost import cost_from

    cost = cost_from(values, None)
    if cost is None:
        raise UsageError("--cost needs tokens_per_s here: measure it with bench or bench-serve")
    return {"tokens_per_s": values["tokens_per_s"], **asdict(cost)}


def _device(wished: dict[str, Any]) -> tuple[DeviceMemory, str]:
    """The device to plan for, and what to call it."""
    from headrace.core.memory_plan import DeviceMemory
    from headrace.runner.device import read_device

    here = read_device()
    kind = wished.get("device", here.kind)
    gib = wished.get("memory_gb")
    if gib is None and kind == here.kind:
        memory = DeviceMemory(kind, here.total_bytes, here.working_set_bytes, here.free_bytes)
        return memory, f"{kind} ({here.name}), {_mib(here.total_bytes)}, {_mib(here.free_bytes)} of it free now"
    if gib is None:
        raise UsageError(f"--device {kind} is not this machine's ({here.kind}): give --memory-gb as well")
    total = int(gib * 2**30)
    working_set = int(total * _METAL_SHARE) if kind == "metal" else total
    return DeviceMemory(kind, total, working_set, total), f"{kind} with {_mib(total)}, all taken to be free"


def render(name: str, device: str, found: Estimate, plan: MemoryPlan, warnings: Sequence[str]) -> str:
    """The table for people."""
    from headrace.core.memory_plan import CONTEXTS

    remarks = {"weights": f"held as {found.form}", "activations": "an estimate; serve measures it"}
    for index, group in enumerate(plan.layout.groups):
        remarks[f"KV pool {group.name}"] = (
            f"{plan.num_blocks[index]:,} blocks of {plan.layout.block_size} tokens, "
            f"{group.bytes_per_token:,} bytes a token"
        )
    lines = [f"{name} on {device}", ""]
    lines += [f"{row:<20}{_mib(size):>12}   {remarks.get(row, '')}".rstrip() for row, size in plan.rows() if size]
    lines += [
        "",
        f"longest sequence: {plan.max_model_len:,} tokens (the model was made for {found.trained_len:,})",
    ]
    for context in CONTEXTS:
        count = plan.sequences_at(context)
        fits = f"{count:,}" if count else "does not fit" if context <= found.trained_len else "beyond the model"
        lines.append(f"sequences of {context:>6,} tokens at once: {fits}")
    lines += [f"note: {note}" for note in (*plan.notes, *warnings)]
    return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
