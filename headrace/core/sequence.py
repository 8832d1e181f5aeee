"""A sequence: one output of a request, from the first prompt token to the last sampled one.

    0 ............ confirmed ......... computed ........ known ........ num_tokens
    | KV written   | KV written by    | to be computed  | sampled, but  |
    | by finished  | launched steps   |                 | still on the  |
    | steps        |                  |                 | device        |

There is no prefill phase and no decode phase: ``num_computed`` catches up with ``num_tokens``. Both may count what
the host has not seen yet, because a step is scheduled before the result of the one before it is known.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Ordered
from enum import Enum

from headrace.core.account import Account
from headrace.core.prefix_index import block_digest, root_digest
from headrace.core.step import SampledToken
from headrace.params import SamplingParams, sequence_seed
from headrace.request import EngineRequest, FinishReason, SequenceOutput, TokenLogprobs


class Status(Enum):
    UNFORKED = "waits for its request's first sequence to compute the prompt"
    WAITING = "waits for admission"
    RUNNING = "admitted; holds blocks"
    FINISHED = "gone; results that still arrive for it are ignored"


class RequestGroup:
    """The sequences of one request that are not finished, by index, and which of them computes the prompt."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.sequences: dict[int, Sequence] = {}
        self.leader: Sequence | None = None
        self.unforked: list[Sequence] = []
        self.cached_tokens: int | None = None  # of the leader's first admission; None: not admitted yet


