"""What runs in each step.

There is no prefill phase and no decode phase: every sequence has ``num_computed`` and ``num_tokens``, and a step
hands out tokens so that the first catches up with the second. Chunked prefill, prefix hits, resumption after
preemption, forks and replay after a worker's death are this one rule. A step has

1. every running sequence that lacks exactly one token (its next one, or the last of its prompt), in order of
   (priority, arrival); who finds no block preempts the last in that order, and itself if it is the last;
2. chunks of prompts, as many as the prefill budget allows side by side;
3. newly admitted sequences, in the waiting queue's order, while seats, blocks and budget last.

A sequence whose logits were not finite is computed anew from its first token, in steps of its own that take turns
with everybody else's; when that fails too, it ends with an error.

Steps are scheduled one ahead of results: a sequence's newest token may still be on the device (``num_in_flight``).
"No room" is a return value here; an exception is a fault. No clock, no arrays: time and results are passed in.
"""

from __future__ import annotations

import bisect
import math

from headrace.core.admission import DrainRate, check_sequences, too_long
from headrace.core.kv_cache_manager import KVCacheManager, PrefixHit
from headrace.core.layout import KVLayout
from headrace.core.prefill_batch import PrefillBatch
from headrace.core.prefill_budget import PrefillBudget
from headrace.core.roster import Roster
from headrace.core.scheduler_types import Rejection, SchedulerConfig, SchedulerStats
from headrace.core.sequence import RequestGroup, Sequence, Status
from headrace.core.settling import Settling
from headrace.core.step import SchedulerOutput, StepResult
from headrace.core.step_draft import Blocked, Draft, LaunchedRow, decode_row, prompt_row
from headrace.request import EngineRequest, SequenceOutput

__all__ = ["Rejection", "Scheduler", "SchedulerConfig", "SchedulerStats"]

MAX_MIXED_PREFILLS = 4  # long prompts under way up to which newcomers get every other prefill step
LOOKUP_AGAIN_STEPS = 16
AWAITED_BLOCKS = 4  # wait for a prefix that is being computed if it saves at least this many blocks


