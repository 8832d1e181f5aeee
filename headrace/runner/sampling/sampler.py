"""Sampling: one vectorized function over all rows of a step, a pure function of (seed, position, logits).

A row's next token is the argmax of its logits (temperature 0), or of ``logits / temperature + Gumbel noise``
over the tokens that truncation keeps (the Gumbel-max trick: this draws from the softmax). The noise is a hash of
(seed, position, token id), so a request draws the same tokens alone, in any batch, after a preemption and
after a restart. Order: penalties, logit bias, bans and masks; temperature; min-p, top-k, top-p; noise.

Nothing is computed that no row asks for: rows are selected first (noise for rows with a temperature, counts
for rows with penalties, logprobs for rows that want them), and a batch of greedy rows is one argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from headrace.runner.sampling.batch import History, LogitEdits, RandomRows, SamplingBatch, Truncation
from headrace.runner.sampling.kernel import SamplingKernel

# Truncation on the CPU sorts this many candidates and falls back to a full sort when they are too few.
CANDIDATES = 256
# Thread blocks that keep a large GPU busy.
_GPU_BLOCKS = 1024


@dataclass(slots=True)
class Sampled:
    """Device arrays of one sampling call over R rows.

    Attributes:
        tokens: ``[R]`` int32.
        finite: ``[R]`` bool; False: the row's logits were not finite and its token means nothing.
        logprobs: ``[Rl]`` float32 of the chosen tokens, for the rows in ``SamplingBatch.logprob_rows``.
        top_ids, top_logprobs: ``[Rl, k]``, best first.
    """

    tokens: mx.array
    finite: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        extra = (self.logprobs, self.top_ids, self.top_logprobs)
        return [self.tokens, self.finite, *(array for array in extra if array is not None)]


def sample(
    logits: mx.array, batch: SamplingBatch, inputs: mx.array | None = None, own: SamplingKernel | None = None
) -> Sampled:
    """Sample one token per row.

    Args:
        logits: ``[R, V]``, any float type.
        batch: what the rows ask for.
        inputs: ``[R]`` the token each row was fed, for histories whose newest token the host has not seen.
        own: kernels that choose tokens by the same definition, where they take the rows.
    """
    if batch.edits is not None:
        edit = partial(_edit, batch.edits, inputs)
        logits = _replace_rows(logits.astype(mx.float32), batch.edits.rows, edit)
    if own is not None and own.takes(logits):
        result = Sampled(*own(logits, batch.random))
    else:
        logits = logits.astype(mx.float32)
        tokens = _choose(logits, batch.random)
        result = Sampled(tokens, _finite(logits, tokens))
    if batch.logprob_rows:
        rows = None if len(batch.logprob_rows) == logits.shape[0] else batch.logprob_rows
        picked = result.tokens if rows is None else result.tokens[mx.array(rows)]
        found = token_logprobs(_rows(logits, rows), picked, batch.num_top)
        result.logprobs, result.top_ids, result.top_logprobs = found
    return result


def _choose(logits: mx.array, random: RandomRows | None) -> mx.array:
    """Tokens ``[R]`` int32 of float32 ``logits [R, V]``."""
    tokens = _argmax(logits)
    if random is None:
        return tokens
    scaled = _rows(logits, random.rows) / mx.array(random.temperatures)[:, None]
    if random.truncation is not None:
        threshold = _threshold(scaled, random.truncation)
        scaled = mx.where(scaled >= threshold, scaled, -mx.inf)
    drawn = gumbel_argmax(scaled, mx.array(random.key_add), mx.array(random.key_mul))
    if random.rows is None:
        return drawn
    tokens[mx.array(random.rows)] = drawn
    return tokens


def _argmax(logits: mx.array) -> mx.array:
    """Ids ``[R]`` int32 of the largest of ``logits [R, V]``, the smallest among equals."""
    if mx.default_device() == mx.gpu:
        return argmax_in_parts(logits)
    return mx.argmax(logits, axis=-1).astype(mx.int32)


@mx.compile
def argmax_in_parts(logits: mx.array) -> mx.array:
    """``_argmax`` for a GPU, where MLX gives a row to one thread block: 50 us for 32 rows of 128256 (one H200).

    The rows' parts first, about as many as such a device holds blocks; then the best of the parts.
    """
    rows, vocab = logits.shape
    most = max(1, _GPU_BLOCKS // rows)
    parts = next(parts for parts in range(min(most, 128), 0, -1) if vocab % parts == 0)
    pieces = logits.reshape(rows, parts, vocab // parts)
    best = mx.argmax(pieces, axis=-1, keepdims=True)
    if parts == 1:
        return best[:, 0, 0].astype(mx.int32)
    part = mx.argmax(mx.take_along_axis(pieces, best, axis=-1)[..., 0], axis=-1, keepdims=True)
    found = part * (vocab // parts) + mx.take_along_axis(best[..., 0], part, axis=-1)
    return found[:, 0].astype(mx.int32)


def _finite(logits: mx.array, tokens: mx.array) -> mx.array:
    """``[R]`` bool: whether the logit of each row's token is finite."""
    if mx.default_device() == mx.gpu:
        return _compiled_finite(logits, tokens)
    return mx.isfinite(mx.take_along_axis(logits, tokens[:, None], axis=-1))[:, 0]


