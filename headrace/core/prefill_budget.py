"""How many prompt tokens a step may compute, from measured step times.

A step's time is taken as  decode(rows) + unit · tokens · (1 + context / scale),  where context is the mean
position of the tokens and scale the context at which attention costs as much as everything else. From it:

- with nothing decoding, a chunk may cost as much work as ``prefill_step_size`` tokens at context 0, so that later
  chunks of a long prompt shrink and each takes about the same time; on a slow device it ends within a second or
  so, because whoever comes or leaves meanwhile waits for it (and GPU watchdogs kill long command buffers);
- with streams running, the whole step also has to end within ``max_decode_stall_ms``.

decode(rows) is a moving average per power of two of rows, from steps without a prefill. ``unit`` follows the last
few prefills, because its value depends on the size of chunks and on who else uses the machine. ``scale`` is of the
model and the device: it comes from a least-squares fit with a longer memory, which is believed only where the
measured contexts differ enough to tell the two terms apart. What the formula misses ends up in ``margin``: it
goes up at once when a bounded step took longer than expected, and comes down slowly.
"""

from __future__ import annotations

import math

FORGET = 0.98  # weight of the past per new measurement, for the fit of the scale
UNIT_STEP = 0.3  # weight of a new measurement of the unit
MIN_CHUNK_TOKENS = 16  # progress, however tight the bound on stalls is
FIRST_CHUNK_TOKENS = 32  # while streams run and nothing has been measured
DEFAULT_SCALE_TOKENS = 4096.0
SCALE_RANGE = (256.0, 1e6)
SCALE_STEP = 0.2
TELLING = 0.05  # share of the contexts' mean square that must be variance before a fit is believed
OUTLIER = 4.0  # a step that took longer than this many times the estimate counts as that (compilation, paging)
QUIET_STEP_S = 1.0  # a chunk with nothing decoding takes about this long at most …
QUIET_TOKENS = 256  # … but has work for so many tokens: smaller chunks would use the device badly
GROWTH = 2.2  # a bounded chunk is at most this many times the largest one that was measured
FIRST_MARGIN = 1.5
MARGIN_UP, MARGIN_DOWN = 0.5, 0.05  # steps towards a worse and towards a better ratio


class StepCostModel:
    """Separates the time of decode rows from that of prompt tokens."""

    def __init__(self) -> None:
        self._decode_s: dict[int, float] = {}  # by bit length of the number of rows
        # Sums of x·x, x·z, z·z, x·y, z·y with x = tokens, z = tokens · context, y = seconds.
        self._xx = self._xz = self._zz = self._xy = self._zy = 0.0
        self._unit_s: float | None = None
        self._scale = DEFAULT_SCALE_TOKENS
        self._margin = FIRST_MARGIN
        self._most_work = 0.0

    @property
    def token_s(self) -> float | None:
        """Seconds per prompt token at context 0; None before the first measurement."""
        return self._unit_s

    @property
    def scale_tokens(self) -> float:
        return self._scale

    @property
    def known_work(self) -> float:
        """The largest work that was ever measured; what is far beyond it is a guess."""
        return self._most_work

    @property
    def margin(self) -> float:
        """Measured over expected time of chunks beside decode rows: what about one in ten of them exceeds."""
        return self._margin

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
            self._observe_prefill(decode_rows, prefill_tokens, context, duration_s - self.decode_s(decode_rows))
        elif decode_rows:
            bucket = decode_rows.bit_length()
            known = self._decode_s.get(bucket, duration_s)
            self._decode_s[bucket] = 0.8 * known + 0.2 * min(duration_s, OUTLIER * known)

    def _observe_prefill(self, decode_rows: int, tokens: int, context: float, seconds: float) -> None:
        if seconds <= 0:
            return
        work = tokens * (1 + context / self._scale)
        if self._unit_s is None:
            self._unit_s = seconds / work
        expected = self._unit_s * work
        seconds = min(seconds, OUTLIER * expected)
        if decode_rows:
            ratio = seconds / expected
            self._margin += (ratio - self._margin) * (MARGIN_UP if ratio > self._margin else MARGIN_DOWN)
        self._fit(float(tokens), tokens * context, seconds)
        work = tokens * (1 + context / self._scale)
        self._most_work = max(self._most_work, work)
        self._unit_s += (seconds / work - self._unit_s) * UNIT_STEP

    def _fit(self, x: float, z: float, y: float) -> None:
        """Add a measurement and move the scale towards what all of them say, if they can tell."""
        weight = 1.0 / x  # so that a token in a small chunk counts as much as one in a large chunk
        self._xx = FORGET * self._xx + weight * x * x
        self._xz = FORGET * self._xz + weight * x * z
        self._zz = FORGET * self._zz + weight * z * z
        self._xy = FORGET * self._xy + weight * x * y
        self._zy = FORGET * self._zy + weight * z * y
        determinant = self._xx * self._zz - self._xz * self._xz
        if determinant <= TELLING * self._xx * self._zz:
            return
        a = self._xy * self._zz - self._zy * self._xz
        b = self._zy * self._xx - self._xy * self._xz
        low, high = SCALE_RANGE
        found = low if a <= 0 else high if b * high <= a else max(low, a / b)
        self._scale *= (found / self._scale) ** SCALE_STEP


class PrefillBudget:
    """Sizes the chunks of a step.

    Work is counted in tokens at context 0: c tokens behind s earlier ones are c · (1 + (s + c/2) / scale).

    Args:
        prefill_step_size: tokens of a step, at most.
        max_decode_stall_ms: bound on a step's time while streams run; 0 or None: no bound.
        block_size: positions of a KV block.
        token_s: seconds of a prompt's token until a step has been measured; None: unknown.
    """

    def __init__(
        self,
        prefill_step_size: int,
        max_decode_stall_ms: float | None,
        block_size: int,
        token_s: float | None = None,
    ) -> None:
        self._step_size = prefill_step_size
        self._stall_s = max_decode_stall_ms / 1000 if max_decode_stall_ms else None
        self._block_size = block_size
        self._first_token_s = token_s
        self.cost = StepCostModel()

    def work(self, decode_rows: int) -> float:
        """Work that the prefill of this step may do, in tokens at context 0."""
        full = self._step_size * (1 + self._step_size / 2 / self.cost.scale_tokens)
        if not decode_rows:
            return min(full, self._quiet_work())
        if self._stall_s is None:
            return full
        token_s = self.cost.token_s
        if token_s is None:
            return float(min(self._step_size, FIRST_CHUNK_TOKENS))
        room_s = max(0.0, self._stall_s - self.cost.decode_s(decode_rows))
        return min(full, room_s / (token_s * self.cost.margin), GROWTH * self.cost.known_work)

    def _quiet_work(self) -> float:
        token_s = self.cost.token_s or self._first_token_s
        return max(QUIET_TOKENS, QUIET_STEP_S / token_s) if token_s else math.inf

    def chunk(self, work: float, start: int) -> int:
        """Tokens behind ``start`` earlier ones that cost this much: the positive root of the formula for work."""
        scale = self.cost.scale_tokens
        linear = 1 + start / scale
        tokens = int(scale * (math.sqrt(linear * linear + 2 * work / scale) - linear) + 1e-6)
        return max(min(MIN_CHUNK_TOKENS, self._step_size), min(self._step_size, tokens))

    def round_chunk(self, tokens: int, remaining: int) -> int:
        """The chunk to run: all that remains, or whole blocks (shapes repeat, blocks become shareable early)."""
        if tokens >= remaining:
            return remaining
        return max(tokens - tokens % self._block_size, min(tokens, self._block_size))
