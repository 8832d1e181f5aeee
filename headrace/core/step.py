"""What the scheduler hands to the runner for one step, and what comes back. Plain data, no arrays.

A step is at most one decode forward ``[B, 1]`` and one prefill forward over the ``prefill`` rows, with their
sampling. Steps are launched one ahead of their results: when step k+1 is scheduled, the tokens sampled in
step k may still be on the device. A row that needs such a token has ``token_ids`` empty; the runner
takes the token from the step before.

Token range of one row:

    0 ........ start ........ start + num_tokens
    computed   | this step's  |
               | token_ids    |  (KV of exactly these positions is written)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.params import SamplingParams
from headrace.request import TokenLogprobs


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. (A msgspec struct: hundreds are made per step, at a tenth of the cost.)

    Attributes:
        seq_id: dense integer identity of the sequence in this worker, never reused.
        start: position of the first token computed now; everything before it is in the blocks.
        num_tokens: tokens computed now (1 for decode rows).
        token_ids: those tokens, or empty for a decode row whose token the previous step samples.
        block_tables: per layer group, block ids covering positions 0 … start + num_tokens - 1
            (a sliding group holds the null block, 0, where blocks left the window).
        samples: whether the last position is sampled.
        sample_position: index of the token to be sampled (= start + num_tokens), counter of the random bits.
        seed: of this sequence.
        params: sampling parameters.
        num_prompt_tokens: where output begins (penalties count output tokens, min_tokens).
        history: all tokens known on the host (prompt and output), only when ``params.uses_history`` or there is a
            grammar; a token still on the device is missing at its end and the runner adds it.
        prompt_targets: the prompt tokens at start + 1 … whose logprobs are wanted from this row, in order; at
            most num_tokens, one fewer at the prompt's end; empty when the request did not ask. The step
            result's ``prompt_logprobs`` has one entry for each. Rows that have some are in ``prefill``.
    """

    seq_id: int
    start: int
    num_tokens: int
    token_ids: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    samples: bool
    sample_position: int
    seed: int
    params: SamplingParams
    num_prompt_tokens: int
    history: Sequence[int] = ()
    prompt_targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block (all layers of a group) before the step's forwards: copy-on-write.

    A step's targets are distinct, and no target is a later copy's source; a source may be a later copy's target.
    So copying one by one in order, and reading all sources before writing any target, give the same.
    """

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: copies first, in order, then prefill and decode forwards.

    ``decode`` has the rows of one token that sample, whatever the reason, but not those of ``embed`` requests;
    ``prefill`` has all others. A sequence is in at most one row. Launch every step that is not empty, in order;
    drop empty ones.

    ``recomputes``: the step's only row is of a sequence whose logits were not finite before; it is given this one
    chance alone.
    """

    step_id: int
    decode: tuple[ScheduledRow, ...] = ()
    prefill: tuple[ScheduledRow, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    recomputes: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One sampled token, with its logprobs when the request asked; ``hidden`` as in ``SequenceOutput``."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    hidden: bytes = b""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of the step with the same ``step_id``.

    Attributes:
        sampled: seq_id -> token, for every row with ``samples``.
        failed: seq_id -> one line; the row released nothing (non-finite logits, a fault of its own).
        prompt_logprobs: seq_id -> logprobs of the row's ``prompt_targets``, when it has some.
        duration_s: device time between launch and result, as seen by the host.
        refused: seq_id -> one line; the row's own demands cannot be met, and trying again would not help.
    """

    step_id: int
    sampled: dict[int, SampledToken]
    failed: dict[int, str]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    duration_s: float
    refused: dict[int, str] = field(default_factory=dict)
