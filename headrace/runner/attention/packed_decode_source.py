"""Source of paged decode attention over packed pools by tensor cores, CUDA only.

The same grid, splits, inputs and outputs as ``paged_decode_source.py``; what differs is a warp's work, which is so
small that the bytes of the pool are what it waits for:

    tile     a warp takes 16 tokens of one block at a time, U tiles of them at once
    scores   codes [16 tokens, 16 elements] x queries [16 elements, 8] (``mma.sync`` m16n8k16). A code c becomes
             the half-precision number 1024 + c, exactly, by being put among its mantissa bits, and is multiplied
             as it is: with query q, scale s, bias b and a sum over a group,
                 q . (s c + b) = s (q . (1024 + c)) + (b - 1024 s) sum(q)
    values   codes [16 elements, 16 tokens] x weights [16 tokens, 8 queries]: a weight is the softmax's times the
             token's scale, in half precision; 1024 times the sum of those rounded weights is taken off again, and
             biases are summed in float32. Scales are taken relative to one of them, raised when a token's is
             SPREAD times larger, so that neither overflows
    lanes    with g = lane / 4 and t = lane % 4 a lane reads 16 codes of the keys of tokens g and g + 8 and 8 codes
             of the values of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: the sums over elements and tokens do not
             notice their order, so codes become fragments where they are. Scores come out with tokens as rows and
             go in with tokens as columns (``movmatrix``); nothing else moves between lanes but maxima
    end      as there: warps combine by their maxima, a second kernel combines the splits

Queries are exact in half precision up to its range (65504). Sums are float32, exponentials of base 2.
"""

from __future__ import annotations

from headrace.runner.kernel_language import CUDA_NAMES
from headrace.runner.small_rows_source import MACHINE

# Elements that a scale is for; widths are multiples of it.
GROUP = 64

UNROLL_AND_EXP2 = """
#define UNROLL _Pragma("unroll")
#ifdef __CUDACC__
DEVICE float EXP2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
"""

