"""What the rows of one step ask of the sampler, gathered on the host into a few small arrays.

Only rows that ask for something appear; a batch of plain greedy rows has every field empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.core.step import ScheduledRow
from headrace.runner.sampling.grammar_masks import StepMasks

_MASK64 = 0xFFFFFFFFFFFFFFFF
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(slots=True)
class Truncation:
    """Per random row; ``top_k`` is the vocabulary size where off. ``bounded``: every row has a small top_k."""

    top_k: Ints
    top_p: Floats
    min_p: Floats
    bounded: bool


@dataclass(slots=True)
class RandomRows:
    """Rows with a temperature. ``rows`` is None when it is all of them."""

    rows: list[int] | None
    temperatures: Floats
    key_add: npt.NDArray[np.uint32]
    key_mul: npt.NDArray[np.uint32]
    truncation: Truncation | None


@dataclass(slots=True)
class History:
    """Tokens so far of the edited rows, for penalties.

    Attributes:
        ids: ``[Re, L]``, padded with the vocabulary size.
        is_output: ``[Re, L]`` 1 where the token is of the output.
        newest_unseen: ``[Re]``: the row's newest token is still on the device and missing in ``ids``.
        repetition, presence, frequency: ``[Re]``.
    """

    ids: Ints
    is_output: Floats
    newest_unseen: npt.NDArray[np.bool_]
    repetition: Floats
    presence: Floats
    frequency: Floats


@dataclass(slots=True)
class LogitEdits:
    """Rows whose logits change before sampling; ``*_rows`` index into ``rows``. Fields are None where unused.

    ``mask_words`` ``[len(mask_rows), ceil(vocab / 32)]``: bit ``i % 32`` of word ``i // 32`` allows token i.
    """

    rows: list[int]
    history: History | None = None
    bias_rows: list[int] | None = None
    bias_ids: list[int] = field(default_factory=list)
    bias_values: list[float] = field(default_factory=list)
    banned_rows: list[int] | None = None
    banned_ids: list[int] = field(default_factory=list)
    allowed_rows: list[int] | None = None
    allowed_ids: list[int] = field(default_factory=list)
    allow_only: list[bool] = field(default_factory=list)
    mask_rows: list[int] | None = None
    mask_words: npt.NDArray[np.uint32] | None = None


@dataclass(slots=True)
class SamplingBatch:
    """One sampling call: random rows, edited rows, and rows that want logprobs (``num_top``: the most of any)."""

    random: RandomRows | None = None
    edits: LogitEdits | None = None
    logprob_rows: list[int] = field(default_factory=list)
    num_top: int = 0


def build_sampling_batch(
    rows: Sequence[ScheduledRow], vocab_size: int, small_top_k: int, masks: StepMasks | None = None
) -> SamplingBatch:
    """Gather what ``rows`` (one per row of logits, in that order) ask for; ``masks``: of those with a grammar."""
    edits = _edits(rows, vocab_size, masks)
    batch = SamplingBatch(random=_random_rows(rows, vocab_size, small_top_k), edits=edits)
    for index, row in enumerate(rows):
        if row.params.logprobs is not None:
            batch.logprob_rows.append(index)
            batch.num_top = max(batch.num_top, row.params.logprobs)
    return batch


def random_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys for the noise at one position: splitmix64 (Steele et al. 2014) of seed and position."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return z & 0xFFFFFFFF, (z >> 32) | 1


def _random_rows(rows: Sequence[ScheduledRow], vocab_size: int, small_top_k: int) -> RandomRows | None:
    chosen = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if not chosen:
        return None
    params = [rows[index].params for index in chosen]
    keys = [random_key(rows[index].seed, rows[index].sample_position) for index in chosen]
    # A tiny temperature is greedy in the limit; dividing by it must not overflow.
    temperatures = np.array([max(p.temperature, 1e-4) for p in params], np.float32)
    truncation = None
    if any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in params):
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        truncation = Truncation(
            np.array(top_k, np.int32),
            # Not 0 as a float32, on a device that flushes small values neither: the first token is always kept.
            np.array([max(p.top_p, 1e-30) if p.top_p < 1 else 2.0 for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            bounded=all(k <= small_top_k for k in top_k),
        )
    return RandomRows(
        None if len(chosen) == len(rows) else chosen,
        temperatures,
        np.array([add for add, _ in keys], np.uint32),
        np.array([mul for _, mul in keys], np.uint32),
        truncation,
    )


def _edits(rows: Sequence[ScheduledRow], vocab_size: int, masks: StepMasks | None) -> LogitEdits | None:
    masked = [] if masks is None else masks.rows
    ending = frozenset[int]() if masks is None else masks.ending
    chosen = [index for index, row in enumerate(rows) if index in masked or _is_edited(row)]
    if not chosen:
        return None
    edits = LogitEdits(chosen)
    picked = [rows[index] for index in chosen]
    if masks is not None:
        edits.mask_rows = [chosen.index(index) for index in masked]
        edits.mask_words = masks.words
    if any(row.params.uses_history for row in picked):
        _add_history(edits, picked, vocab_size)
    _add_bias(edits, picked)
    _add_allowed(edits, picked)
    _add_banned(edits, picked, {chosen.index(index) for index in ending})
    return edits


def _is_edited(row: ScheduledRow) -> bool:
    p = row.params
    return p.uses_history or bool(p.logit_bias) or bool(p.allowed_token_ids) or _bans_stops(row)


def _bans_stops(row: ScheduledRow) -> bool:
    return row.sample_position - row.num_prompt_tokens < row.params.min_tokens and bool(row.params.stop_token_ids)


def _add_history(edits: LogitEdits, rows: list[ScheduledRow], vocab_size: int) -> None:
    longest = max((len(row.history) for row in rows if row.params.uses_history), default=0)
    history = np.full((len(rows), max(longest, 1)), vocab_size, np.int32)
    is_output = np.zeros(history.shape, np.float32)
    for index, row in enumerate(rows):
        if row.params.uses_history:
            history[index, : len(row.history)] = row.history
            is_output[index, row.num_prompt_tokens : len(row.history)] = 1.0
    edits.history = History(
        history,
        is_output,
        np.array([row.params.uses_history and not row.token_ids for row in rows]),
        np.array([row.params.repetition_penalty for row in rows], np.float32),
        np.array([row.params.presence_penalty for row in rows], np.float32),
        np.array([row.params.frequency_penalty for row in rows], np.float32),
    )


def _add_bias(edits: LogitEdits, rows: list[ScheduledRow]) -> None:
    entries = [
        (index, token, value) for index, row in enumerate(rows) for token, value in row.params.logit_bias.items()
    ]
    if entries:
        edits.bias_rows = [index for index, _, _ in entries]
        edits.bias_ids = [token for _, token, _ in entries]
        edits.bias_values = [value for _, _, value in entries]


def _add_allowed(edits: LogitEdits, rows: list[ScheduledRow]) -> None:
    entries = [(index, token) for index, row in enumerate(rows) for token in row.params.allowed_token_ids]
    if entries:
        edits.allowed_rows = [index for index, _ in entries]
        edits.allowed_ids = [token for _, token in entries]
        edits.allow_only = [bool(row.params.allowed_token_ids) for row in rows]


def _add_banned(edits: LogitEdits, rows: list[ScheduledRow], ending: set[int]) -> None:
    """``ending``: rows whose grammar is complete; they end, whatever ``min_tokens`` says."""
    entries = [
        (index, token)
        for index, row in enumerate(rows)
        if _bans_stops(row) and index not in ending
        for token in row.params.stop_token_ids
    ]
    if entries:
        edits.banned_rows = [index for index, _ in entries]
        edits.banned_ids = [token for _, token in entries]