@mx.compile
def _compiled_finite(logits: mx.array, tokens: mx.array) -> mx.array:
    # Compiled, because a constant that stands alone is an array of its own, which a GPU waits for.
    return mx.abs(mx.take_along_axis(logits, tokens[:, None], axis=-1))[:, 0] < mx.inf


def token_logprobs(
    logits: mx.array, tokens: mx.array, num_top: int
) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Logprobs of ``tokens [R]`` under ``logits [R, V]``, and the ``num_top`` most likely ones, best first."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1) - total
    if num_top == 0:
        return chosen[:, 0], None, None
    ids = _top_ids(logits, num_top)
    return chosen[:, 0], ids, mx.take_along_axis(logits, ids, axis=-1) - total


def _top_ids(logits: mx.array, count: int) -> mx.array:
    """Ids of the ``count`` largest per row, best first; the smaller id first among equals, as argmax does."""
    vocab = logits.shape[-1]
    count = min(count, vocab)
    # A few spare candidates, so that equal logits at the edge are ordered by id and not by the partition.
    spare = min(vocab, count + 8)
    found = mx.argpartition(-logits, kth=spare - 1, axis=-1)[:, :spare] if spare < vocab else None
    if found is None:
        found = mx.broadcast_to(mx.arange(vocab)[None], logits.shape)
    found = mx.sort(found, axis=-1)
    order = mx.argsort(-mx.take_along_axis(logits, found, axis=-1), axis=-1)[:, :count]
    return mx.take_along_axis(found, order, axis=-1)


@mx.compile
def gumbel_argmax(scaled: mx.array, key_add: mx.array, key_mul: mx.array) -> mx.array:
    """Argmax of ``scaled [R, V]`` plus Gumbel noise hashed from the rows' keys ``[R]`` uint32 and the token id.

    The hash is the 32-bit finalizer "lowbias32" (Chris Wellons, Hash Prospector, 2018) over
    ``id * key_mul + key_add``; its top 23 bits make a uniform number in (0, 1). (With 24, the largest would round
    to 1 and its noise to infinity: once in 2**24, whatever the logits say.)
    """
    ids = mx.arange(scaled.shape[-1], dtype=mx.uint32)[None]
    x = ids * key_mul[:, None] + key_add[:, None]
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    x = x ^ (x >> 16)
    uniform = (x >> 9).astype(mx.float32) * (2.0**-23) + 2.0**-24
    return mx.argmax(scaled - mx.log(-mx.log(uniform)), axis=-1).astype(mx.int32)


# -- truncation --------------------------------------------------------------------------------------------


def _threshold(scaled: mx.array, truncation: Truncation) -> mx.array:
    """``[R, 1]``: the smallest scaled logit that min-p, top-k and top-p keep."""
    vocab = scaled.shape[-1]
    if mx.default_device() == mx.gpu or vocab <= 4 * CANDIDATES:
        return _threshold_of(scaled, -mx.sort(-scaled, axis=-1), truncation)[0]
    candidates = -mx.sort(-mx.topk(scaled, CANDIDATES, axis=-1), axis=-1)
    threshold, open_ended = _threshold_of(scaled, candidates, truncation)
    if truncation.bounded or not mx.any(open_ended).item():
        return threshold
    return _threshold_of(scaled, -mx.sort(-scaled, axis=-1), truncation)[0]


