"""A step in the making: its rows, what is needed to understand their results, and who found no room."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from headrace.core.prefill_batch import PrefillBatch
from headrace.core.sequence import Sequence
from headrace.core.step import BlockCopy, ScheduledRow


class LaunchedRow(msgspec.Struct, frozen=True, gc=False):
    """What is needed to understand a row's result. (A struct for the same reason as ``ScheduledRow``.)"""

    seq: Sequence
    epoch: int
    start: int
    end: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Blocked:
    """The sequence for which there was no room, and how many blocks per group it would take."""

    seq_id: int
    step_id: int
    needed: tuple[int, ...]


@dataclass(slots=True)
class Draft:
    """A step in the making; kept until its result arrives."""

    step_id: int
    batch: PrefillBatch
    decode: list[ScheduledRow] = field(default_factory=list)
    prefill: list[ScheduledRow] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    launched: list[LaunchedRow] = field(default_factory=list)
    preempted: bool = False


Tables = tuple[tuple[int, ...], ...]


def decode_row(seq: Sequence, start: int, tables: Tables) -> ScheduledRow:
    """The row of a sequence that lacks one token, which the host may not know yet."""
    return ScheduledRow(
        seq.seq_id,
        start,
        1,
        (seq.token_ids[start],) if start < len(seq.token_ids) else (),
        tables,
        True,
        start + 1,
        seq.seed,
        seq.params,
        seq.num_prompt_tokens,
        () if seq.history is None else seq.history[:],
    )


def prompt_row(seq: Sequence, start: int, end: int, tables: Tables, samples: bool) -> ScheduledRow:
    """The row of the tokens from ``start`` to before ``end``, all known to the host."""
    targets: tuple[int, ...] = ()
    if seq.wants_prompt_logprobs:
        targets = tuple(seq.token_ids[start + 1 : min(end + 1, seq.num_prompt_tokens)])
    return ScheduledRow(
        seq_id=seq.seq_id,
        start=start,
        num_tokens=end - start,
        token_ids=tuple(seq.token_ids[start:end]),
        block_tables=tables,
        samples=samples,
        sample_position=end,
        seed=seq.seed,
        params=seq.params,
        num_prompt_tokens=seq.num_prompt_tokens,
        history=() if seq.history is None or not samples else seq.history[:],
        prompt_targets=targets,
    )