class Scheduler:
    """Owns all sequences of a worker, from ``add_request`` to their last output."""

    def __init__(self, config: SchedulerConfig, layout: KVLayout, num_blocks: tuple[int, ...]) -> None:
        """``num_blocks``: usable blocks per layer group, the null block not counted."""
        self._config = config
        caps = config.max_cached(len(num_blocks))
        self._kv = KVCacheManager(layout, num_blocks, config.enable_prefix_cache, caps)
        pool_tokens = self._kv.max_tokens
        self._max_total = config.max_model_len if pool_tokens is None else min(config.max_model_len, pool_tokens)
        self._watermark = tuple(math.ceil(config.watermark * n) for n in num_blocks)
        self._budget = PrefillBudget(
            config.prefill_step_size, config.max_decode_stall_ms, layout.block_size, config.prefill_token_s
        )
        self._roster = Roster(self._kv)
        self._waiting, self._running = self._roster.waiting, self._roster.running
        self._settling = Settling(self._roster)
        self._launched: dict[int, Draft] = {}
        self._drain = DrainRate()
        self._blocked: Blocked | None = None  # set when blocks, not seats, ended the last admission
        self._newcomers_turn = False
        self._was_alone = False
        self._is_open = True
        self._next_seq_id = self._steps = 0
        self._prompt_tokens = 0
        self._prefix_queries = self._prefix_hits = self._preemptions = 0

    # -- requests ------------------------------------------------------------------------------------------

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output tokens of one sequence at most: the model length, or what the pools hold."""
        return self._max_total

    def add_request(self, request: EngineRequest, now: float) -> Rejection | None:
        """Queue a request, or say why not; None: queued. Sequences in ``request.done`` are not run."""
        rejection = self._rejection(request, now)
        if rejection is not None:
            return rejection
        group = RequestGroup(request)
        for index in range(request.n):
            if index in request.done:
                continue
            seq = Sequence(self._next_seq_id, group, index, self._max_total, self._kv.num_groups)
            self._next_seq_id += 1
            self._roster.add(seq)
        return None

    def _rejection(self, request: EngineRequest, now: float) -> Rejection | None:
        prompt = len(request.prompt_token_ids)
        if not prompt:
            return Rejection(
                400, "invalid_prompt", "The prompt is empty: it must have at least one token.", "prompt"
            )
        if request.id in self._roster.groups:
            return Rejection(
                400, "duplicate_request_id", f"A request with the id {request.id} is running already."
            )
        emitted = max((len(tokens) for tokens in request.emitted.values()), default=0)
        needed = prompt + max(emitted, 1 if request.params.max_tokens else 0)
        if needed > self._max_total:
            return Rejection(
                400,
                "context_length_exceeded",
                too_long(prompt, self._max_total, self._config.max_model_len),
                "prompt",
            )
        places = self._config.max_queue + self._free_seats()
        if self._waiting.num_fresh >= places and self._waiting.has_fair_share(request.key, places):
            waiting = self._waiting.num_fresh
            message = (
                f"The queue is full: {waiting} requests wait, at most {self._config.max_queue} may. Try later."
            )
            return Rejection(429, "queue_full", message, None, self._drain.retry_after_s(waiting, now))
        return None

    def _free_seats(self) -> int:
        """Requests that would start in the next step; waiting for that is no queueing."""
        if self._blocked is not None:
            return 0
        if not self._config.continuous_batching:
            return 0 if self._running else 1
        return max(0, self._config.max_num_seqs - len(self._running))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Drop a request or one of its sequences: no further output, its blocks are free at once."""
        group = self._roster.groups.get(request_id)
        if group is None:
            return
        # Siblings first: dropping the leader before them would promote each in turn.
        for seq in sorted(group.sequences.values(), key=lambda seq: seq is group.leader):
            if index is None or seq.index == index:
                self._roster.drop(seq)

    def has_work(self) -> bool:
        """Whether a sequence is unfinished or a launched step's result is awaited."""
        return bool(self._roster.groups or self._launched)

    def running_ids(self) -> list[str]:
        """Ids of requests with a running sequence, most urgent first."""
        return list(dict.fromkeys(seq.group.request.id for seq in self._running))

    def cached_tokens(self, request_id: str) -> int:
        """Prompt tokens of an admitted request that came from the prefix cache."""
        group = self._roster.groups.get(request_id)
        return 0 if group is None else group.cached_tokens or 0

    def waiting_ids(self) -> list[str]:
        """Ids of requests of which no sequence runs."""
        running = set(self.running_ids())
        return [request_id for request_id in self._roster.groups if request_id not in running]

    # -- one step ------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """Make the next step. At most one launched step's result may be outstanding."""
        if len(self._launched) > 1:
            raise RuntimeError("two steps are outstanding: update() must follow before schedule()")
        draft = Draft(self._steps, PrefillBatch(self._budget, self._config.max_prefill_rows))
        others_turn = self._was_alone and not all(seq.is_isolated for seq in self._running)
        self._was_alone = not others_turn and self._schedule_alone(draft, now)
        if not self._was_alone:
            self._schedule_together(draft, now)
        if others_turn and not draft.launched:
            self._was_alone = self._schedule_alone(draft, now)
        output = SchedulerOutput(
            draft.step_id, tuple(draft.decode), tuple(draft.prefill), tuple(draft.copies), self._was_alone
        )
        if not output.is_empty:
            self._launched[draft.step_id] = draft
            self._steps += 1
        return output

    def _schedule_together(self, draft: Draft, now: float) -> None:
        prefilling = self._schedule_decodes(draft)
        # After a worker's death every stream waits: what they had is computed again at full speed, not in turns.
        draft.batch.open(decode_rows=0 if self._roster.num_replays else len(draft.decode))
        if prefilling and self._newcomers_turn and len(prefilling) < MAX_MIXED_PREFILLS:
            self._admit(draft, now)
            self._continue_prefills(draft, prefilling)
        else:
            if self._newcomers_turn:
                prefilling.sort(key=lambda seq: seq.num_remaining)
            self._continue_prefills(draft, prefilling)
            self._admit(draft, now)
        if draft.prefill:
            self._newcomers_turn = not self._newcomers_turn

    def _schedule_alone(self, draft: Draft, now: float) -> bool:
        """Make the step of an isolated sequence; False: none can be run now."""
        for seq in self._roster.isolated:
            if seq.num_in_flight:
                continue
            draft.batch.open(decode_rows=0)
            if seq.status is Status.RUNNING and seq.num_remaining:
                tokens = self._fit_chunk(draft, seq, draft.batch.room(seq.num_computed, seq.num_remaining))
                if tokens:
                    self._add_row(draft, seq, tokens)
            elif seq is self._waiting.next() and self._has_seat(seq):
                chunk = self._first_chunk(draft, seq, self._kv.no_hit())
                if chunk:
                    self._start(draft, seq, self._kv.no_hit(), chunk, now)
            if draft.launched:
                return True
        return False

    def _schedule_decodes(self, draft: Draft) -> list[Sequence]:
        """Rows of one sampled token; returns the running sequences that need more than that."""
        prefilling: list[Sequence] = []
        running, rows, launched, block_size = self._running, draft.decode, draft.launched, self._kv.block_size
        i = 0
        while i < len(running):  # preemption shortens the list at its end
            seq = running[i]
            i += 1
            if seq.is_isolated:
                continue
            start, num_known = seq.num_computed, len(seq.token_ids)
            num_tokens = num_known + seq.num_in_flight
            if num_tokens - start != 1 or num_tokens >= seq.limit or seq.wants_hidden:
                if num_tokens > start and not seq.num_in_flight:
                    prefilling.append(seq)
                continue  # nothing left to compute, or it ends with the token in flight
            if start >= seq.capacity and not self._make_room(draft, seq, num_tokens):
                continue
            tables = seq.table_tuples
            if tables is None or len(tables[0]) * block_size <= start:
                tables = self._kv.table_tuples(seq, num_tokens)
            rows.append(decode_row(seq, start, tables))
            seq.last_step = draft.step_id
            seq.num_computed = num_tokens
            seq.num_in_flight += 1
            launched.append(LaunchedRow(seq, seq.epoch, start, num_tokens, True))
        return prefilling

    def _make_room(self, draft: Draft, seq: Sequence, end: int) -> bool:
        """Blocks for a decode row, preempting the last in order as needed; False: that was ``seq`` itself."""
        while not self._kv.grow(seq, end):
            victim = self._running[-1]
            if victim is seq and len(self._running) == 1:
                raise RuntimeError(f"a sequence of {end} tokens alone does not fit the pools")
            self._take_blocks(victim)
            draft.preempted = True
            if victim is seq:
                return False
        return True

    def _take_blocks(self, seq: Sequence) -> None:
        self._roster.preempt(seq)
        self._preemptions += 1

    def _continue_prefills(self, draft: Draft, prefilling: list[Sequence]) -> None:
        for seq in prefilling:
            if seq.status is not Status.RUNNING:
                continue  # preempted by one before it
            tokens = draft.batch.room(seq.num_computed, seq.num_remaining)
            tokens = self._fit_chunk(draft, seq, tokens)
            if tokens:
                self._add_row(draft, seq, tokens)

    def _fit_chunk(self, draft: Draft, seq: Sequence, tokens: int) -> int:
        """Cover a chunk with blocks, or as much of it as there is room for; 0: none this time."""
        if not tokens or self._kv.grow(seq, seq.num_computed + tokens):
            return tokens
        while True:
            fitting = min(tokens, self._kv.growable(seq) - seq.num_computed)
            if fitting > 0 and self._kv.grow(seq, seq.num_computed + fitting):
                return fitting
            victim = self._running[-1]
            if victim is seq or victim.last_step == draft.step_id:
                return 0
            self._take_blocks(victim)
            draft.preempted = True

    def _add_row(self, draft: Draft, seq: Sequence, count: int) -> None:
        """Put a sequence's next ``count`` tokens, all known to the host and covered by blocks, into the step."""
        start, num_tokens = seq.num_computed, len(seq.token_ids)
        end = start + count
        samples = end == num_tokens and num_tokens < seq.limit
        row = prompt_row(seq, start, end, self._kv.table_tuples(seq, end), samples)
        if count == 1 and samples and not row.prompt_targets and not seq.wants_hidden:
            draft.decode.append(row)
        else:
            draft.prefill.append(row)
            draft.batch.add(start, count)
        seq.last_step = draft.step_id
        draft.launched.append(LaunchedRow(seq, seq.epoch, start, end, samples))
        seq.num_computed = end
        seq.num_in_flight += samples

    # -- admission -----------------------------------------------------------------------------------------

    def _admit(self, draft: Draft, now: float) -> None:
        blocked, self._blocked = self._blocked, None
        while not draft.preempted and (self._is_open or not self._running):
            seq = self._waiting.next()
            if seq is None or seq.num_in_flight or seq.is_isolated or not self._has_seat(seq):
                return
            if blocked is not None and self._running and self._is_still_blocked(blocked, seq, draft.step_id):
                self._blocked = blocked
                return
            hit = self._fork(draft, seq)
            if hit is None:
                if draft.batch.is_full:
                    return
                hit = self._kv.lookup(seq)
                if self._awaits_prefix(seq, hit):
                    return
            chunk = self._first_chunk(draft, seq, hit)
            if not chunk:
                return
            self._start(draft, seq, hit, chunk, now)

    def _is_still_blocked(self, blocked: Blocked, seq: Sequence, step_id: int) -> bool:
        """Spares a blocked sequence's lookup at every step; others may compute its prefix, so not for ever."""
        is_recent = blocked.seq_id == seq.seq_id and step_id - blocked.step_id < LOOKUP_AGAIN_STEPS
        return is_recent and not self._kv.are_available(blocked.needed)

    def _has_seat(self, seq: Sequence) -> bool:
        if not self._config.continuous_batching and self._running and self._running[0].group is not seq.group:
            return False
        return len(self._running) < self._config.max_num_seqs

    def _fork(self, draft: Draft, seq: Sequence) -> PrefixHit | None:
        """The prompt as a running sibling has computed it, all but the last token."""
        if seq not in seq.group.unforked:
            return None
        for sibling in seq.group.sequences.values():
            # One that is admitted in this very step has nothing that could be copied yet.
            if sibling.status is Status.RUNNING and sibling.start_step != draft.step_id:
                hit = self._kv.fork_hit(sibling, seq.num_prompt_tokens - 1)
                if hit is not None:
                    return hit
        return None

    def _awaits_prefix(self, seq: Sequence, hit: PrefixHit) -> bool:
        """Whether a running sequence is about to compute blocks that this one could share."""
        size = self._kv.block_size
        last = hit.num_tokens // size + AWAITED_BLOCKS - 1
        end = (last + 1) * size
        if not self._config.enable_prefix_cache or end > seq.reuse_limit:
            return False
        digest = seq.hashes(last + 1, size)[last]
        return any(
            other.num_confirmed < end <= len(other.token_ids) and other.hashes(last + 1, size)[last] == digest
            for other in self._running
        )

    def _first_chunk(self, draft: Draft, seq: Sequence, hit: PrefixHit) -> int:
        """Tokens to compute at once if the sequence is admitted now; 0: it is not."""
        remaining = len(seq.token_ids) - hit.num_tokens
        is_decode_row = remaining == 1 and len(seq.token_ids) < seq.limit and not seq.wants_hidden
        chunk = 1 if is_decode_row else draft.batch.room(hit.num_tokens, remaining)
        if not chunk:
            return 0
        if self._running:
            siblings = min(len(seq.group.unforked), self._config.max_num_seqs - 1)
            spare = tuple(blocks + siblings for blocks in self._watermark)
            needed = tuple(map(sum, zip(self._kv.blocks_to_start(seq, hit, chunk), spare, strict=True)))
            if self._kv.are_available(needed):
                return chunk
            self._blocked = Blocked(seq.seq_id, draft.step_id, needed)
            return 0
        # Alone it always fits, if need be with a smaller first chunk (sliding groups).
        sizes = (chunk, min(chunk, self._kv.block_size), 1)
        return next((n for n in sizes if self._kv.are_available(self._kv.blocks_to_start(seq, hit, n))), 0)

    def _start(self, draft: Draft, seq: Sequence, hit: PrefixHit, chunk: int, now: float) -> None:
        self._waiting.admit(seq)
        draft.copies.extend(self._kv.start(seq, hit, chunk))
        group = seq.group
        if seq in group.unforked:
            group.unforked.remove(seq)
        if group.cached_tokens is None:
            group.cached_tokens = min(hit.num_tokens, seq.num_prompt_tokens)
            self._drain.note_admission(now)
            self._prompt_tokens += seq.num_prompt_tokens
            if self._config.enable_prefix_cache:
                self._prefix_queries += len(seq.token_ids)
                self._prefix_hits += hit.num_tokens
        seq.status = Status.RUNNING
        seq.start_step = draft.step_id
        bisect.insort(self._running, seq, key=lambda running: running.order)
        self._add_row(draft, seq, chunk)

    # -- results -------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now: float) -> list[SequenceOutput]:
        """Take in the result of a launched step; returns what its sequences say, in the step's order."""
        if result.step_id not in self._launched:
            raise ValueError(f"no step {result.step_id} is outstanding")
        draft = self._launched.pop(result.step_id)
        cost, batch = self._budget.cost, draft.batch
        cost.observe(len(draft.decode), batch.area, batch.mean_context, result.duration_s)
        return [
            output
            for row in draft.launched
            if row.seq.status is not Status.FINISHED and (output := self._settling.settle(row, result)) is not None
        ]

    # -- memory pressure -----------------------------------------------------------------------------------

    @property
    def pool_sizes(self) -> tuple[int, ...]:
        """Usable blocks per layer group, now."""
        return tuple(pool.num_blocks for pool in self._kv.pools)

    def smallest_pools(self) -> tuple[int, ...]:
        """Per layer group, blocks that ``resize_pools`` must leave."""
        return self._kv.smallest_sizes(self._max_total)

    def resize_pools(self, num_blocks: tuple[int, ...]) -> tuple[dict[int, int], ...]:
        """Have pools of these sizes. Returns, per group, blocks to be copied (old id -> new id) before any step.

        No launched step may be outstanding: its tables would be of the old pools.
        """
        if self._launched:
            raise RuntimeError("pools cannot be resized while a step is outstanding")
        self._watermark, self._blocked = tuple(math.ceil(self._config.watermark * n) for n in num_blocks), None
        return self._kv.resize(num_blocks, self._running)

    def set_admission(self, is_open: bool) -> None:
        """Whether sequences may start while others run; with nothing running they always may."""
        self._is_open = is_open

    def preempt_last(self) -> bool:
        """Take the blocks of the last in order of (priority, arrival), if it is not the only one that runs."""
        if len(self._running) < 2:
            return False
        self._take_blocks(self._running[-1])
        return True

    # -- state ---------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        pools = self._kv.pools
        return SchedulerStats(
            running=len(self._running),
            waiting=self._roster.num_sequences - len(self._running),
            blocks_total=sum(pool.num_blocks for pool in pools),
            blocks_held=sum(pool.num_held for pool in pools),
            blocks_cached=sum(pool.num_cached for pool in pools),
            steps_total=self._steps,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._settling.generation_tokens,
            prefix_queries_total=self._prefix_queries,
            prefix_hits_total=self._prefix_hits,
            preemptions_total=self._preemptions,
            groups=self._kv.group_blocks(),
        )

    def clear_prefix_cache(self) -> None:
        """Forget all cached blocks that no sequence holds."""
        self._kv.clear_cached()

    def check_integrity(self) -> None:
        """Raise RuntimeError on any violated equation. For tests and idle moments: walks everything."""
        self._kv.check_integrity(self._running)
        sequences = [seq for group in self._roster.groups.values() for seq in group.sequences.values()]
        check_sequences(sequences, self._roster.num_sequences, self._running, self._waiting)
        if len(self._running) > self._config.max_num_seqs:
            raise RuntimeError(f"{len(self._running)} sequences run, at most {self._config.max_num_seqs} may")
