"""A runner without arrays, and a loop around the scheduler that launches one step ahead, as the worker does.

The KV of a position is a link of a hash chain over the tokens so far, stored under (group, block, offset). A row
reads all that its windows see through its block tables; an entry that is missing, of another position, or not
the continuation of the one before it is an error at once. The next token is a function of the chain's end, so
that KV of a foreign prefix gives other output than ``expected_tokens``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.scheduler import Rejection, Scheduler, SchedulerConfig
from headrace.core.step import SampledToken, ScheduledRow, SchedulerOutput, StepResult
from headrace.params import SamplingParams, sequence_seed
from headrace.request import EngineRequest, FinishReason, SequenceOutput, TokenLogprobs

VOCABULARY = 23
STOP = 5


def link(previous: int, token: int) -> int:
    return zlib.crc32(b"%d,%d" % (previous, token))


def next_token(state: int, seed: int, position: int) -> int:
    return zlib.crc32(b"%d/%d/%d" % (state, seed, position)) % VOCABULARY


def chain(tokens: list[int]) -> int:
    state = 0
    for token in tokens:
        state = link(state, token)
    return state


def expected_tokens(request: EngineRequest, index: int, limit: int) -> tuple[list[int], FinishReason]:
    """What a sequence gives that nobody disturbs."""
    tokens = list(request.prompt_token_ids)
    seed = sequence_seed(request.params.seed, index)
    limit = min(limit, len(tokens) + request.params.max_tokens)
    while len(tokens) < limit:
        tokens.append(next_token(chain(tokens), seed, len(tokens)))
        if tokens[-1] in request.params.stop_token_ids:
            return tokens[len(request.prompt_token_ids) :], FinishReason.STOP
    return tokens[len(request.prompt_token_ids) :], FinishReason.LENGTH


def layout(block_size: int, *windows: int | None) -> KVLayout:
    return KVLayout(block_size, tuple(LayerGroup(f"g{i}", 1, 8, window) for i, window in enumerate(windows)))


def request(
    request_id: str,
    prompt: list[int],
    max_tokens: int = 8,
    *,
    n: int = 1,
    stop: bool = False,
    seed: int = 0,
    prompt_logprobs: int | None = None,
    **fields: object,
) -> EngineRequest:
    params = SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=(STOP,) if stop else (),
        prompt_logprobs=prompt_logprobs,
    )
    return EngineRequest(id=request_id, prompt_token_ids=prompt, params=params, n=n, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Entry:
    position: int
    before: int
    state: int
    is_poisoned: bool  # written by a row that failed


class FakeRunner:
    """Executes scheduler outputs in launch order."""

    def __init__(self, kv_layout: KVLayout, num_blocks: tuple[int, ...]) -> None:
        self.layout = kv_layout
        self.num_blocks = num_blocks
        self.kv: dict[tuple[int, int, int], Entry] = {}
        self.last_sampled: dict[int, SampledToken] = {}
        self.fail: Callable[[ScheduledRow], bool] = lambda row: False
        self.cost_s: Callable[[SchedulerOutput], float] = lambda output: 0.001
        self.failed: set[int] = set()
        self.computed_tokens = 0

    def run(self, output: SchedulerOutput) -> StepResult:
        for copy in output.copies:
            for offset in range(self.layout.block_size):
                entry = self.kv.get((copy.group, copy.source, offset))
                if entry is not None:
                    self.kv[copy.group, copy.target, offset] = entry
        sampled: dict[int, SampledToken] = {}
        failed: dict[int, str] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        written: set[tuple[int, int, int]] = set()
        if output.recomputes:
            (alone,) = (*output.decode, *output.prefill)
            if alone.start == 0:
                self.failed.discard(alone.seq_id)
        for row in (*output.decode, *output.prefill):
            self.run_row(row, sampled, failed, logprobs, written)
        self.last_sampled = sampled
        return StepResult(output.step_id, sampled, failed, logprobs, self.cost_s(output))

    def resize(self, num_blocks: tuple[int, ...], moves: tuple[dict[int, int], ...]) -> None:
        """Blocks move; what lies beyond the new end is gone."""
        kept = {}
        for (group, block, offset), entry in self.kv.items():
            new = moves[group].get(block, block)
            if new <= num_blocks[group] and (block in moves[group] or block not in moves[group].values()):
                kept[group, new, offset] = entry
        self.kv, self.num_blocks = kept, num_blocks

    def run_row(
        self,
        row: ScheduledRow,
        sampled: dict[int, SampledToken],
        failed: dict[int, str],
        logprobs: dict[int, list[TokenLogprobs]],
        written: set[tuple[int, int, int]],
    ) -> None:
        # What a failed sequence does in steps launched before that was known fails too.
        fails = self.fail(row) or row.seq_id in self.failed
        tokens = list(row.token_ids)
        if not tokens:
            assert row.num_tokens == 1
            previous = self.last_sampled.get(row.seq_id)
            fails = fails or previous is None
            tokens = [previous.token_id if previous else 0]
        assert len(tokens) == row.num_tokens > 0
        state = self.read_context(row)
        self.computed_tokens += row.num_tokens
        states = []
        for position, token in enumerate(tokens, row.start):
            before, state = state, link(state, token)
            states.append(state)
            self.write(row, position, Entry(position, before, state, fails), written)
        if fails:
            self.failed.add(row.seq_id)
            failed[row.seq_id] = "non-finite logits"
            return
        if row.prompt_targets:
            values = zip(states, row.prompt_targets, strict=False)
            logprobs[row.seq_id] = [TokenLogprobs(float(link(s, t)), []) for s, t in values]
        if row.samples:
            assert row.sample_position == row.start + row.num_tokens
            sampled[row.seq_id] = SampledToken(next_token(state, row.seed, row.sample_position))

    def read_context(self, row: ScheduledRow) -> int:
        """Check everything the row's windows see; the chain's state before its first token."""
        found: set[int] = set()
        for g, group in enumerate(self.layout.groups):
            first = 0 if group.window is None else max(0, row.start - group.window + 1)
            before: int | None = 0 if first == 0 else None
            for position in range(first, row.start):
                entry = self.kv.get((g, *self.slot(row, g, position)))
                where = f"sequence {row.seq_id}, group {g}, position {position}"
                assert entry is not None, f"missing KV: {where}"
                assert entry.position == position, f"KV of position {entry.position}: {where}"
                assert before is None or entry.before == before, f"foreign KV: {where}"
                assert not entry.is_poisoned or row.seq_id in self.failed, f"KV of a failed row: {where}"
                before = entry.state
            if before is not None:
                found.add(before)
        assert len(found) == 1, f"groups disagree for sequence {row.seq_id}"
        return found.pop()

    def write(self, row: ScheduledRow, position: int, entry: Entry, written: set[tuple[int, int, int]]) -> None:
        for g in range(len(self.layout.groups)):
            slot = (g, *self.slot(row, g, position))
            assert slot not in written, "two rows write one slot"
            written.add(slot)
            self.kv[slot] = entry

    def slot(self, row: ScheduledRow, group: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.layout.block_size)
        block = row.block_tables[group][index]
        assert 0 < block <= self.num_blocks[group], f"no block at position {position}"
        return block, offset


@dataclass
class Received:
    """What a client got of one sequence."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    first: SequenceOutput | None = None
    error: str = ""


