"""The model runner: executes scheduler outputs on the device, one step ahead of the host.

``launch`` builds the lazy graph of a step: block copies, the prefill forwards, the decode forward, sampling. A
decode row whose token was sampled by step k takes it from step k's array of tokens, on the device. When the graph
of step k+1 is started depends on how pools are written (``kv/pool.py``):

    in place     at once: it queues behind step k, and the device goes from one to the other without the host
    functional   when step k's tokens have been read, because MLX updates a pool in place only while nothing else
                 refers to it. For the same reason a step of several forwards is started forward by forward; the
                 last one when the step's result is asked for

Rows with a grammar are the exception: their masks need step k's tokens on the host. The sampling of such a step is
built when step k has been read and step k+1's forwards (functional: the first one) have been started, so the masks
are made while the device computes. All rows of the step then wait for that sampling, none for another forward.

The runner never sees a queue, and keeps nothing about a sequence that it could not rebuild from the next row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.core.layout import KVLayout
from headrace.core.step import SampledToken, ScheduledRow, SchedulerOutput, StepResult
from headrace.request import TokenLogprobs
from headrace.runner.attention.materialized import MaterializedView
from headrace.runner.attention.slices import bundle_limits
from headrace.runner.forwards.logits_head import HeadSelector
from headrace.runner.forwards.split import ForwardLimit
from headrace.runner.forwards.step_graphs import STEPS_TO_SETTLE, StepGraphs
from headrace.runner.forwards.token_feed import Newest, TokenFeed, fed_tokens, feed_of
from headrace.runner.forwards.traced import PROMPTS_TO_TRACE, TracedForwards
from headrace.runner.kv.input_batch import (
    HostInts,
    InputBatchBuilder,
    bucket,
    coarse_bucket,
    prefill_length,
    token_array,
)
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.view import ForwardBatch, LayerView, on_device
from headrace.runner.sampling.batch import build_sampling_batch
from headrace.runner.sampling.grammar_masks import GrammarMasks, StepMasks
from headrace.runner.sampling.kernel import SamplingKernel
from headrace.runner.sampling.sampler import CANDIDATES, Sampled, sample, token_logprobs

# Padding several prompts to one length pays while the padded work stays below this share over the real one.
PAD_WASTE = 1.2
# Prompt logprobs need logits of every position; this many at a time bounds their memory.
PROMPT_LOGPROBS_TOKENS = 128
LOWEST_LOGPROB = -9999.0

# Chosen logprobs [N], ids and logprobs of the most likely tokens [N, k].
LogprobArrays = tuple[mx.array, mx.array | None, mx.array | None]


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How forwards are executed on this device.

    Attributes:
        compile: trace forwards once per bucket of shapes (needs a gathering attention; ``forwards/traced.py``).
        trace_prompts: with ``compile``, prompts' forwards as well where nothing is before them.
        materialize: the model computes attention itself; give it arrays instead of handles.
        single_rows: the model's code does not take masks of several rows; one sequence per forward.
        max_prefill_rows: prompts in one prefill forward, at most.
        decode_kernel: decode attention is a kernel (on the CPU all attention is a native operation) that reads no
            more of a block table than a row has.
        limit: with ``materialize``, what one forward may hold; larger ones are split. None: no bound.
    """

    compile: bool
    trace_prompts: bool = False
    materialize: bool = False
    single_rows: bool = False
    max_prefill_rows: int = 8
    decode_kernel: bool = False
    limit: ForwardLimit | None = None


# Gives the tokens that rows of a step were fed; what is not asked for is not made.
Fed = Callable[[], mx.array]


@dataclass(frozen=True, slots=True)
class _Unsampled:
    """What a step's sampling is made of, while it waits for masks: logits and fed tokens, in parts."""

    logits: list[mx.array]
    inputs: list[Fed]


