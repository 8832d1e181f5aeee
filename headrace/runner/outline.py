"""How a model would be served here: tier, KV memory, fit. Built from its definition; no weights are loaded."""

from __future__ import annotations

from typing import Any

from headrace.checkpoint.model_folder import ModelFiles
from headrace.config import EngineConfig
from headrace.core.layout import KVLayout
from headrace.core.memory_plan import CONTEXTS, DeviceMemory, plan_memory
from headrace.errors import StartupError
from headrace.runner.device import Device, read_device
from headrace.runner.estimate import Estimate, estimate
from headrace.runner.mlx_lm_adapter import CacheKind, build_model, cache_kinds


def outline(files: ModelFiles) -> dict[str, Any]:
    """Fields of ``model inspect``: tier, served, layer_groups, kv_bytes_per_token, fit, warnings.

    Raises ModelFileError where a start would: configuration and weights do not belong together.
    """
    device = read_device()
    kinds = cache_kinds(build_model(files.model_file, files.config))
    tier, why = tier_of(kinds)
    paged = all(kind.kind in ("full", "sliding") for kind in kinds)
    found, fit = _fit(files, device) if paged else (None, _unfit(device, "this architecture is not served yet"))
    layout = None if found is None else found.layout
    return {
        "tier": {"name": tier, "why": why},
        "served": paged,
        "layer_groups": _groups(kinds, layout),
        "kv_bytes_per_token": None if layout is None else layout.bytes_per_token,
        "fit": fit,
        "warnings": [*files.warnings, *_language_part(files)],
    }


def _language_part(files: ModelFiles) -> list[str]:
    if "vision_config" in files.config or "audio_config" in files.config:
        return ["only the language part is served; images and audio are refused"]
    return []


def tier_of(kinds: tuple[CacheKind, ...]) -> tuple[str, str]:
    """The tier (paged, hybrid, exclusive) and the reason, from the cache that each layer wants."""
    names = {kind.kind for kind in kinds}
    others = sorted({kind.name for kind in kinds if kind.kind == "other"})
    if others:
        return "exclusive", f"layers keep their own kind of cache ({', '.join(others)}), which cannot be shared"
    if names == {"recurrent"}:
        return "hybrid", "every layer is recurrent: one state per sequence, no KV"
    if "recurrent" in names:
        return "hybrid", "attention layers are paged, recurrent layers keep one state per sequence"
    if "sliding" in names:
        return "paged", "full and sliding-window attention" if "full" in names else "sliding-window attention"
    return "paged", "full attention in every layer"


def _groups(kinds: tuple[CacheKind, ...], layout: KVLayout | None) -> list[dict[str, Any]]:
    if layout is not None:
        return [
            {
                "name": group.name,
                "layers": group.num_layers,
                "window": group.window,
                "kv_bytes_per_token": group.bytes_per_token,
            }
            for group in layout.groups
        ]
    counts: dict[tuple[str, int | None], int] = {}
    for kind in kinds:
        counts[kind.kind, kind.window] = counts.get((kind.kind, kind.window), 0) + 1
    return [
        {"name": name, "layers": count, "window": window, "kv_bytes_per_token": None}
        for (name, window), count in counts.items()
    ]


def _unfit(device: Device, why: str) -> dict[str, Any]:
    return {
        "device": f"{device.kind}: {device.name}",
        "device_memory_bytes": device.working_set_bytes,
        "free_bytes": device.free_bytes,
        "fits": False,
        "why": why,
    }


def _fit(files: ModelFiles, device: Device) -> tuple[Estimate | None, dict[str, Any]]:
    """The memory plan of a start with default flags; activations are estimated."""
    memory = DeviceMemory(device.kind, device.total_bytes, device.working_set_bytes, device.free_bytes)
    config = EngineConfig(model=str(files.path))
    unbounded = estimate(files, config, DeviceMemory(device.kind, 1 << 60, 1 << 60, 1 << 60))
    try:
        found = estimate(files, config, memory)
        plan = plan_memory(found.layout, memory, found.fixed, config, found.trained_len, found.own_attention)
    except StartupError as error:
        return unbounded, _unfit(device, str(error))
    fit = _unfit(device, "") | {
        "fits": True,
        "weights_held_as": found.form,
        "weights_bytes": found.fixed.weights,
        "budget_bytes": plan.budget_bytes,
        "kv_pool_bytes": plan.pool_bytes,
        "max_model_len": plan.max_model_len,
        "sequences_at": {str(context): plan.sequences_at(context) for context in CONTEXTS},
        "notes": list(plan.notes),
    }
    return found, fit