class Engine:
    """Scheduler and fake runner, one step ahead (or not); checks every step and every output's form."""

    def __init__(
        self, config: SchedulerConfig, kv_layout: KVLayout, num_blocks: tuple[int, ...], is_ahead: bool = True
    ) -> None:
        self.config = config
        self.is_ahead = is_ahead
        self.layout = kv_layout
        self.planned = num_blocks
        self.scheduler = Scheduler(config, kv_layout, num_blocks)
        self.runner = FakeRunner(kv_layout, num_blocks)
        self.pending: StepResult | None = None
        self.requests: dict[str, EngineRequest] = {}
        self.received: dict[tuple[str, int], Received] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.steps: list[SchedulerOutput] = []
        self.now = 0.0

    def add(self, new: EngineRequest) -> Rejection | None:
        rejection = self.scheduler.add_request(new, self.now)
        if rejection is None:
            self.requests[new.id] = new
            for index in range(new.n):
                if index not in new.done:
                    self.received[new.id, index] = Received(list(new.emitted.get(index, [])))
        return rejection

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.scheduler.abort(request_id, index)
        for key, got in self.received.items():
            if key[0] == request_id and index in (None, key[1]) and got.finish is None:
                self.aborted.add(key)
        self.scheduler.check_integrity()

    def settle(self) -> None:
        """Take in the outstanding result."""
        if self.pending is not None:
            for sequence_output in self.scheduler.update(self.pending, self.now):
                self.receive(sequence_output)
            self.scheduler.check_integrity()
            self.pending = None

    def resize(self, shares: float) -> None:
        """Pools of this share between the smallest that is allowed and the planned ones."""
        self.settle()
        smallest = self.scheduler.smallest_pools()
        most = [max(pair) for pair in zip(self.planned, smallest, strict=True)]
        sizes = tuple(low + int((high - low) * shares) for low, high in zip(smallest, most, strict=True))
        self.runner.resize(sizes, self.scheduler.resize_pools(sizes))
        self.scheduler.check_integrity()

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self.check_step(output)
        result = None if output.is_empty else self.runner.run(output)
        if output.is_empty:
            assert self.pending is not None or not self.scheduler.has_work(), "nothing runs although there is work"
            assert not output.copies
        else:
            self.steps.append(output)
        if not self.is_ahead:
            self.pending, result = result, None
        if self.pending is not None:
            self.now += self.pending.duration_s
            for sequence_output in self.scheduler.update(self.pending, self.now):
                self.receive(sequence_output)
            self.scheduler.check_integrity()
        self.pending = result
        return output

    def check_step(self, output: SchedulerOutput) -> None:
        rows = (*output.decode, *output.prefill)
        assert len({row.seq_id for row in rows}) == len(rows)
        assert all(row.num_tokens == 1 and row.samples and not row.prompt_targets for row in output.decode)
        assert len(output.prefill) <= self.config.max_prefill_rows
        longest = max((row.num_tokens for row in output.prefill), default=0)
        assert len(output.prefill) * longest <= self.config.prefill_step_size
        targets = [(copy.group, copy.target) for copy in output.copies]
        assert len(set(targets)) == len(targets)
        for i, copy in enumerate(output.copies):
            assert (copy.group, copy.source) not in targets[: i + 1]
        for row in rows:
            wanted = -(-(row.start + row.num_tokens) // self.layout.block_size)
            assert all(len(table) == wanted for table in row.block_tables)

    def receive(self, output: SequenceOutput) -> None:
        key = output.request_id, output.index
        got = self.received[key]
        assert key not in self.aborted, "output after an abort"
        assert got.finish is None, "output after the end"
        assert output.token_ids or output.finish_reason
        if got.first is None:
            got.first = output
        else:
            assert output.cached_tokens == 0 and output.prompt_logprobs is None
        got.tokens.extend(output.token_ids)
        got.finish = output.finish_reason
        got.error = output.error

    def run(self, at_most: int = 100_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(at_most):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), f"not done after {at_most} steps"
        assert self.scheduler.stats().blocks_held == 0

    def check_outputs(self) -> None:
        """Every sequence that was not aborted gave what it gives undisturbed."""
        for (request_id, index), got in self.received.items():
            original = self.requests[request_id]
            tokens, finish = expected_tokens(original, index, self.scheduler.max_sequence_tokens)
            if (request_id, index) in self.aborted:
                assert got.tokens == tokens[: len(got.tokens)]
            elif got.finish is not FinishReason.ERROR:
                assert (got.tokens, got.finish) == (tokens, finish), f"{request_id}/{index}"
            if got.first is not None and got.first.prompt_logprobs is not None:
                self.check_prompt_logprobs(original, got.first)

    def check_prompt_logprobs(self, original: EngineRequest, first: SequenceOutput) -> None:
        prompt = original.prompt_token_ids
        assert original.params.prompt_logprobs is not None and first.prompt_logprobs is not None
        values = [None if entry is None else entry.logprob for entry in first.prompt_logprobs]
        assert values == [None, *(float(link(chain(prompt[:i]), prompt[i])) for i in range(1, len(prompt)))]
