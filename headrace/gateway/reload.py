"""Decisions of a reload that need no process: what may change, and whether memory holds two workers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.config import EngineConfig, ServerConfig
from headrace.core.machine import Memory
from headrace.worker.protocol import Ready

# Fields of ServerConfig that a running process cannot take over.
FIXED_FIELDS = (
    "host", "port", "ssl_certfile", "ssl_keyfile", "root_path", "log_level", "log_format", "embedding", "reranker",
    "otlp_traces_endpoint",
)  # fmt: skip
# What a worker takes, by name in its memory plan.
_PARTS = ("weights", "activations", "attention_scratch", "buffer_cache", "pool")


def refusal(old: ServerConfig, new: ServerConfig) -> str:
    """Why ``new`` cannot be taken over at all, or ""."""
    if new.engine.model != old.engine.model:
        return "the model cannot change in a reload (open requests go on with it); stop and start the server"
    if new.served_model_names != old.served_model_names:
        return "the served model names cannot change in a reload; stop and start the server"
    return ""


def needs_restart(old: ServerConfig, new: ServerConfig) -> list[str]:
    """Fields that differ and stay as they were until the server is started anew."""
    return [name for name in FIXED_FIELDS if getattr(old, name) != getattr(new, name)]


def with_fixed(old: ServerConfig, new: ServerConfig) -> ServerConfig:
    """``new`` as far as a running process can take it over."""
    return msgspec.structs.replace(new, **{name: getattr(old, name) for name in FIXED_FIELDS})


def changes_http(old: ServerConfig, new: ServerConfig) -> bool:
    """Whether the HTTP side must be made anew, not only the worker."""
    return msgspec.structs.replace(new, engine=old.engine) != old


def fits_twice(ready: Ready, engine: EngineConfig, memory: Memory) -> bool:
    """Whether a second worker like the present one fits beside it, the headroom left free.

    The gateway cannot see what a CUDA device has free, so there one worker goes before the other comes.
    """
    if ready.device.startswith("cuda"):
        return False
    headroom = int(memory.total_bytes * engine.memory_headroom)
    return memory.available_bytes - headroom >= worker_bytes(ready.plan)


def worker_bytes(plan: Mapping[str, int | float | str]) -> int:
    """What a worker takes by its memory plan."""
    sizes = [plan.get(f"{part}_bytes", 0) for part in _PARTS]
    return sum(int(size) for size in sizes if not isinstance(size, str))