class Sequence:
    """Mutable state of one sequence; owned by the scheduler, its tables by the KV cache manager.

    Attributes:
        order: (priority, arrival): smaller is served first and preempted last.
        token_ids: prompt and output tokens known to the host.
        num_in_flight: tokens sampled by launched steps whose results have not arrived.
        epoch: counts preemptions; results of steps launched before the last one no longer confirm KV.
        void_epoch: results of rows launched in epochs below this one are worth nothing.
        num_faults: how often this sequence's logits were not finite.
        is_isolated: it computes everything anew, in steps of its own, until it has sampled a token.
        is_steady: it has sampled a token, and was not isolated since: its next one is nothing but a token.
        limit: prompt and output tokens at most.
        tables: per layer group, block ids of its positions in order.
        trimmed: per layer group, leading blocks that left the window (null in the table).
        capacity: positions that every table covers.
        last_step, start_step: the step it was last scheduled in; the step it was last admitted in.
        num_committed: leading full blocks that were offered to the prefix index.
        wants_hidden: a hidden state is wanted, not tokens; its last row is never a decode row.
        prompt_logprobs: collected so far, entry i of prompt token i; None: not asked, or delivered.
    """

    __slots__ = (
        "account",
        "block_hashes",
        "capacity",
        "epoch",
        "group",
        "history",
        "index",
        "is_announced",
        "is_isolated",
        "is_replay",
        "is_steady",
        "last_step",
        "limit",
        "num_committed",
        "num_computed",
        "num_confirmed",
        "num_faults",
        "num_in_flight",
        "num_prompt_tokens",
        "order",
        "params",
        "prompt_logprobs",
        "seed",
        "seq_id",
        "start_step",
        "status",
        "stop_token_ids",
        "table_tuples",
        "tables",
        "token_ids",
        "trimmed",
        "uses_history",
        "void_epoch",
        "wants_hidden",
    )

    def __init__(self, seq_id: int, group: RequestGroup, index: int, max_total: int, num_groups: int) -> None:
        request = group.request
        emitted = request.emitted.get(index, [])
        self.seq_id = seq_id
        self.group = group
        self.index = index
        self.order = (request.priority, seq_id)
        self.params: SamplingParams = request.params
        self.seed = sequence_seed(request.params.seed, index)
        self.uses_history = request.params.uses_history or request.params.grammar is not None
        self.wants_hidden = request.params.embed
        self.stop_token_ids = frozenset(request.params.stop_token_ids)
        self.token_ids: list[int] = [*request.prompt_token_ids, *emitted]
        # The same as integers in a row: a copy for each step's row is one memcpy.
        self.history = array("i", self.token_ids) if self.uses_history else None
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.limit = min(self.num_prompt_tokens + request.params.max_tokens, max_total)
        if emitted and emitted[-1] in self.stop_token_ids:
            self.limit = len(self.token_ids)  # ended already; only the finish was lost
        self.status = Status.WAITING
        self.account: Account | None = None
        self.num_in_flight = 0
        self.num_computed = 0
        self.num_confirmed = 0
        self.epoch = self.void_epoch = 0
        self.num_faults = 0
        self.is_isolated = False
        self.is_steady = False
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.table_tuples: tuple[tuple[int, ...], ...] | None = None
        self.trimmed = [0] * num_groups
        self.capacity = 0
        self.last_step = self.start_step = -1
        self.num_committed = 0
        self.block_hashes: list[bytes] = []
        self.is_replay = bool(emitted)  # until it has sampled a token here
        self.is_announced = bool(emitted)  # whether a first output was made (cached tokens, prompt logprobs)
        wants_prompt = request.params.prompt_logprobs is not None and not emitted
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants_prompt else None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is not computed yet, nor about to be."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed

    @property
    def reuse_limit(self) -> int:
        """Leading tokens that may come from the prefix cache: logits, and asked-for logprobs, must be computed."""
        known = len(self.token_ids) - 1
        return known if self.prompt_logprobs is None else min(known, len(self.prompt_logprobs) - 1)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def hashes(self, count: int, block_size: int) -> list[bytes]:
        """Digests of at least the first ``count`` full blocks, which must be known to the host."""
        hashes = self.block_hashes
        parent = hashes[-1] if hashes else root_digest(self.group.request.cache_salt)
        for i in range(len(hashes), count):
            parent = block_digest(parent, self.token_ids[i * block_size : (i + 1) * block_size])
            hashes.append(parent)
        return hashes

    def parent_hash(self, block: int, block_size: int) -> bytes:
        """Digest of everything before the ``block``-th block."""
        if block == 0:
            return root_digest(self.group.request.cache_salt)
        return self.hashes(block, block_size)[block - 1]

    def take_token(self, token_id: int) -> None:
        """Append a sampled token."""
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)

    def take_prompt_logprobs(self, entries: Ordered[TokenLogprobs], start: int) -> None:
        """Collect logprobs of prompt tokens start + 1 …; what is known already (recomputation) is skipped."""
        if self.prompt_logprobs is None or start + 1 > len(self.prompt_logprobs):
            return
        known = len(self.prompt_logprobs) - (start + 1)
        self.prompt_logprobs.extend(entries[max(0, known) :])

    def finish_reason(self) -> FinishReason | None:
        """Why the tokens known so far are the last ones, if they are."""
        token_ids = self.token_ids
        count = len(token_ids)
        if token_ids[-1] in self.stop_token_ids and count > self.num_prompt_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.limit else None

    def sampled_output(self, sampled: SampledToken, finish_reason: FinishReason | None) -> SequenceOutput:
        """The output of a sampled token; of a hidden state, where that is wanted, and no token then."""
        logprobs = [] if sampled.logprobs is None else [sampled.logprobs]
        token_ids = [] if self.wants_hidden else [sampled.token_id]
        self.is_steady = not self.wants_hidden  # from here on: what is said once is said with this one
        return self.output(token_ids, logprobs, finish_reason, hidden=sampled.hidden)

    def take_steady(self, sampled: SampledToken) -> SequenceOutput:
        """``take_token`` and its output in one, for a sequence that is steady."""
        token_id, token_ids, reason = sampled.token_id, self.token_ids, None
        token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)
        if token_id in self.stop_token_ids:
            reason = FinishReason.STOP
        elif len(token_ids) >= self.limit:
            reason = FinishReason.LENGTH
        return SequenceOutput(
            request_id=self.group.request.id,
            index=self.index,
            token_ids=[token_id],
            logprobs=[] if sampled.logprobs is None else [sampled.logprobs],
            finish_reason=reason,
        )

    def output(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
        finish_reason: FinishReason | None,
        error: str = "",
        hidden: bytes = b"",
    ) -> SequenceOutput:
        """Make an output; the first one carries what is said once."""
        cached_tokens, prompt_logprobs = 0, None
        if not self.is_announced:
            self.is_announced = True
            cached_tokens = self.group.cached_tokens or 0
            if finish_reason is not FinishReason.ERROR:
                prompt_logprobs = self.prompt_logprobs
            self.prompt_logprobs = None
        return SequenceOutput(
            request_id=self.group.request.id,
            index=self.index,
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=finish_reason,
            cached_tokens=cached_tokens,
            prompt_logprobs=prompt_logprobs,
            error=error,
            hidden=hidden,
        )
