"""Source of the kernel between a query-key-value product and its attention (``rotate_store.py``), CUDA and Metal.

A thread block handles ``EACH`` heads of one token, a thread one element of each of them, so that an angle's sine
and cosine are computed once for all. The forms differ in which token a block has and where queries go:

    step     one token per row
    chunk    several per row; queries head by head, as kernels over the pool read them
    prompt   several per row, which are attended over keys and values as they are made: those are given out too,
             all token by token. Rows and positions that are given out beyond the forward's own repeat its first
             row and a row's last token; the pool is not written for them

Where the pool is packed, a key or value head is packed before it is written, as ``kv/packing.py`` says and with
the arithmetic of ``mx.quantize`` on CUDA, in float32: of a group from ``low`` to ``high`` the end farther from
zero is ``edge``; the step is ``(high - low) / largest code``, negative where the edge is ``high``; then it is
moved so that zero has a code, to ``edge / round(edge / step)``, and ``edge`` is the bias. Groups that reach no
zero keep their true ends, where MLX on CUDA stretches those below zero up to it.
"""

from __future__ import annotations

from typing import Literal

Form = Literal["step", "chunk", "prompt"]

# Constants: T, D head size, THREADS (D rounded up to whole warps), H and KV heads, EACH a divisor of H + 2 KV,
# ROT rotated elements, PAIRS (1: neighbours rotate together, 0: halves), NORM (1: query and key heads are
# normalized). Grid: positions, rows, heads / EACH blocks; positions and rows of the forward, or more (prompt).
# Inputs: qkv [B * L, (H + 2 KV) * D] of T, k and v [slots, KV, D] of T (written), slots [B * L] and offsets [B]
# int32, inv_freq [ROT / 2] float32, q_norm and k_norm [D] of T (read where NORM), params float32 (position scale,
# epsilon), mark. Outputs: queries [B, H, L, D] of T (prompt: queries [R, P, H, D], keys and values [R, P, KV, D]),
# after [MARKS] int32, zeros.
# Packed: THREADS is the padded D, S the type of scales and biases, BITS of a code, GROUP elements that share a
# scale; k and v are codes [slots, KV, words] uint32, each followed by scales and biases [slots, KV, groups] of S.
_PLACES: dict[Form, str] = {
    "step": """
  const int row = int(threadgroup_position_in_grid.y);
  const long token = row;
  const int position = offsets[row];
  const long query = token * H * D;
  constexpr long query_head = D;
""",
    "chunk": """
  const int length = int(qkv_shape[0]) / int(offsets_shape[0]);
  const int row = int(threadgroup_position_in_grid.y);
  const int at = int(threadgroup_position_in_grid.x);
  const long token = long(row) * length + at;
  const int position = offsets[row] + at;
  const long query = (long(row) * H * length + at) * D;
  const long query_head = long(length) * D;
""",
    "prompt": """
  const int rows = int(offsets_shape[0]);
  const int length = int(qkv_shape[0]) / rows;
  const int out_row = int(threadgroup_position_in_grid.y);
  const int out_at = int(threadgroup_position_in_grid.x);
  const int row = out_row < rows ? out_row : 0;
  const int at = out_at < length ? out_at : length - 1;
  const bool is_own = out_row < rows && out_at < length;
  const long token = long(row) * length + at;
  const int position = offsets[row] + at;
  const long given = long(out_row) * int(threadgroups_per_grid.x) + out_at;
  const long query = given * H * D;
  constexpr long query_head = D;
""",
}
_ROTATED = """
  SHARED float elements[EACH * THREADS];
  SHARED float sums[EACH * (THREADS / 32)];
  const int i = int(thread_position_in_threadgroup.x);
  const int first = int(threadgroup_position_in_grid.z) * EACH;
  const bool holds = i < D;
  float x[EACH];
  #pragma unroll
  for (int e = 0; e < EACH; ++e) x[e] = holds ? float(qkv[(token * (H + 2 * KV) + first + e) * D + i]) : 0.0f;
  if (NORM && first < H + KV) {
    #pragma unroll
    for (int e = 0; e < EACH; ++e) {
      float sum = x[e] * x[e];
      for (int mask = 16; mask > 0; mask /= 2) sum += SHUFFLE_XOR(sum, mask);
      if (i % 32 == 0) sums[e * (THREADS / 32) + i / 32] = sum;
    }
    BARRIER();
    #pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (first + e >= H + KV) continue;
      float sum = 0.0f;
      for (int w = 0; w < THREADS / 32; ++w) sum += sums[e * (THREADS / 32) + w];
      const float weight = !holds ? 0.0f : first + e < H ? float(q_norm[i]) : float(k_norm[i]);
      x[e] = float(T(x[e] * RSQRT(sum / float(D) + params[1]) * weight));
    }
  }
  #pragma unroll
  for (int e = 0; e < EACH; ++e) elements[e * THREADS + i] = x[e];
  BARRIER();
  if (first < H + KV && i < ROT) {
    const int pair = PAIRS ? i / 2 : i % (ROT / 2);
    const bool second = PAIRS ? i % 2 == 1 : i >= ROT / 2;
    const int partner = PAIRS ? (i ^ 1) : (second ? i - ROT / 2 : i + ROT / 2);
    const float angle = float(position) * params[0] * inv_freq[pair];
    const float c = COS(angle);
    const float s = SIN(angle);
    #pragma unroll
    for (int e = 0; e < EACH; ++e) {
      if (first + e >= H + KV) continue;
      const float other = elements[e * THREADS + partner];
      x[e] = second ? other * s + x[e] * c : x[e] * c - other * s;
    }
  }
"""
_AFTER = """
  if (first == 0 && token == 0 && i < MARKS) after[i] = 0;
"""
# What is done with each head; a key or value head goes on with one of the texts below, which close the loop.
_EACH_HEAD = """
  #pragma unroll
  for (int e = 0; e < EACH; ++e) {
    const int head = first + e;
    const bool rotates = head < H + KV;
    if (head < H) {
      if (holds) queries[query + head * query_head + i] = T(x[e]);
      continue;
    }
    const int kv_head = rotates ? head - H : head - H - KV;
"""
_GIVEN = """
    if (holds) (rotates ? keys : values)[(given * KV + kv_head) * D + i] = T(x[e]);
    if (!is_own) continue;
"""
_STORED = """
    if (holds) {
      const long place = (long(slots[token]) * KV + kv_head) * D + i;
      if (rotates) ((WRITABLE(T)*)(k))[place] = T(x[e]);
      else ((WRITABLE(T)*)(v))[place] = T(x[e]);
    }
  }
"""
_ENDS = """
  SHARED float ends[EACH * (THREADS / 16)];  // low and high of every 32 elements
"""
_PACKED = """
    constexpr int CODES = 32 / BITS;  // of a word
    constexpr float MOST = float((1 << BITS) - 1);
    const float element = holds ? float(T(x[e])) : 0.0f;
    float low = element, high = element;
    for (int mask = 16; mask > 0; mask /= 2) {
      low = MIN(low, SHUFFLE_XOR(low, mask));
      high = MAX(high, SHUFFLE_XOR(high, mask));
    }
    if (GROUP > 32) {
      const int own = e * (THREADS / 16);
      if (i % 32 == 0) {
        ends[own + i / 16] = low;
        ends[own + i / 16 + 1] = high;
      }
      BARRIER();
      for (int w = i / GROUP * (GROUP / 32); w < (i / GROUP + 1) * (GROUP / 32); ++w) {
        low = MIN(low, ends[own + 2 * w]);
        high = MAX(high, ends[own + 2 * w + 1]);
      }
    }
    const bool below = ABS(low) > ABS(high);
    const float edge = below ? low : high;
    const float least = MAX((high - low) / MOST, 1e-7f);
    const float step = below ? least : -least;
    const float steps = ROUND(edge / step);
    const float scale = steps == 0.0f ? step : edge / steps;
    const float bias = steps == 0.0f ? 0.0f : edge;
    unsigned word = unsigned(MIN(MAX(ROUND((element - bias) / scale), 0.0f), MOST)) << (i % CODES * BITS);
    for (int mask = 1; mask < CODES; mask *= 2) word |= SHUFFLE_XOR(word, mask);
    const long place = long(slots[token]) * KV + kv_head;
    if (i % CODES == 0) ((WRITABLE(unsigned)*)(rotates ? k : v))[place * (THREADS / CODES) + i / CODES] = word;
    if (i % GROUP == 0) {
      ((WRITABLE(S)*)(rotates ? ks : vs))[place * (THREADS / GROUP) + i / GROUP] = S(scale);
      ((WRITABLE(S)*)(rotates ? kb : vb))[place * (THREADS / GROUP) + i / GROUP] = S(bias);
    }
  }
"""


def body(form: Form, *, packed: bool) -> str:
    """The kernel over pools that hold vectors as they are, or packed (not of prompts: see ``reads_new``)."""
    assert not (packed and form == "prompt"), "what is packed is read from the pool"
    given = _GIVEN if form == "prompt" else ""
    stored = _ENDS + _EACH_HEAD + _PACKED if packed else _EACH_HEAD + given + _STORED
    return _PLACES[form] + _ROTATED + stored + _AFTER


def input_names(*, packed: bool) -> list[str]:
    pools = ["k", "ks", "kb", "v", "vs", "vb"] if packed else ["k", "v"]
    return ["qkv", *pools, "slots", "offsets", "inv_freq", "q_norm", "k_norm", "params", "mark"]


def output_names(form: Form) -> list[str]:
    return ["queries", *(["keys", "values"] if form == "prompt" else []), "after"]