@dataclass(slots=True)
class StepHandle:
    """A launched step. ``result()`` waits for it and starts the step launched after it.

    ``earlier``, ``last``: per forward, arrays that are there when it is over and its KV is written; ``earlier`` is
    empty once the last forward has been started.
    ``unsampled``: set until the step starts, where rows have grammars. ``refused``: rows whose grammars fail.
    ``hidden``: seq_id -> float32 hidden states of a forward ``[P, D]`` and the sequence's row in them.
    """

    runner: ModelRunner
    output: SchedulerOutput
    rows: list[ScheduledRow]
    sampled: Sampled | None
    prompt_logprobs: dict[int, list[LogprobArrays]]
    earlier: list[list[mx.array]]
    last: list[mx.array]
    started_at: float = 0.0
    unsampled: _Unsampled | None = None
    refused: dict[int, str] = field(default_factory=dict)
    hidden: dict[int, tuple[mx.array, int]] = field(default_factory=dict)

    def result(self) -> StepResult:
        return self.runner.finish(self)


class ModelRunner:
    """Owns the model, its KV pools and the tokens of the newest step.

    Args:
        model: an evaluated mlx-lm model whose head is a ``SelectiveHead`` (see ``forwards/logits_head.py``).
        selector: which positions that head computes logits for.
        pool: the KV pools.
        layout: layer groups and block size, as the scheduler sees them.
        vocab_size: width of the logits.
        options: see ``RunnerOptions``.
        grammars: makes masks for rows with a grammar; None: there are no such rows.
        graphs: recordings of the decode forward, where it is compiled and writes in place; None: no recordings.
        sampling: kernels that choose tokens; None: MLX's operations do.
    """

    def __init__(
        self,
        model: nn.Module,
        selector: HeadSelector,
        pool: KVPool,
        layout: KVLayout,
        vocab_size: int,
        options: RunnerOptions,
        grammars: GrammarMasks | None = None,
        graphs: StepGraphs | None = None,
        sampling: SamplingKernel | None = None,
    ) -> None:
        self._model = model
        self._grammars = grammars
        self._sampling = sampling
        self._selector = selector
        self._pool = pool
        self._vocab_size = vocab_size
        self._options = options
        self._view = MaterializedView if options.materialize else LayerView
        slices = pool.head_major and (options.materialize or not options.decode_kernel)
        self._inputs = InputBatchBuilder(
            layout,
            slices=slices,
            bundles=bundle_limits(pool) if slices and not options.materialize else None,
            coarse_decode=options.decode_kernel,
        )
        self._running: StepHandle | None = None
        self._pending: StepHandle | None = None
        self._finished_at = 0.0
        self._newest: Newest | None = None
        self._forwards: list[list[mx.array]] = []  # of the step being built, what each one gives
        self._hidden: dict[int, tuple[mx.array, int]] = {}  # likewise, see ``StepHandle``
        windows = [group.window for group in layout.groups]
        self._traced = TracedForwards(self._forward, selector, pool, windows) if options.compile else None
        self._graphs = graphs if options.compile and pool.in_place else None
        self._feed = TokenFeed.for_device()

    @property
    def compiled(self) -> bool:
        """Whether forwards are traced per bucket of shapes."""
        return self._traced is not None

    @property
    def steps_to_settle(self) -> int:
        """Decode steps of a bucket of shapes until nothing about them is still being prepared."""
        return 1 if self._graphs is None else STEPS_TO_SETTLE

    @property
    def prompts_to_settle(self) -> int:
        """The same for prompts."""
        return 1 if self._traced is None or not self._options.trace_prompts else PROMPTS_TO_TRACE

    def decode_width(self, blocks: int) -> int:
        """Width of the block table of a decode forward whose longest row has ``blocks`` blocks."""
        return coarse_bucket(blocks) if self._options.decode_kernel else bucket(blocks)

    # -- steps -------------------------------------------------------------------------------------------

    def launch(self, output: SchedulerOutput) -> StepHandle:
        """Build a step's graph and start it, or leave it to start when the running step is read."""
        if output.copies:
            self._start_last()  # nothing, where writes are in place
            self._pool.copy_blocks(output.copies)
        self._forwards, self._hidden = [], {}
        prompt_logprobs: dict[int, list[LogprobArrays]] = {}
        rows: list[ScheduledRow] = []
        logits: list[mx.array] = []
        inputs: list[Fed] = []
        for group in self._prefill_forwards(output.prefill):
            found = self._prefill(group, prompt_logprobs)
            keep = [index for index, row in enumerate(group) if row.samples]
            if keep:
                rows += [group[index] for index in keep]
                logits.append(found if len(keep) == len(group) else found[mx.array(keep)])
                inputs.append(partial(mx.zeros, len(keep), mx.int32))
        if output.decode:
            fed, found = self._decode(output.decode)
            rows += output.decode
            logits.append(found)
            inputs.append(fed)
        handle = StepHandle(self, output, rows, None, prompt_logprobs, self._forwards[:-1], self._forwards[-1])
        handle.hidden = self._hidden
        if any(row.params.grammar is not None for row in rows):
            handle.unsampled = _Unsampled(logits, inputs)
        elif rows:
            self._take_sampled(handle, self._sample(rows, logits, inputs))
        if self._running is None:
            self._start(handle, {})
        else:
            self._pending = handle
            if self._pool.in_place:
                self._queue(handle)
        return handle

    def finish(self, handle: StepHandle) -> StepResult:
        """Wait for the running step, start the pending one, and hand the tokens to the host."""
        assert handle is self._running, "steps are read in the order of their launch"
        self._start_last()
        mx.eval(self._arrays(handle) + handle.last)
        now = time.perf_counter()
        # A queued step ran from the end of the one before it.
        duration = now - max(handle.started_at, self._finished_at)
        self._finished_at = now
        self._running = None
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._start(pending, {} if pending.unsampled is None else _sampled_tokens(handle))
        return _to_host(handle, duration)

    def _queue(self, handle: StepHandle) -> None:
        """Start all forwards of a step, and the sampling that is built; earlier steps may be running."""
        handle.started_at = time.perf_counter()
        mx.async_eval(*handle.earlier, handle.last, self._arrays(handle))  # type: ignore[no-untyped-call]
        handle.earlier = []

    def _start(self, handle: StepHandle, newest: Mapping[int, int]) -> None:
        """Start a step; ``newest``: the tokens of the step before it, for grammars."""
        self._running = handle
        if self._pool.in_place:
            if not handle.started_at:
                self._queue(handle)
            if handle.unsampled is not None:
                self._sample_with_masks(handle, handle.unsampled, newest)
                mx.async_eval(self._arrays(handle))  # type: ignore[no-untyped-call]
            return
        handle.started_at = time.perf_counter()
        if handle.earlier:
            mx.async_eval(handle.earlier[0])  # type: ignore[no-untyped-call]
        else:
            self._start_forward(handle)
        if handle.unsampled is not None:
            self._sample_with_masks(handle, handle.unsampled, newest)
            if not handle.earlier:
                self._start_forward(handle)

    def _start_last(self) -> None:
        """Wait for the running step's forwards but the last, and start that one, if it has not been started."""
        handle = self._running
        if handle is None or not handle.earlier:
            return
        for arrays in handle.earlier:
            mx.eval(arrays)
        handle.earlier = []
        self._start_forward(handle)

    def _start_forward(self, handle: StepHandle) -> None:
        """Start the last forward, and the sampling that is built."""
        # Not the pool's state: that may be the next step's already.
        mx.async_eval(self._arrays(handle) + handle.last)  # type: ignore[no-untyped-call]

    def _sample_with_masks(self, handle: StepHandle, parts: _Unsampled, newest: Mapping[int, int]) -> None:
        """Make the masks while the forwards run, then build the sampling."""
        assert self._grammars is not None, "a row has a grammar and the runner cannot make masks"
        masks = self._grammars.masks(handle.rows, newest)
        handle.refused = {} if masks is None else masks.refused
        handle.unsampled = None
        self._take_sampled(handle, self._sample(handle.rows, parts.logits, parts.inputs, masks))

    def _take_sampled(self, handle: StepHandle, sampled: Sampled) -> None:
        handle.sampled = sampled
        self._newest = (sampled.tokens, {row.seq_id: index for index, row in enumerate(handle.rows)})

    def read(self, arrays: Sequence[mx.array]) -> list[np.ndarray]:
        """What arrays of a finished step hold."""
        return [np.array(array) for array in arrays] if self._graphs is None else self._graphs.read(arrays)

    @staticmethod
    def _arrays(handle: StepHandle) -> list[mx.array]:
        arrays = handle.sampled.arrays() if handle.sampled is not None else []
        for pieces in handle.prompt_logprobs.values():
            arrays += [array for piece in pieces for array in piece if array is not None]
        return arrays

    def resize_pools(self, num_blocks: Sequence[int], moves: Sequence[Mapping[int, int]]) -> None:
        """Pools of ``num_blocks`` usable blocks per group; blocks move as ``KVPool.resize`` says."""
        assert self._running is None and self._pending is None, "a step is outstanding"
        self._newest = None
        if self._graphs is not None:
            self._graphs.clear()
        self._pool.resize([count + 1 for count in num_blocks], moves)
        self.forget_except(set())

    def forget_except(self, live: set[int]) -> None:
        """Drop remembered tables of sequences that no longer exist."""
        self._inputs.forget(live)

    def prefill_logits(self, rows: list[ScheduledRow]) -> mx.array:
        """Lazy logits ``[P, V]`` of one prefill forward, for checks and measurements outside of steps."""
        return self._prefill(rows, {})

    def decode_logits(self, rows: Sequence[ScheduledRow]) -> mx.array:
        """Lazy logits ``[B, V]`` of one decode forward, likewise."""
        return self._decode(rows)[1]

    # -- forwards ----------------------------------------------------------------------------------------

    def _forward(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Run the model on ``tokens [B, L]`` over views of the pool; logits of the selected positions."""
        views = [self._view(self._pool, layer, batch) for layer in range(len(self._pool.layers))]
        logits: mx.array = self._model(tokens, cache=views)
        return logits

    def _prefill_forwards(self, rows: Sequence[ScheduledRow]) -> list[list[ScheduledRow]]:
        """Partition prefill rows into forwards: similar lengths together while padding stays cheap."""
        forwards: list[list[ScheduledRow]] = []
        for row in sorted(rows, key=lambda row: row.num_tokens):
            group = forwards[-1] if forwards else []
            real = sum(other.num_tokens for other in group) + row.num_tokens
            padded = row.num_tokens * (len(group) + 1)
            alone = bool(row.prompt_targets) or not group or self._options.single_rows
            if alone or padded > PAD_WASTE * real or len(group) >= self._options.max_prefill_rows:
                forwards.append([row])
            else:
                group.append(row)
        limit = self._options.limit
        if limit is None:
            return forwards
        return [part for group in forwards for part in limit.prefill_parts(group, self._inputs.layout)]

    def _prefill(
        self,
        rows: list[ScheduledRow],
        prompt_logprobs: dict[int, list[LogprobArrays]],
    ) -> mx.array:
        """One prefill forward; logits ``[P, V]`` at each row's last token."""
        if len(rows) == 1 and rows[0].prompt_targets:
            return self._prefill_with_logprobs(rows[0], prompt_logprobs)
        length = max(row.num_tokens for row in rows)
        wanted = [(index, row.seq_id) for index, row in enumerate(rows) if row.params.embed and row.samples]
        is_first = not wanted and not any(row.start for row in rows)
        if self._traced is not None and self._options.trace_prompts and is_first:
            logits = self._traced.prompt(self._inputs.prompt_inputs(rows, prefill_length(length)))
            self._forwards.append([self._if_sampled(rows, logits)])
            return logits
        if self._pool.head_major or self._options.materialize:
            batch = self._inputs.build(rows, length)
        else:
            length = prefill_length(length)
            batch = on_device(self._inputs.build(rows, length))
        self._selector.last_of(batch.lengths, length, keep=bool(wanted))
        logits = self._forward(mx.array(token_array(rows, length)), batch)
        given, kept = [logits], self._selector.kept
        if wanted and kept is not None:
            given.append(kept[:, 0].astype(mx.float32))
            self._hidden.update((seq_id, (given[-1], index)) for index, seq_id in wanted)
        if logits.shape[1] > 1:  # a model without a selective head
            logits = given[0] = self._selector.select(logits)
        given[0] = self._if_sampled(rows, given[0])
        self._forwards.append(given)
        return logits[:, 0]

    def _if_sampled(self, rows: Sequence[ScheduledRow], logits: mx.array) -> mx.array:
        """``logits``; of a forward whose KV alone is wanted, its writes: the rest is never computed then."""
        return logits if any(row.samples for row in rows) else mx.depends(mx.zeros(1), self._pool.changes)

    def _prefill_with_logprobs(
        self,
        row: ScheduledRow,
        prompt_logprobs: dict[int, list[LogprobArrays]],
    ) -> mx.array:
        """A prefill in small pieces, with the logprob of each next prompt token; logits of the last token."""
        pieces = prompt_logprobs.setdefault(row.seq_id, [])
        num_top = row.params.prompt_logprobs or 0
        logits = mx.zeros((1, self._vocab_size))
        for first in range(0, row.num_tokens, PROMPT_LOGPROBS_TOKENS):
            count = min(PROMPT_LOGPROBS_TOKENS, row.num_tokens - first)
            part = _part_of(row, first, count)
            self._selector.all_positions()
            batch = self._inputs.build([part], count)
            logits = self._forward(mx.array(token_array([part], count)), batch)[0]
            targets = row.prompt_targets[first : first + count]
            given: list[mx.array | None] = [logits[-1:]]
            if targets:
                pieces.append(token_logprobs(logits[: len(targets)], mx.array(targets, mx.int32), num_top))
                given = list(pieces[-1])
            self._forwards.append([array for array in given if array is not None])
        return logits[-1:]

    def _decode(self, rows: Sequence[ScheduledRow]) -> tuple[Fed, mx.array]:
        """The decode forward; the tokens it was fed ``[B]``, when they are wanted, and logits ``[B, V]``."""
        padded = bucket(len(rows)) if self._traced is not None else len(rows)
        newest, parts = self._newest, self._decode_parts(rows)
        if self._graphs is not None and len(parts) == 1:
            sent = [feed_of(rows, padded, newest), *self._inputs.decode_inputs(rows, padded)]
            source = self._feed.source(newest)
            logits, self._pool.changes = self._graphs.run(self._decode_fed, source, sent, self._pool.marks)
            self._forwards.append([logits])
            return lambda: fed_tokens(rows, len(rows), newest), logits[: len(rows)]
        tokens = fed_tokens(rows, padded, newest)
        fed = tokens[: len(rows)]
        if len(parts) > 1:
            ends = accumulate(map(len, parts))
            pairs = [(part, tokens[end - len(part) : end]) for part, end in zip(parts, ends, strict=True)]
            return lambda: fed, mx.concatenate([self._decode_part(part, own) for part, own in pairs])
        if self._traced is None:
            self._selector.all_positions()
            logits = self._forward(tokens[:, None], self._inputs.build(rows, 1))[:, 0]
        else:
            sent = self._inputs.decode_inputs(rows, padded)
            logits, self._pool.changes = self._traced.decode(tokens, sent, self._pool.marks)
        self._forwards.append([logits])
        return lambda: fed, logits[: len(rows)]

    def _decode_fed(
        self, newest: mx.array, inputs: Sequence[HostInts], marks: list[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """The traced forward of the tokens that the first of ``inputs`` picks."""
        assert self._traced is not None, "only traced steps are recorded"
        feed, *others = inputs
        return self._traced.decode(self._feed(newest, feed.array), others, marks)

    def _decode_parts(self, rows: Sequence[ScheduledRow]) -> list[Sequence[ScheduledRow]]:
        """The forwards that the rows need."""
        if self._options.single_rows:
            return [[row] for row in rows]
        limit = self._options.limit
        return [rows] if limit is None else limit.decode_parts(rows, self._inputs.layout)

    def _decode_part(self, rows: Sequence[ScheduledRow], tokens: mx.array) -> mx.array:
        self._selector.all_positions()
        logits = self._forward(tokens[:, None], self._inputs.build(rows, 1))[:, 0]
        self._forwards.append([logits])
        return logits

    def _sample(
        self,
        rows: list[ScheduledRow],
        logits: list[mx.array],
        inputs: list[Fed],
        masks: StepMasks | None = None,
    ) -> Sampled:
        batch = build_sampling_batch(rows, self._vocab_size, CANDIDATES, masks)
        truncates = batch.random is not None and batch.random.truncation is not None
        if truncates and self._running is not None and not self._pool.in_place:
            # On the CPU, truncation may have to look at values before it goes on; the running step must be over by
            # then (with masks this is the running step: its earlier forwards must be).
            self._start_last()
            mx.eval(self._arrays(self._running))
        joined = logits[0] if len(logits) == 1 else mx.concatenate(logits, axis=0)
        fed = None
        if batch.edits is not None and batch.edits.history is not None:
            fed = mx.concatenate([tokens() for tokens in inputs], axis=0)
        return sample(joined, batch, fed, self._sampling)


def _part_of(row: ScheduledRow, first: int, count: int) -> ScheduledRow:
    return ScheduledRow(
        seq_id=row.seq_id,
        start=row.start + first,
        num_tokens=count,
        token_ids=row.token_ids[first : first + count],
        block_tables=row.block_tables,
        samples=False,
        sample_position=row.sample_position,
        seed=row.seed,
        params=row.params,
        num_prompt_tokens=row.num_prompt_tokens,
    )


# -- results -----------------------------------------------------------------------------------------------


def _sampled_tokens(handle: StepHandle) -> dict[int, int]:
    """seq_id -> token of a finished step."""
    if handle.sampled is None:
        return {}
    tokens: list[int] = handle.runner.read([handle.sampled.tokens])[0].tolist()
    return {row.seq_id: token for row, token in zip(handle.rows, tokens, strict=True)}


def _to_host(handle: StepHandle, duration: float) -> StepResult:
    """Read a finished step's arrays."""
    sampled: dict[int, SampledToken] = {}
    failed: dict[int, str] = {}
    refused = dict(handle.refused)
    if handle.sampled is not None:
        tokens, finite = (
            values.tolist() for values in handle.runner.read([handle.sampled.tokens, handle.sampled.finite])
        )
        logprobs = iter(
            _logprob_lists(handle.sampled.logprobs, handle.sampled.top_ids, handle.sampled.top_logprobs)
        )
        for row, token, good in zip(handle.rows, tokens, finite, strict=True):
            entry = None
            if row.params.logprobs is not None:
                entry = _cut(next(logprobs), row.params.logprobs)
            if row.params.embed and row.seq_id not in handle.hidden:
                refused[row.seq_id] = "this model cannot make embeddings: its output layer is not known"
            if row.seq_id in refused:
                continue
            if good:
                sampled[row.seq_id] = SampledToken(token, entry, _hidden_bytes(handle, row.seq_id))
            else:
                failed[row.seq_id] = "the model produced values that are not finite"
    prompt = {
        seq_id: [_cut(entry, len(entry.top)) for piece in pieces for entry in _logprob_lists(*piece)]
        for seq_id, pieces in handle.prompt_logprobs.items()
    }
    return StepResult(handle.output.step_id, sampled, failed, prompt, duration, refused)


def _hidden_bytes(handle: StepHandle, seq_id: int) -> bytes:
    if seq_id not in handle.hidden:
        return b""
    states, index = handle.hidden[seq_id]
    return np.array(states[index]).astype("<f4").tobytes()


def _logprob_lists(chosen: mx.array | None, ids: mx.array | None, values: mx.array | None) -> list[TokenLogprobs]:
    if chosen is None:
        return []
    own = np.maximum(np.array(chosen), LOWEST_LOGPROB).tolist()
    if ids is None or values is None:
        return [TokenLogprobs(value, []) for value in own]
    top_values = np.maximum(np.array(values), LOWEST_LOGPROB).tolist()
    return [
        TokenLogprobs(value, list(zip(row_ids, row_values, strict=True)))
        for value, row_ids, row_values in zip(own, np.array(ids).tolist(), top_values, strict=True)
    ]


def _cut(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    return entry if len(entry.top) <= count else TokenLogprobs(entry.logprob, entry.top[:count])
