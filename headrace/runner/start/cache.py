"""What a start measured and proved, kept for the next start of the same model by the same code on the same device.

A worker that takes a dead one's place has clients waiting. What can only come out as it did before is not done
again: the self-check's choice and the measured activations. The key holds everything they depend on; a file that
cannot be read, or is of another key, is as good as none. Files appear whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec

import headrace
from headrace.checkpoint.model_folder import ModelFiles
from headrace.config import EngineConfig
from headrace.core.context_scratch import ContextCost
from headrace.errors import StartupError
from headrace.files import appearing, cache_folder
from headrace.runner.device import Device
from headrace.runner.model_runner import RunnerOptions

# Whose versions decide how a model computes.
PACKAGES = ("mlx", "mlx-lm", "numpy")
_SOURCES = (".py", ".cpp", ".h")


class StartFacts(msgspec.Struct, frozen=True):
    """What is kept.

    Attributes:
        materialize, single_rows, compile, decode_kernel, trace_prompts: of the ``RunnerOptions`` that passed the
            self-check.
        activation_bytes: peak of a step beyond weights and pools.
        context_bytes, query_bytes: of a model that computes attention itself (``ContextCost``), else 0.
    """

    materialize: bool
    single_rows: bool
    compile: bool
    activation_bytes: int
    context_bytes: int = 0
    query_bytes: int = 0
    decode_kernel: bool = False
    trace_prompts: bool = False

    @classmethod
    def of(cls, options: RunnerOptions, activation_bytes: int, cost: ContextCost | None = None) -> StartFacts:
        context, query = (0, 0) if cost is None else (cost.context_bytes, cost.query_bytes)
        return cls(
            options.materialize,
            options.single_rows,
            options.compile,
            activation_bytes,
            context,
            query,
            options.decode_kernel,
            options.trace_prompts,
        )

    @property
    def context_cost(self) -> ContextCost | None:
        return ContextCost(self.context_bytes, self.query_bytes) if self.materialize else None

    def options(self, wanted: RunnerOptions) -> RunnerOptions:
        """``wanted`` as the self-check changed it."""
        return replace(
            wanted,
            materialize=self.materialize,
            single_rows=self.single_rows,
            compile=self.compile,
            decode_kernel=wanted.decode_kernel and self.decode_kernel,
            trace_prompts=wanted.trace_prompts and self.trace_prompts,
        )


class StartCache:
    """The kept facts of one key; ``key`` is from ``start_key``."""

    def __init__(self, key: str) -> None:
        try:
            self._path: Path | None = cache_folder("starts") / f"{key}.json"
        except StartupError:  # without a cache folder every start is a first one
            self._path = None

    def read(self) -> StartFacts | None:
        try:
            return None if self._path is None else msgspec.json.decode(self._path.read_bytes(), type=StartFacts)
        except (OSError, msgspec.MsgspecError):
            return None

    def write(self, facts: StartFacts) -> None:
        if self._path is None:
            return
        try:
            with appearing(self._path) as draft:
                draft.write_bytes(msgspec.json.encode(facts))
        except OSError:  # a full disk costs time at the next start, nothing else
            pass


def start_key(files: ModelFiles, config: EngineConfig, device: Device, *extra: object) -> str:
    """Digest of all that the facts depend on.

    Files count by name, size and time of change, the model's and this package's; ``extra``: what else was decided.
    """
    folder = files.path if files.kind == "folder" else files.path.parent
    parts = _states(folder / name for name in [*sorted(files.weight_files), "config.json"])
    package = Path(headrace.__file__).parent
    parts += _states(sorted(file for file in package.rglob("*") if file.suffix in _SOURCES))
    parts += [f"{name} {version(name)}" for name in PACKAGES]
    config = msgspec.structs.replace(config, replaces=False)
    parts += [device.kind, device.name, repr(config), *map(repr, extra)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def _states(paths: Iterable[Path]) -> list[str]:
    states = []
    for path in paths:
        try:
            found = path.stat()
        except OSError:
            continue
        states.append(f"{path.resolve()} {found.st_size} {found.st_mtime_ns}")
    return states
