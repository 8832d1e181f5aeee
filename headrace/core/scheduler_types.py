"""What the scheduler is configured with, and what it answers besides steps and outputs. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one worker's scheduler.

    Attributes:
        max_num_seqs: sequences that hold blocks at once, at most.
        max_model_len: prompt and output tokens of a sequence, at most.
        prefill_step_size: prompt tokens per step at most, padding included.
        max_prefill_rows: prompts that may be computed side by side in one step.
        max_decode_stall_ms: bound on a step's time while streams run; 0 or None: no bound.
        max_queue: requests that may wait beyond those that could start at once; a key that has less than its
            share of these places may still queue when others have filled them.
        enable_prefix_cache: share prefixes between requests and keep blocks of finished ones.
        prefix_cache_max_blocks: cap on blocks that only the prefix cache holds, for every layer group or one
            number per group; None: no cap.
        watermark: share of each pool that admission leaves free while others run.
        continuous_batching: False: one request at a time.
        prefill_token_s: seconds that a prompt's token takes, until steps tell; None: unknown.
    """

    max_num_seqs: int = 256
    max_model_len: int = 8192
    prefill_step_size: int = 2048
    max_prefill_rows: int = 8
    max_decode_stall_ms: float | None = None
    max_queue: int = 64
    enable_prefix_cache: bool = True
    prefix_cache_max_blocks: int | tuple[int, ...] | None = None
    watermark: float = 0.01
    continuous_batching: bool = True
    prefill_token_s: float | None = None

    def max_cached(self, num_groups: int) -> tuple[int | None, ...]:
        """Cap on idle cached blocks per layer group."""
        cap = self.prefix_cache_max_blocks
        return cap if isinstance(cap, tuple) else (cap,) * num_groups


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request was not queued; fields as in ``headrace.errors.RequestError``."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class GroupBlocks(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one layer group by state (free are the rest), and bytes of one block in all its layers."""

    name: str
    total: int
    held: int
    cached: int
    block_bytes: int

    @property
    def free(self) -> int:
        return self.total - self.held - self.cached


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges, and counters since the start (``_total``).

    Sequences are counted, not requests; ``blocks_*`` are those of all groups together, ``groups`` each alone.
    ``prefix_queries_total`` and ``prefix_hits_total`` count tokens, at the first admission of each request.
    """

    running: int
    waiting: int
    blocks_total: int
    blocks_held: int
    blocks_cached: int
    steps_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_queries_total: int
    prefix_hits_total: int
    preemptions_total: int
    groups: tuple[GroupBlocks, ...]