def _threshold_of(scaled: mx.array, ordered: mx.array, truncation: Truncation) -> tuple[mx.array, mx.array]:
    """Threshold ``[R, 1]`` from the largest logits ``ordered [R, C]``, and ``[R]``: C was too few to tell."""
    top_k = mx.array(truncation.top_k)[:, None]
    top_p = mx.array(truncation.top_p)[:, None]
    min_p = mx.array(truncation.min_p)[:, None]
    probs = mx.exp(ordered - mx.logsumexp(scaled, axis=-1, keepdims=True))
    keep = (mx.arange(ordered.shape[-1])[None] < top_k) & (probs >= min_p * probs[:, :1])
    kept = probs * keep
    restricted = (top_k < scaled.shape[-1]) | (min_p > 0)
    total = mx.where(restricted, mx.sum(kept, axis=-1, keepdims=True), 1.0)
    before = mx.cumsum(kept, axis=-1) - kept
    keep = keep & (before < top_p * total)
    threshold = mx.min(mx.where(keep, ordered, mx.inf), axis=-1, keepdims=True)
    return threshold, keep[:, -1]


# -- edits -------------------------------------------------------------------------------------------------


def _edit(edits: LogitEdits, inputs: mx.array | None, logits: mx.array) -> mx.array:
    """Penalties, bias and bans for the selected rows ``logits [Re, V]``."""
    if edits.history is not None:
        logits = _penalize(edits.history, mx.array(edits.rows), inputs, logits)
    if edits.bias_rows is not None:
        logits = logits.at[mx.array(edits.bias_rows), mx.array(edits.bias_ids)].add(mx.array(edits.bias_values))
    if edits.allowed_rows is not None:
        allowed = mx.zeros(logits.shape, mx.bool_)
        allowed[mx.array(edits.allowed_rows), mx.array(edits.allowed_ids)] = True
        logits = mx.where(allowed | ~mx.array(edits.allow_only)[:, None], logits, -mx.inf)
    if edits.mask_rows is not None and edits.mask_words is not None:
        logits = _replace_rows(logits, edits.mask_rows, partial(_mask, mx.array(edits.mask_words)))
    if edits.banned_rows is not None:
        logits[mx.array(edits.banned_rows), mx.array(edits.banned_ids)] = mx.array(-mx.inf)
    return logits


def _mask(words: mx.array, logits: mx.array) -> mx.array:
    """-inf where a row's bit is not set: ``words [R, ceil(V / 32)]`` uint32, ``logits [R, V]``."""
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[-1]]
    return mx.where(allowed.astype(mx.bool_), logits, -mx.inf)


def _penalize(history: History, index: mx.array, inputs: mx.array | None, logits: mx.array) -> mx.array:
    """Repetition penalty (Keskar et al. 2019, CTRL) over all tokens; presence and frequency over output tokens."""
    ids, is_output = mx.array(history.ids), mx.array(history.is_output)
    if inputs is not None:
        newest = mx.where(mx.array(history.newest_unseen), inputs[index], logits.shape[-1])
        ids = mx.concatenate([ids, newest[:, None]], axis=1)
        is_output = mx.concatenate([is_output, mx.ones((ids.shape[0], 1))], axis=1)
    rows = mx.arange(ids.shape[0])[:, None]
    blank = mx.zeros((logits.shape[0], logits.shape[1] + 1))  # one column more: where padding ids land
    seen = blank.at[rows, ids].add(1.0)[:, :-1] > 0
    count = blank.at[rows, ids].add(is_output)[:, :-1]
    repetition = mx.array(history.repetition)[:, None]
    logits = mx.where(seen, mx.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - mx.array(history.frequency)[:, None] * count
    return logits - mx.array(history.presence)[:, None] * (count > 0)


def _rows(logits: mx.array, rows: list[int] | None) -> mx.array:
    return logits if rows is None else logits[mx.array(rows)]


def _replace_rows(logits: mx.array, rows: list[int], change: partial[mx.array]) -> mx.array:
    if len(rows) == logits.shape[0]:
        return change(logits)
    index = mx.array(rows)
    logits[index] = change(logits[index])
    return logits
