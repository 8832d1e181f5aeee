"""How many prompt tokens a step may compute, from measured step times.

A step's time is taken as  decode(rows) + a · tokens + b · tokens · context,  where context is the mean position
of the tokens. decode(rows) is a moving average per power of two of rows, from steps without a prefill; a and b are
fitted to the rest by least squares that forget (two unknowns, neither negative). From them:

- with nothing decoding, a chunk may cost as much work as ``prefill_step_size`` tokens at context 0, so that later
  chunks of a long prompt shrink and each takes about the same time (GPU watchdogs kill long command buffers);
- with streams running, the whole step also has to end within ``max_decode_stall_ms``.

Work is counted in tokens at context 0: c tokens behind s earlier ones are c · (1 + (s + c/2) / scale), with
scale = a / b: the context at which attention costs as much as everything else.
"""

from __future__ import annotations

import math

FORGET = 0.95  # weight of the past per new measurement
MIN_CHUNK_TOKENS = 16  # progress, however tight the bound on stalls is
FIRST_CHUNK_TOKENS = 128  # while streams run and nothing has been measured
DEFAULT_SCALE_TOKENS = 16384.0
MIN_SCALE_TOKENS = 2048.0
OUTLIER = 4.0  # a step that took longer than this many times the estimate counts as that (compilation, paging)


class StepCostModel:
    """Separates the time of decode rows from that of prompt tokens."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by bit length of the number of rows
        # Sums of x·x, x·z, z·z, x·y, z·y with x = tokens, z = tokens · context, y = seconds.
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0
        self._token_s: float | None = None
        self._context_s = 0.0

    @property
    def token_s(self) -> float | None:
        """Seconds per prompt token at context 0; None before the first measurement."""
        return self._token_s

    @property
    def scale_tokens(self) -> float:
        if not self._token_s or not self._context_s:
            return DEFAULT_SCALE_TOKENS
        return max(MIN_SCALE_TOKENS, self._token_s / self._context_s)

    def decode_s(self, rows: int) -> float:
        """Expected time of a decode forward; the nearest measured number of rows stands in."""
        if not rows or not self._decode_s:
            return 0.0
        bucket = min(self._decode_s, key=lambda known: abs(known - rows.bit_length()))
        return self._decode_s[bucket]

    def observe(self, decode_rows: int, prefill_tokens: int, context: float, duration_s: float) -> None:
        """Learn from one finished step; ``prefill_tokens`` counts padding, ``context`` is their mean position."""
        if duration_s <= 0:
            return
        if prefill_tokens:
            self._observe_prefill(prefill_tokens, context, duration_s - self.decode_s(decode_rows))
        elif decode_rows:
            bucket = decode_rows.bit_length()
            known = self._decode_s.get(bucket, duration_s)
            self._decode_s[bucket] = 0.8 * known + 0.2 * min(duration_s, OUTLIER * known)

    def _observe_prefill(self, tokens: int, context: float, seconds: float) -> None:
        if seconds <= 0:
            return
        x, z = float(tokens), tokens * context
        if self._token_s is not None:
            expected = self._token_s * x + self._context_s * z
            seconds = min(seconds, OUTLIER * expected)
        weight = 1.0 / x  # so that a token in a small chunk counts as much as one in a large chunk
        self._xx = FORGET * self._xx + weight * x * x
        self._xz = FORGET * self._xz + weight * x * z
        self._zz = FORGET * self._zz + weight * z * z
        self._xy = FORGET * self._xy + weight * x * seconds
        self._zy = FORGET * self._zy + weight * z * seconds
        self._fit()

    def _fit(self) -> None:
        determinant = self._xx * self._zz - self._xz * self._xz
        a, b = self._xy / self._xx, 0.0
        if determinant > 1e-6 * self._xx * self._zz:
            both_a = (self._xy * self._zz - self._zy * self._xz) / determinant
            both_b = (self._zy * self._xx - self._xy * self._xz) / determinant
            if both_a > 0 and both_b > 0:
                a, b = both_a, both_b
        self._token_s, self._context_s = a, b


class PrefillBudget:
    """Sizes the chunks of a step."""

    def __init__(self, prefill_step_size: int, max_decode_stall_ms: float | None, block_size: int) -> None:
        self._step_size = prefill_step_size
        self._stall_s = None if max_decode_stall_ms is None else max_decode_stall_ms / 1000
        self._block_size = block_size
        self.cost = StepCostModel()

    def work(self, decode_rows: int) -> float:
        """Work that the prefill of this step may do, in tokens at context 0."""
        full = self._step_size * (1 + self._step_size / 2 / self.cost.scale_tokens)
        if not decode_rows or self._stall_s is None:
            return full
        token_s = self.cost.token_s
        if token_s is None:
            return float(min(self._step_size, FIRST_CHUNK_TOKENS))
        return min(full, max(0.0, self._stall_s - self.cost.decode_s(decode_rows)) / token_s)

    def chunk(self, work: float, start: int) -> int:
        """Tokens behind ``start`` earlier ones that cost this much: the positive root of the formula above."""
        scale = self.cost.scale_tokens
        linear = 1 + start / scale
        tokens = int(scale * (math.sqrt(linear * linear + 2 * work / scale) - linear) + 1e-6)
        return max(min(MIN_CHUNK_TOKENS, self._step_size), min(self._step_size, tokens))

    def round_chunk(self, tokens: int, remaining: int) -> int:
        """The chunk to run: all that remains, or whole blocks (shapes repeat, blocks become shareable early)."""
        if tokens >= remaining:
            return remaining
        return max(tokens - tokens % self._block_size, min(tokens, self._block_size))
