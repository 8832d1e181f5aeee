"""Source of paged decode attention over packed pools by tensor cores, CUDA only.

The same grid, splits, inputs and outputs as ``paged_decode_source.py``; what differs is a warp's work, which is so
small that the bytes of the pool are what it waits for:

    tile     a warp takes 16 tokens of one block at a time, U tiles of them at once
    scores   queries [8, 16 elements] x codes [16 elements, 8 tokens] (``mma.sync`` m16n8k16; half of its 16 rows
             are zero). A code c becomes the half-precision number 1024 + c, exactly, by being put among its
             mantissa bits, and is multiplied as it is: with query q, scale s, bias b and a sum over a group,
                 q . (s c + b) = s (q . (1024 + c)) + (b - 1024 s) sum(q)
    values   weights [8, 16 tokens] x codes [16 tokens, 8 elements]: a weight is the softmax's times the token's
             scale, in half precision; 1024 times the sum of those rounded weights is taken off again, and
             biases are summed in float32. Scales are taken relative to one of them, raised when a token's is
             SPREAD times larger, so that neither overflows
    lanes    with g = lane / 4 and t = lane % 4 a lane reads 16 codes of the keys of tokens g and g + 8 and 8 codes
             of the values of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: the sums over elements and tokens do not
             notice their order, so codes become fragments where they are and nothing is shuffled
    end      as there: warps combine by their maxima, a second kernel combines the splits

Queries are exact in half precision up to its range (65504). Sums are float32, exponentials of base 2.
"""

from __future__ import annotations

from headrace.runner.kernel_language import CUDA_NAMES
from headrace.runner.small_rows_source import MACHINE

# Elements that a scale is for; widths are multiples of it.
GROUP = 64

HEADER = (
    MACHINE
    + CUDA_NAMES
    + """
#define UNROLL _Pragma("unroll")
#ifdef __CUDACC__
DEVICE float EXP2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
template <int N> struct alignas(N * 4) Words { unsigned w[N]; };
template <typename S, int N> struct alignas(sizeof(S) * N) Groups { S v[N]; };
template <int N> struct Bits {};
// Two numbers in half precision, and their sum as rounded.
DEVICE unsigned halves(float x, float y, float& sum) {
  const __half pair[2] = {__half(x), __half(y)};
  sum += float(pair[0]) + float(pair[1]);
  return *reinterpret_cast<const unsigned*>(pair);
}
DEVICE float in_range(float x) { return MIN(MAX(x, -65504.0f), 65504.0f); }
// 1024 + two bytes of x: those that the selector names; 1024 + two nibbles of x, the lowest of each half.
#define BYTES(x, which) __byte_perm(x, 0x64646464u, which)
#define NIBBLES(x) (((x) & 0x000f000fu) | 0x64006400u)
// Which of 16 codes step s has in register e, half h, of a fragment of keys; and that register.
DEVICE int code_at(Bits<8>, int s, int e, int h) { return s * 4 + e * 2 + h; }
DEVICE int code_at(Bits<4>, int s, int e, int h) { return s / 2 * 8 + s % 2 * 2 + e + h * 4; }
DEVICE unsigned key_codes(Words<4> x, int s, int e) { return BYTES(x.w[s], e == 0 ? 0x4140u : 0x4342u); }
DEVICE unsigned key_codes(Words<2> x, int s, int e) { return NIBBLES(x.w[s / 2] >> (s % 2 * 8 + e * 4)); }
// Code j of 8 of two tokens.
DEVICE unsigned value_codes(Words<2> x, Words<2> y, int j) {
  const unsigned pairs = __byte_perm(x.w[j / 4], y.w[j / 4], j % 4 < 2 ? 0x5140u : 0x7362u);
  return BYTES(pairs, j % 2 == 0 ? 0x4140u : 0x4342u);
}
DEVICE unsigned value_codes(Words<1> x, Words<1> y, int j) {
  return NIBBLES(__byte_perm(x.w[0], y.w[0], j < 4 ? 0x5410u : 0x7632u) >> (j % 4 * 4));
}
DEVICE float quad_sum(float x) {
  x += SHUFFLE_XOR(x, 1);
  return x + SHUFFLE_XOR(x, 2);
}
DEVICE float quad_most(float x) {
  x = MAX(x, SHUFFLE_XOR(x, 1));
  return MAX(x, SHUFFLE_XOR(x, 2));
}
"""
)

