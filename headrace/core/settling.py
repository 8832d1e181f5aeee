"""What a step's result means for the sequences that were in it.

A row's result may be void (its sequence started over since), a refusal, a fault (not finite: the sequence is
computed anew by itself, a few times), progress within a prompt, or a token. Nearly every row is the plain case: a
running stream's next token, which asks none of these questions.
"""

from __future__ import annotations

import msgspec

from headrace.core.roster import Roster
from headrace.core.sequence import Sequence
from headrace.core.step import SampledToken, StepResult
from headrace.core.step_draft import LaunchedRow
from headrace.request import FinishReason, SequenceOutput

MAX_FAULTS = 3  # a sequence is recomputed after at most this many steps without finite logits


class Settling:
    """Takes results in.

    Attributes:
        generation_tokens: tokens sampled since the start.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._kv = roster.kv
        self.generation_tokens = 0

    def settle(self, row: LaunchedRow, result: StepResult) -> SequenceOutput | None:
        """What an unfinished sequence says after its row; None: nothing yet."""
        seq = row.seq
        sampled = result.sampled.get(seq.seq_id)
        seq.num_in_flight -= row.samples
        is_plain = seq.is_steady and row.epoch == seq.epoch and row.samples and not seq.group.unforked
        if is_plain and sampled is not None and not (result.failed or result.refused):
            seq.num_confirmed = row.end  # as _confirm; a call for every row of every step would be felt
            if row.end // self._kv.block_size > seq.num_committed:
                self._kv.commit(seq)
            output = seq.take_steady(sampled)
            self.generation_tokens += 1
            if seq.account is not None:
                seq.account.balance -= 1
            if output.finish_reason is not None:
                self._roster.drop(seq)
            return output
        return self._settle_with_care(row, result, sampled)

    def _settle_with_care(
        self, row: LaunchedRow, result: StepResult, sampled: SampledToken | None
    ) -> SequenceOutput | None:
        seq, roster = row.seq, self._roster
        if row.epoch < seq.void_epoch:
            return None
        if seq.seq_id in result.refused:
            return msgspec.structs.replace(self._fail(seq, result.refused[seq.seq_id]), refused=True)
        error = result.failed.get(seq.seq_id)
        if error is not None and not seq.is_isolated and seq.num_faults < MAX_FAULTS:
            roster.isolate(seq)
            return None
        if error is None and row.samples and sampled is None:
            error = "the step returned no token for this sequence"
        if error is not None:
            return self._fail(seq, error)
        if row.epoch == seq.epoch:
            self._confirm(seq, row)
        if seq.prompt_logprobs is not None and seq.seq_id in result.prompt_logprobs:
            seq.take_prompt_logprobs(result.prompt_logprobs[seq.seq_id], row.start)
        if seq.group.unforked:
            roster.ready_siblings(seq)
        if sampled is not None and row.samples:
            return self._take_token(seq, sampled)
        reason = seq.finish_reason() if row.end >= len(seq.token_ids) else None
        if reason is None:
            return None
        roster.drop(seq)
        return seq.output([], [], reason)

    def _confirm(self, seq: Sequence, row: LaunchedRow) -> None:
        """The KV that the row wrote is there; blocks that it filled may be shared."""
        seq.num_confirmed = row.end
        if row.end // self._kv.block_size > seq.num_committed:
            self._kv.commit(seq)

    def _take_token(self, seq: Sequence, sampled: SampledToken) -> SequenceOutput:
        seq.take_token(sampled.token_id)
        self._roster.note_progress(seq)
        self.generation_tokens += not seq.wants_hidden
        if seq.account is not None:
            seq.account.balance -= 1
        reason = seq.finish_reason()
        if reason is not None:
            self._roster.drop(seq)
        return seq.sampled_output(sampled, reason)

    def _fail(self, seq: Sequence, error: str) -> SequenceOutput:
        self._roster.drop(seq)
        return seq.output([], [], FinishReason.ERROR, error)
