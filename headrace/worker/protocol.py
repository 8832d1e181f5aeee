"""Messages between gateway and worker, msgspec-encoded, over one local ZeroMQ socket pair.

The gateway binds, the worker connects. Order within one direction is kept. This module knows no MLX.
"""

from __future__ import annotations

import msgspec

from headrace.config import EngineConfig
from headrace.core.scheduler_types import GroupBlocks
from headrace.request import EngineRequest, SequenceOutput

# -- the worker's standard input, first line; then the pipe stays open for as long as the gateway lives ---


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with, one line of JSON.

    Attributes:
        engine: model, limits, memory.
        endpoint: ZeroMQ address of the gateway's ROUTER socket.
        token: secret of this one start; the worker's socket identities are made of it, and messages of
            other peers are dropped.
        folder: private folder of the gateway; holds the socket and the step record.
        record: path of the step record (``headrace.worker.step_record``).
    """

    engine: EngineConfig
    endpoint: str
    token: str
    folder: str
    record: str


def engine_identity(token: str) -> bytes:
    """Identity of the worker's main socket (both directions)."""
    return f"{token}:engine".encode()


def heartbeat_identity(token: str) -> bytes:
    """Identity of the heartbeat thread's socket (worker to gateway only)."""
    return f"{token}:heartbeat".encode()


# -- gateway -> worker ---------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Queue a request. Answered at once by ``Accepted`` or ``Rejected``; outputs come in ``StepOutputs``."""

    request: EngineRequest


class AbortRequest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Drop a request, or one sequence of it; its blocks are free after the next step. Unknown ids are ignored."""

    request_id: str
    index: int | None = None


class ClearPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget all cached blocks that no request holds."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End now; open requests are dropped (draining is the gateway's business)."""


ToWorker = AddRequest | AbortRequest | ClearPrefixCache | Shutdown

# -- worker -> gateway ---------------------------------------------------------------------------------


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """State after a step; gauges unless the name says total.

    ``available_bytes`` is what the machine has free, ``process_bytes`` the worker's physical memory (0: unknown),
    ``pressure`` one of ``headrace.core.pressure.LEVELS``. ``blocks_*`` are those of all ``groups`` together.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_held: int = 0
    blocks_cached: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    preemptions_total: int = 0
    step_s: float = 0.0
    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    process_bytes: int = 0
    available_bytes: int = 0
    pressure: str = "none"
    groups: tuple[GroupBlocks, ...] = ()


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """Loading and warm-up, for the log and for ``/ready``."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The worker can step. ``plan`` is the memory plan in force (bytes and counts by name)."""

    pid: int
    device: str
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int
    attention: str
    plan: dict[str, int | float | str]


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """A permanent fault at start; the worker exits right after. ``message`` is one line."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All that one step produced, for every request at once.

    ``at``: when, on the monotonic clock that the machine's processes share: the gateway may read it later.
    """

    outputs: list[SequenceOutput]
    stats: EngineStats
    at: float


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The request is queued; a streaming answer may begin."""

    request_id: str


class Rejected(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """The request was not queued. Fields as in ``headrace.errors.RequestError``."""

    request_id: str
    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class StepPoisoned(msgspec.Struct, frozen=True, tag=True):
    """A step failed as a whole: nothing of it is released and the worker exits right after. One line."""

    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent every second from a thread of its own; ``steps_total`` tells progress from mere life."""

    stats: EngineStats


ToGateway = LoadProgress | Ready | StartFailed | StepOutputs | StepPoisoned | Accepted | Rejected | Heartbeat

# -- exit codes of a worker ----------------------------------------------------------------------------

EXIT_START_FAILED = 2
EXIT_POISONED_STEP = 70