HEADER = (
    MACHINE
    + CUDA_NAMES
    + UNROLL_AND_EXP2
    + """
#ifdef __CUDACC__
// A matrix of 8 x 8 half-precision numbers, row g in the lanes of g, turned over.
DEVICE unsigned transposed(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
#endif
template <int N> struct alignas(N * 4) Words { unsigned w[N]; };
template <typename S, int N> struct alignas(sizeof(S) * N) Groups { S v[N]; };
template <int N> struct Bits {};
// Two numbers in half precision, which are added to sums as rounded.
DEVICE unsigned halves(float x, float y, float& sum_x, float& sum_y) {
  const __half pair[2] = {__half(x), __half(y)};
  sum_x += float(pair[0]);
  sum_y += float(pair[1]);
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
// Over the lanes of equal t.
DEVICE float sum_of_tokens(float x) {
  x += SHUFFLE_XOR(x, 4);
  x += SHUFFLE_XOR(x, 8);
  return x + SHUFFLE_XOR(x, 16);
}
DEVICE float most_of_tokens(float x) {
  x = MAX(x, SHUFFLE_XOR(x, 4));
  x = MAX(x, SHUFFLE_XOR(x, 8));
  return MAX(x, SHUFFLE_XOR(x, 16));
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
  SHARED float sums_of_queries[CK * 8];

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

  unsigned query[CK][4][2];               // 16 codes' worth of query g
  UNROLL for (int c = 0; c < CK; ++c) {
    float sum = 0.0f;
    UNROLL for (int s = 0; s < 4; ++s) {
      UNROLL for (int e = 0; e < 2; ++e) {
        float x[2];
        UNROLL for (int h = 0; h < 2; ++h) {
          const int dim = c * 64 + t * 16 + code_at(Bits<BITS>(), s, e, h);
          x[h] = g < GT ? in_range(float(q[(row * KV * G + first_query + g) * DK + dim])) : 0.0f;
        }
        query[c][s][e] = halves(x[0], x[1], sum, sum);
      }
    }
    sum += SHUFFLE_XOR(sum, 1);
    sum += SHUFFLE_XOR(sum, 2);
    if (warp == 0 && t == 0) sums_of_queries[c * 8 + g] = sum;
  }
  BARRIER();
  // From here on a lane has queries 2 t and 2 t + 1 (h) and tokens g and g + 8 (n) of a tile.
  float query_sum[CK][2];
  UNROLL for (int c = 0; c < CK; ++c)
    UNROLL for (int h = 0; h < 2; ++h) query_sum[c][h] = sums_of_queries[c * 8 + 2 * t + h];
  float total[CV][4][4];                  // elements 8 g + 2 j + r of query h at [j][2 r + h]
  float rounded[CV][2], biased[CV][2];    // sums over this lane's tokens
  float top[2] = {HIDDEN, HIDDEN}, weight[2] = {0.0f, 0.0f};
  float unit = 0.0f, per_unit = 0.0f;     // scales of values are counted in units
  UNROLL for (int c = 0; c < CV; ++c) {
    UNROLL for (int h = 0; h < 2; ++h) rounded[c][h] = biased[c][h] = 0.0f;
    UNROLL for (int j = 0; j < 4; ++j)
      UNROLL for (int i = 0; i < 4; ++i) total[c][j][i] = 0.0f;
  }

  const int first = begin < stop ? begin / 16 * 16 : stop;
  for (int from = first + warp * 16; from < stop; from += STEP * U) {
    Words<BITS / 2> key[U][2][CK];
    Words<BITS / 4> value[U][4][CV];
    Groups<S, CK> key_scale[U][2], key_bias[U][2];
    Groups<S, CV> value_scale[U][2], value_bias[U][2];
    UNROLL for (int u = 0; u < U; ++u) {
      // A tile lies in one block: its tokens are at fixed distances. Those not of this split are hidden below.
      const int tile = from + u * STEP;
      const unsigned position = unsigned(tile < stop ? tile : stop - 1);
      const unsigned block = unsigned(tables[row * width + int(position / unsigned(BS))]);
      const long place = long((block * BS + unsigned(tile) % unsigned(BS)) * KV + kv_head);
      const long own = place + g * KV;
      UNROLL for (int n = 0; n < 2; ++n) {
        UNROLL for (int c = 0; c < CK; ++c)
          key[u][n][c] = *reinterpret_cast<const Words<BITS / 2>*>(
              k + own * (CK * 2 * BITS) + t * (BITS / 2) + (n * 8 * KV * CK + c) * (2 * BITS));
        key_scale[u][n] = *reinterpret_cast<const Groups<S, CK>*>(ks + own * CK + n * 8 * KV * CK);
        key_bias[u][n] = *reinterpret_cast<const Groups<S, CK>*>(kb + own * CK + n * 8 * KV * CK);
        value_scale[u][n] = *reinterpret_cast<const Groups<S, CV>*>(vs + own * CV + n * 8 * KV * CV);
        value_bias[u][n] = *reinterpret_cast<const Groups<S, CV>*>(vb + own * CV + n * 8 * KV * CV);
      }
      UNROLL for (int i = 0; i < 4; ++i) {  // tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
        UNROLL for (int c = 0; c < CV; ++c)
          value[u][i][c] = *reinterpret_cast<const Words<BITS / 4>*>(
              v + (place + 2 * t * KV) * (CV * 2 * BITS) + g * (BITS / 4) +
              ((i % 2 + i / 2 * 8) * KV * CV + c) * (2 * BITS));
      }
    }
    UNROLL for (int u = 0; u < U; ++u) {
      float score[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
      bool hidden[2];                     // whatever the pool holds there
      UNROLL for (int c = 0; c < CK; ++c) {
        float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL for (int s = 0; s < 4; ++s)
          multiply(part, key_codes(key[u][0][c], s, 0), key_codes(key[u][1][c], s, 0),
                   key_codes(key[u][0][c], s, 1), key_codes(key[u][1][c], s, 1), query[c][s][0], query[c][s][1],
                   (const __half*)(nullptr));
        UNROLL for (int n = 0; n < 2; ++n) {
          const float scale = float(key_scale[u][n].v[c]);
          const float bias = float(key_bias[u][n].v[c]) - OFFSET * scale;
          UNROLL for (int h = 0; h < 2; ++h)
            score[n][h] += scale * part[2 * n + h] + bias * query_sum[c][h];
        }
      }
      float widest = 0.0f;
      float scale[2][CV], bias[2][CV];
      UNROLL for (int n = 0; n < 2; ++n) {
        const int token = from + u * STEP + g + 8 * n;
        hidden[n] = token < begin || token >= stop;
        UNROLL for (int h = 0; h < 2; ++h) {
          score[n][h] *= factor;
          if (HAS_SOFTCAP) score[n][h] = softcap * LOG2E * tanhf(score[n][h]);
          if (hidden[n]) score[n][h] = HIDDEN;
        }
        UNROLL for (int c = 0; c < CV; ++c) {
          scale[n][c] = hidden[n] ? 0.0f : float(value_scale[u][n].v[c]);
          bias[n][c] = hidden[n] ? 0.0f : float(value_bias[u][n].v[c]);
          widest = MAX(widest, ABS(scale[n][c]));
        }
      }
      float correction[2], shrink[2];
      UNROLL for (int h = 0; h < 2; ++h) {
        const float now = most_of_tokens(MAX(top[h], MAX(score[0][h], score[1][h])));
        shrink[h] = correction[h] = EXP2(top[h] - now);
        top[h] = now;
        UNROLL for (int n = 0; n < 2; ++n) score[n][h] = EXP2(score[n][h] - now);
        weight[h] = weight[h] * correction[h] + (score[0][h] + score[1][h]);
      }
      if (__any_sync(0xffffffffu, widest > SPREAD * unit)) {
        const float fresh = MAX(most_of_tokens(widest), unit);
        UNROLL for (int h = 0; h < 2; ++h) shrink[h] *= unit / fresh;
        unit = fresh;
        per_unit = 1.0f / fresh;
      }
      UNROLL for (int c = 0; c < CV; ++c) {
        unsigned shares[2];
        UNROLL for (int h = 0; h < 2; ++h) {
          rounded[c][h] *= shrink[h];
          biased[c][h] = biased[c][h] * correction[h] + score[0][h] * bias[0][c] + score[1][h] * bias[1][c];
        }
        UNROLL for (int n = 0; n < 2; ++n) {
          const float by = scale[n][c] * per_unit;
          shares[n] = transposed(halves(score[n][0] * by, score[n][1] * by, rounded[c][0], rounded[c][1]));
        }
        UNROLL for (int j = 0; j < 4; ++j) {
          UNROLL for (int i = 0; i < 4; ++i) total[c][j][i] *= shrink[i % 2];
          multiply(total[c][j], value_codes(value[u][0][c], value[u][1][c], 2 * j),
                   value_codes(value[u][0][c], value[u][1][c], 2 * j + 1),
                   value_codes(value[u][2][c], value[u][3][c], 2 * j),
                   value_codes(value[u][2][c], value[u][3][c], 2 * j + 1), shares[0], shares[1],
                   (const __half*)(nullptr));
        }
      }
    }
  }

  UNROLL for (int h = 0; h < 2; ++h) {
    weight[h] = sum_of_tokens(weight[h]);
    UNROLL for (int c = 0; c < CV; ++c) {
      rounded[c][h] = sum_of_tokens(rounded[c][h]);
      biased[c][h] = sum_of_tokens(biased[c][h]);
    }
    if (g == 0 && 2 * t + h < GT) {
      tops[warp * GT + 2 * t + h] = top[h];
      weights[warp * GT + 2 * t + h] = weight[h];
    }
  }
  BARRIER();
  float correction[2];
  UNROLL for (int h = 0; h < 2; ++h) {
    float most = HIDDEN;
    if (2 * t + h < GT)
      for (int w = 0; w < WARPS; ++w) most = MAX(most, tops[w * GT + 2 * t + h]);
    correction[h] = EXP2(top[h] - most);
  }
  for (int w = 0; w < WARPS; ++w) {
    UNROLL for (int h = 0; h < 2; ++h) {
      if (warp != w || 2 * t + h >= GT) continue;
      UNROLL for (int c = 0; c < CV; ++c) {
        UNROLL for (int i = 0; i < 8; ++i) {
          const int at = (2 * t + h) * DV + c * 64 + g * 8 + i;
          const float codes = total[c][i / 2][i % 2 * 2 + h] - OFFSET * rounded[c][h];
          const float x = (unit * codes + biased[c][h]) * correction[h];
          sums[at] = w == 0 ? x : sums[at] + x;
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