# Constants, inputs and outputs: those of ``paged_decode_source.DECODE_BODY``, packed, without LP, GK and GV; BITS
# is a constant. GT is at most 8.
BODY = """
  constexpr int WARPS = 4;
  constexpr int PARTS = G / GT;
  constexpr int STEP = WARPS * 16;
  constexpr int CK = DK / 64;
  constexpr int CV = DV / 64;
  constexpr float HIDDEN = -1e30f;
  constexpr float LOG2E = 1.44269504f;
  constexpr float OFFSET = 1024.0f;
  constexpr float SPREAD = 256.0f;
  SHARED float sums[GT * DV];
  SHARED float tops[WARPS * GT];
  SHARED float weights[WARPS * GT];

  const int index = int(thread_position_in_threadgroup.x);
  const int warp = index / 32;
  const int g = index % 32 / 4;
  const int t = index % 4;
  const int split = int(threadgroup_position_in_grid.x);
  const int kv_head = int(threadgroup_position_in_grid.y) / PARTS;
  const int first_query = kv_head * G + (int(threadgroup_position_in_grid.y) % PARTS) * GT;
  const int row = int(threadgroup_position_in_grid.z);
  const int width = sizes[0];
  const int splits = sizes[1];
  const int window = sizes[2];
  const float softcap = params[1];
  const float factor = HAS_SOFTCAP ? params[0] / softcap : params[0] * LOG2E;

  const int base = bases[row];
  const int high = ends[row] - base;
  const int low = (window > 0 && high > window) ? high - window : 0;
  const int share = (high - low + splits - 1) / splits;
  const int begin = low + split * share;
  const int stop = begin + share < high ? begin + share : high;

  unsigned query[CK][4][2];
  float query_sum[CK];
  UNROLL for (int c = 0; c < CK; ++c) {
    float sum = 0.0f;
    UNROLL for (int s = 0; s < 4; ++s) {
      UNROLL for (int e = 0; e < 2; ++e) {
        float x[2];
        UNROLL for (int h = 0; h < 2; ++h) {
          const int dim = c * 64 + t * 16 + code_at(Bits<BITS>(), s, e, h);
          x[h] = g < GT ? in_range(float(q[(row * KV * G + first_query + g) * DK + dim])) : 0.0f;
        }
        query[c][s][e] = halves(x[0], x[1], sum);
      }
    }
    query_sum[c] = quad_sum(sum);
  }
  float total[CV][8][4];                  // of query g and elements 16 t + j and 16 t + 8 + j; then of none
  float rounded[CV], biased[CV];          // sums over this lane's tokens
  UNROLL for (int c = 0; c < CV; ++c) {
    rounded[c] = biased[c] = 0.0f;
    UNROLL for (int j = 0; j < 8; ++j)
      UNROLL for (int i = 0; i < 4; ++i) total[c][j][i] = 0.0f;
  }
  float top = HIDDEN, weight = 0.0f;
  float unit = 0.0f, per_unit = 0.0f;     // scales of values are counted in units

  const int first = begin < stop ? begin / 16 * 16 : stop;
  for (int from = first + warp * 16; from < stop; from += STEP * U) {
    Words<BITS / 2> key[U][2][CK];
    Words<BITS / 4> value[U][4][CV];
    Groups<S, CK> key_scale[U][4], key_bias[U][4];
    Groups<S, CV> value_scale[U][4], value_bias[U][4];
    UNROLL for (int u = 0; u < U; ++u) {
      // A tile lies in one block: its tokens are at fixed distances. Those not of this split are hidden below.
      const int tile = from + u * STEP;
      const unsigned position = unsigned(tile < stop ? tile : stop - 1);
      const unsigned block = unsigned(tables[row * width + int(position / unsigned(BS))]);
      const long place = long((block * BS + unsigned(tile) % unsigned(BS)) * KV + kv_head);
      UNROLL for (int n = 0; n < 2; ++n)
        UNROLL for (int c = 0; c < CK; ++c)
          key[u][n][c] = *reinterpret_cast<const Words<BITS / 2>*>(
              k + (place + g * KV) * (CK * 2 * BITS) + t * (BITS / 2) + (n * 8 * KV * CK + c) * (2 * BITS));
      const long pair = place + 2 * t * KV;
      UNROLL for (int i = 0; i < 4; ++i) {
        constexpr int STRIDES[4] = {0, KV, 8 * KV, 9 * KV};
        UNROLL for (int c = 0; c < CV; ++c)
          value[u][i][c] = *reinterpret_cast<const Words<BITS / 4>*>(
              v + pair * (CV * 2 * BITS) + g * (BITS / 4) + (STRIDES[i] * CV + c) * (2 * BITS));
        key_scale[u][i] = *reinterpret_cast<const Groups<S, CK>*>(ks + pair * CK + STRIDES[i] * CK);
        key_bias[u][i] = *reinterpret_cast<const Groups<S, CK>*>(kb + pair * CK + STRIDES[i] * CK);
        value_scale[u][i] = *reinterpret_cast<const Groups<S, CV>*>(vs + pair * CV + STRIDES[i] * CV);
        value_bias[u][i] = *reinterpret_cast<const Groups<S, CV>*>(vb + pair * CV + STRIDES[i] * CV);
      }
    }
    UNROLL for (int u = 0; u < U; ++u) {
      float score[4];
      bool hidden[4];                     // whatever the pool holds there
      float now = top;
      UNROLL for (int n = 0; n < 2; ++n) {
        score[2 * n] = score[2 * n + 1] = 0.0f;
        UNROLL for (int c = 0; c < CK; ++c) {
          float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
          UNROLL for (int s = 0; s < 4; ++s)
            multiply(part, query[c][s][0], 0u, query[c][s][1], 0u, key_codes(key[u][n][c], s, 0),
                     key_codes(key[u][n][c], s, 1), (const __half*)(nullptr));
          UNROLL for (int i = 0; i < 2; ++i) {
            const float scale = float(key_scale[u][2 * n + i].v[c]);
            const float bias = float(key_bias[u][2 * n + i].v[c]) - OFFSET * scale;
            score[2 * n + i] += scale * part[i] + bias * query_sum[c];
          }
        }
      }
      UNROLL for (int i = 0; i < 4; ++i) {
        score[i] *= factor;
        if (HAS_SOFTCAP) score[i] = softcap * LOG2E * tanhf(score[i]);
        const int token = from + u * STEP + 2 * t + i % 2 + i / 2 * 8;
        hidden[i] = token < begin || token >= stop;
        if (hidden[i]) score[i] = HIDDEN;
        now = MAX(now, score[i]);
      }
      now = quad_most(now);
      const float correction = EXP2(top - now);
      top = now;
      weight *= correction;
      float widest = 0.0f;
      float scale[4][CV];
      UNROLL for (int i = 0; i < 4; ++i) {
        score[i] = EXP2(score[i] - now);
        weight += score[i];
        UNROLL for (int c = 0; c < CV; ++c) {
          scale[i][c] = hidden[i] ? 0.0f : float(value_scale[u][i].v[c]);
          widest = MAX(widest, ABS(scale[i][c]));
        }
      }
      float shrink = correction;
      if (__any_sync(0xffffffffu, widest > SPREAD * unit)) {  // the same tokens in each four lanes
        const float fresh = MAX(quad_most(widest), unit);
        shrink *= unit / fresh;
        unit = fresh;
        per_unit = 1.0f / fresh;
      }
      UNROLL for (int c = 0; c < CV; ++c) {
        float share[4];
        biased[c] *= correction;
        rounded[c] *= shrink;
        UNROLL for (int i = 0; i < 4; ++i) {
          share[i] = score[i] * (scale[i][c] * per_unit);
          biased[c] += hidden[i] ? 0.0f : score[i] * float(value_bias[u][i].v[c]);
        }
        const unsigned early = halves(share[0], share[1], rounded[c]);
        const unsigned late = halves(share[2], share[3], rounded[c]);
        UNROLL for (int j = 0; j < 8; ++j) {
          total[c][j][0] *= shrink;
          total[c][j][1] *= shrink;
          multiply(total[c][j], early, 0u, late, 0u, value_codes(value[u][0][c], value[u][1][c], j),
                   value_codes(value[u][2][c], value[u][3][c], j), (const __half*)(nullptr));
        }
      }
    }
  }

  weight = quad_sum(weight);
  UNROLL for (int c = 0; c < CV; ++c) {
    rounded[c] = quad_sum(rounded[c]);
    biased[c] = quad_sum(biased[c]);
  }
  if (t == 0 && g < GT) {
    tops[warp * GT + g] = top;
    weights[warp * GT + g] = weight;
  }
  BARRIER();
  float most = HIDDEN;
  if (g < GT)
    for (int w = 0; w < WARPS; ++w) most = MAX(most, tops[w * GT + g]);
  const float correction = EXP2(top - most);
  for (int w = 0; w < WARPS; ++w) {
    if (warp == w && g < GT) {
      UNROLL for (int c = 0; c < CV; ++c) {
        UNROLL for (int j = 0; j < 8; ++j) {
          UNROLL for (int h = 0; h < 2; ++h) {
            const int at = g * DV + c * 64 + t * 16 + h * 8 + j;
            const float x = (unit * (total[c][j][h] - OFFSET * rounded[c]) + biased[c]) * correction;
            sums[at] = w == 0 ? x : sums[at] + x;
          }
        }
      }
    }
    BARRIER();
  }
  for (int i = index; i < GT * DV; i += WARPS * 32) {
    const int one = i / DV;
    const int dim = i % DV;
    float sum = sums[i];
    float greatest = tops[one];
    for (int w = 1; w < WARPS; ++w) greatest = MAX(greatest, tops[w * GT + one]);
    float all = 0.0f;
    for (int w = 0; w < WARPS; ++w) all += weights[w * GT + one] * EXP2(tops[w * GT + one] - greatest);
    const int head = row * KV * G + first_query + one;
#ifdef WHOLE
      if (HAS_SINKS) {
        const float sink = float(sinks[first_query + one]) * LOG2E;
        const float all_most = MAX(greatest, sink);
        const float by = EXP2(greatest - all_most);
        sum *= by;
        all = all * by + EXP2(sink - all_most);
      }
      out[head * DV + dim] = T(sum / all);
#else
      part_out[(long(head) * splits + split) * DV + dim] = sum;
      if (dim == 0) {
        stats[(head * splits + split) * 2] = greatest;
        stats[(head * splits + split) * 2 + 1] = all;
      }
#endif
  }
"""
