"""Source of the paged decode attention kernel: one body, a prelude for CUDA and one for Metal.

Algorithm (split over the context as in Flash-Decoding, Dao et al. 2023; online softmax, Milakov and Gimelshein
2018):

    grid      one thread block per (split of the context, KV head and part of its queries, row)
    block     WARPS warps that meet only at the end; a lane group of LP lanes reads one token, a lane 8 elements of
              it at a time
    batch     a lane group reads keys and values of U tokens at once (loads in flight are what reaches the
              bandwidth), sums the products over its lanes and goes on with its own maximum, sum and output
    end       lane groups and warps combine by their maxima; a second kernel combines the splits

K and V are read once for the GT queries that share a KV head. Packed vectors (``kv/packing.py``) are read packed:
a lane's 8 elements are one word (4 bits) or two, with one scale and bias. Positions come from the row's own
bounds, so splits of a short row next to a long one cost nothing. Accumulation is float32; exponentials are of
base 2.

The body uses only names that both preludes define, and names the thread's position itself, because MLX looks for
that in a Metal body. The Metal form has not been run on Metal: the check at start (``kernel_check.py``) decides
there.
"""

from __future__ import annotations

WARPS = 4

_COMMON = """
struct Floats { float v[8]; };
template <typename T> struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight { T v[8]; };
template <int N> struct alignas(N * 4) Words { unsigned w[N]; };
template <typename T> inline Floats widen(Eight<T> x) {
  Floats y;
  UNROLL for (int j = 0; j < 8; ++j) y.v[j] = float(x.v[j]);
  return y;
}
inline Floats unpack(Words<2> x, float scale, float bias) {
  Floats y;
  bias -= BYTE_OFFSET * scale;
  UNROLL for (int j = 0; j < 8; ++j) y.v[j] = BYTE_PLUS_OFFSET(x.w[j / 4], j % 4) * scale + bias;
  return y;
}
inline Floats unpack(Words<1> x, float scale, float bias) {
  Floats y;
  bias -= NIBBLE_OFFSET * scale;
  const unsigned even = x.w[0] & 0x0f0f0f0fu;
  const unsigned odd = (x.w[0] >> 4) & 0x0f0f0f0fu;
  UNROLL for (int j = 0; j < 8; ++j)
    y.v[j] = NIBBLE_PLUS_OFFSET(j % 2 == 0 ? even : odd, j / 2) * scale + bias;
  return y;
}
"""

# A byte becomes a float by being put among the mantissa bits of 32768 or (below 16) of 128: one instruction.
CUDA_PRELUDE = (
    """
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define POOL(type) const type
#define UNROLL _Pragma("unroll")
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_threadgroup threadIdx
#define TANH(x) tanhf(x)
#define MAX(a, b) fmaxf(a, b)
#define BYTE_OFFSET 32768.0f
#define BYTE_PLUS_OFFSET(word, j) __uint_as_float(__byte_perm(word, 0x47000000u, 0x7504u | ((j) << 4)))
#define NIBBLE_OFFSET 128.0f
#define NIBBLE_PLUS_OFFSET(word, j) __uint_as_float(__byte_perm(word, 0x43000000u, 0x7054u | ((j) << 8)))
#ifdef __CUDACC__
__device__ __forceinline__ float EXP2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif
"""
    + _COMMON
    + """
inline Floats widen(Eight<__nv_bfloat16> x) {  // an instruction an element; left alone, three for two
  const Words<4> pairs = *reinterpret_cast<const Words<4>*>(&x);
  Floats y;
  UNROLL for (int j = 0; j < 4; ++j) {
    y.v[2 * j] = __uint_as_float(pairs.w[j] << 16);
    y.v[2 * j + 1] = __uint_as_float(pairs.w[j] & 0xffff0000u);
  }
  return y;
}
"""
)

METAL_PRELUDE = (
    """
#define SHARED threadgroup
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(value, mask) simd_shuffle_xor(value, ushort(mask))
#define POOL(type) const device type
#define UNROLL _Pragma("clang loop unroll(full)")
#define EXP2(x) metal::fast::exp2(x)
#define TANH(x) metal::precise::tanh(x)
#define MAX(a, b) metal::max(a, b)
#define BYTE_OFFSET 0.0f
#define BYTE_PLUS_OFFSET(word, j) float(((word) >> ((j) * 8)) & 0xffu)
#define NIBBLE_OFFSET 0.0f
#define NIBBLE_PLUS_OFFSET(word, j) BYTE_PLUS_OFFSET(word, j)
"""
    + _COMMON
)


def defines(bits: int | None, *, whole: bool) -> str:
    """What stands between prelude and body: ``bits`` of a packed pool, ``whole``: one split writes the result."""
    lines = [] if bits is None else [f"#define BITS {bits}"]
    return "\n".join([*lines, *(["#define WHOLE"] if whole else []), ""])


# The last part of this body and of ``tile_decode_source.py``'s: sums of SLOTS parts of a block, each relative to
# the maximum beside it, become results. SUM_AT says where ``sums`` has an element of a part and query.
END = """
  for (int i = index; i < GT * DV; i += WARPS * 32) {
    const int one = i / DV;
    const int dim = i % DV;
    float most = tops[one];
    UNROLL for (int w = 1; w < SLOTS; ++w) most = MAX(most, tops[w * GT + one]);
    float weight_sum = 0.0f;
    float sum = 0.0f;
    UNROLL for (int w = 0; w < SLOTS; ++w) {
      const float by = EXP2(tops[w * GT + one] - most);
      weight_sum += weights[w * GT + one] * by;
      sum += sums[SUM_AT(w, one, dim)] * by;
    }
    const int head = row * KV * G + first_query + one;
#ifdef WHOLE
      if (HAS_SINKS) {
        const float sink = float(sinks[first_query + one]) * LOG2E;
        const float with_sink = MAX(most, sink);
        const float by = EXP2(most - with_sink);
        sum *= by;
        weight_sum = weight_sum * by + EXP2(sink - with_sink);
      }
      out[head * DV + dim] = T(sum / weight_sum);
#else
      part_out[(long(head) * splits + split) * DV + dim] = sum;
      if (dim == 0) {
        stats[(head * splits + split) * 2] = most;
        stats[(head * splits + split) * 2 + 1] = weight_sum;
      }
#endif
  }
"""

# Template constants: T, DK and DV elements of a key and a value, G queries per KV head, GT of them per block, KV
# heads, BS block size, LP lanes per token (a power of two), U tokens per lane group at once, HAS_SOFTCAP; WHOLE,
# HAS_SINKS; packed, S type of scales and biases, GK and GV elements that share one. What changes with the batch
# is an input, so that one compiled kernel serves all batches.
# Inputs: q [B, H, DK] of T, k [slots, KV, DK] and v [slots, KV, DV] of T, tables [B, width], bases [B], ends [B],
# sizes [3] int32 (table width, splits, window or 0), params [2] float32 (scale, softcap or 0), sinks [H] float32,
# mark (orders the kernel after writes; not read). Packed: k and v [slots, KV, words] uint32, each followed by
# scales and biases [slots, KV, groups] of S.
# Outputs: out [B, H, DV] of T (WHOLE), else part_out [B, H, splits, DV] and stats [B, H, splits, 2], float32.
DECODE_BODY = (
    """
  constexpr int WARPS = 4;
  constexpr int SLOTS = 1;
  constexpr int PARTS = G / GT;
  constexpr int TOKENS = 32 / LP;         // tokens that one warp reads at once
  constexpr int STEP = WARPS * TOKENS;    // tokens that the block reads at once
  constexpr int CK = (DK / 8 + LP - 1) / LP;
  constexpr int CV = (DV / 8 + LP - 1) / LP;
  constexpr float HIDDEN = -1e30f;
  constexpr float LOG2E = 1.44269504f;
  SHARED float sums[GT * CV * 8 * LP];
  SHARED float tops[WARPS * GT];
  SHARED float weights[WARPS * GT];

  const int index = int(thread_position_in_threadgroup.x);
  const int warp = index / 32;
  const int sub = index % 32 / LP;
  const int part = index % LP;
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

  float query[GT][CK * 8];
  float total[GT][CV * 8];
  float top[GT];
  float weight[GT];
  int key_at[CK];                         // a lane without elements of its own reads the first ones, for nothing
  int value_at[CV];
  UNROLL for (int c = 0; c < CK; ++c) key_at[c] = (c * LP + part) * 8 < DK ? (c * LP + part) * 8 : 0;
  UNROLL for (int c = 0; c < CV; ++c) value_at[c] = (c * LP + part) * 8 < DV ? (c * LP + part) * 8 : 0;
#ifdef BITS
  constexpr int GROUPS_K = (DK + GK - 1) / GK;
  constexpr int GROUPS_V = (DV + GV - 1) / GV;
  constexpr int WORDS_K = GROUPS_K * GK * BITS / 32;
  constexpr int WORDS_V = GROUPS_V * GV * BITS / 32;
#endif
  UNROLL for (int g = 0; g < GT; ++g) {
    top[g] = HIDDEN;
    weight[g] = 0.0f;
    UNROLL for (int c = 0; c < CK; ++c) {
      const bool holds = (c * LP + part) * 8 < DK;
      UNROLL for (int j = 0; j < 8; ++j) {
        const float x = float(q[(row * KV * G + first_query + g) * DK + key_at[c] + j]);
        query[g][c * 8 + j] = holds ? x * factor : 0.0f;
      }
    }
    UNROLL for (int j = 0; j < CV * 8; ++j) total[g][j] = 0.0f;
  }

  for (int from = begin + warp * TOKENS; from < stop; from += STEP * U) {
    unsigned place[U];                    // of the token's vectors, counted in vectors
    UNROLL for (int u = 0; u < U; ++u) {
      const int token = from + u * STEP + sub;
      const unsigned position = unsigned(token < stop ? token : stop - 1);
      const unsigned block = unsigned(tables[row * width + int(position / unsigned(BS))]);
      place[u] = (block * BS + position % unsigned(BS)) * KV + kv_head;
    }
#ifdef BITS
    Words<BITS / 4> key[U][CK];
    Words<BITS / 4> value[U][CV];
    S key_scale[U][CK], key_bias[U][CK], value_scale[U][CV], value_bias[U][CV];
    UNROLL for (int u = 0; u < U; ++u) {
      UNROLL for (int c = 0; c < CK; ++c) {
        POOL(unsigned)* at = k + key_at[c] * BITS / 32 + long(place[u]) * WORDS_K;
        key[u][c] = *reinterpret_cast<POOL(Words<BITS / 4>)*>(at);
        key_scale[u][c] = (ks + key_at[c] / GK)[long(place[u]) * GROUPS_K];
        key_bias[u][c] = (kb + key_at[c] / GK)[long(place[u]) * GROUPS_K];
      }
    }
    UNROLL for (int u = 0; u < U; ++u) {
      UNROLL for (int c = 0; c < CV; ++c) {
        POOL(unsigned)* at = v + value_at[c] * BITS / 32 + long(place[u]) * WORDS_V;
        value[u][c] = *reinterpret_cast<POOL(Words<BITS / 4>)*>(at);
        value_scale[u][c] = (vs + value_at[c] / GV)[long(place[u]) * GROUPS_V];
        value_bias[u][c] = (vb + value_at[c] / GV)[long(place[u]) * GROUPS_V];
      }
    }
#else
    Eight<T> key[U][CK];
    Eight<T> value[U][CV];
    UNROLL for (int u = 0; u < U; ++u)
      UNROLL for (int c = 0; c < CK; ++c)
        key[u][c] = *reinterpret_cast<POOL(Eight<T>)*>(k + key_at[c] + long(place[u]) * DK);
    UNROLL for (int u = 0; u < U; ++u)
      UNROLL for (int c = 0; c < CV; ++c)
        value[u][c] = *reinterpret_cast<POOL(Eight<T>)*>(v + value_at[c] + long(place[u]) * DV);
#endif
    float score[U][GT];
    UNROLL for (int u = 0; u < U; ++u) {
      UNROLL for (int g = 0; g < GT; ++g) score[u][g] = 0.0f;
      UNROLL for (int c = 0; c < CK; ++c) {
#ifdef BITS
        const Floats x = unpack(key[u][c], float(key_scale[u][c]), float(key_bias[u][c]));
#else
        const Floats x = widen(key[u][c]);
#endif
        UNROLL for (int j = 0; j < 8; ++j)
          UNROLL for (int g = 0; g < GT; ++g) score[u][g] += query[g][c * 8 + j] * x.v[j];
      }
    }
    UNROLL for (int mask = LP / 2; mask > 0; mask /= 2)
      UNROLL for (int u = 0; u < U; ++u)
        UNROLL for (int g = 0; g < GT; ++g) score[u][g] += SHUFFLE_XOR(score[u][g], mask);
    UNROLL for (int g = 0; g < GT; ++g) {
      float now = top[g];
      UNROLL for (int u = 0; u < U; ++u) {
        if (HAS_SOFTCAP) score[u][g] = softcap * LOG2E * TANH(score[u][g]);
        if (from + u * STEP + sub >= stop) score[u][g] = HIDDEN;
        now = MAX(now, score[u][g]);
      }
      const float correction = EXP2(top[g] - now);
      top[g] = now;
      weight[g] *= correction;
      UNROLL for (int j = 0; j < CV * 8; ++j) total[g][j] *= correction;
      UNROLL for (int u = 0; u < U; ++u) {
        score[u][g] = EXP2(score[u][g] - now);
        weight[g] += score[u][g];
      }
    }
    UNROLL for (int u = 0; u < U; ++u) {
      UNROLL for (int c = 0; c < CV; ++c) {
#ifdef BITS
        const Floats x = unpack(value[u][c], float(value_scale[u][c]), float(value_bias[u][c]));
#else
        const Floats x = widen(value[u][c]);
#endif
        UNROLL for (int j = 0; j < 8; ++j)
          UNROLL for (int g = 0; g < GT; ++g) total[g][c * 8 + j] += score[u][g] * x.v[j];
      }
    }
  }

  // A lane group that saw nothing has weights of its own making: its maximum is HIDDEN, which cancels them.
  UNROLL for (int g = 0; g < GT; ++g) {
    float most = top[g];
    UNROLL for (int mask = LP; mask < 32; mask *= 2) most = MAX(most, SHUFFLE_XOR(most, mask));
    const float correction = EXP2(top[g] - most);
    weight[g] *= correction;
    UNROLL for (int mask = LP; mask < 32; mask *= 2) weight[g] += SHUFFLE_XOR(weight[g], mask);
    UNROLL for (int j = 0; j < CV * 8; ++j) {
      total[g][j] *= correction;
      UNROLL for (int mask = LP; mask < 32; mask *= 2) total[g][j] += SHUFFLE_XOR(total[g][j], mask);
    }
    if (index % 32 == 0) {
      tops[warp * GT + g] = most;
      weights[warp * GT + g] = weight[g];
    }
    top[g] = most;
  }
  BARRIER();
  UNROLL for (int g = 0; g < GT; ++g) {
    float most = tops[g];
    UNROLL for (int w = 1; w < WARPS; ++w) most = MAX(most, tops[w * GT + g]);
    const float correction = EXP2(top[g] - most);
    UNROLL for (int j = 0; j < CV * 8; ++j) total[g][j] *= correction;
  }
  for (int w = 0; w < WARPS; ++w) {
    if (warp == w && sub == 0) {
      UNROLL for (int g = 0; g < GT; ++g) {
        UNROLL for (int j = 0; j < CV * 8; ++j) {
          const int at = (g * CV * 8 + j) * LP + part;
          sums[at] = w == 0 ? total[g][j] : sums[at] + total[g][j];
        }
      }
    }
    BARRIER();
  }
  // All warps' sums are one: of the greatest maximum.
  float greatest = HIDDEN;
  float all = 0.0f;
  if (index < GT) {
    for (int w = 0; w < WARPS; ++w) greatest = MAX(greatest, tops[w * GT + index]);
    for (int w = 0; w < WARPS; ++w) all += weights[w * GT + index] * EXP2(tops[w * GT + index] - greatest);
    tops[index] = greatest;
    weights[index] = all;
  }
  BARRIER();
#define SUM_AT(w, one, dim) \\
  ((one) * CV * 8 + (dim) / 8 / LP * 8 + (dim) % 8) * LP + (dim) / 8 % LP
"""
    + END
)

# Combines splits. Grid: one block of DV threads per (head, row). Constants: T, DV, H, HAS_SINKS.
# Inputs: parts [B, H, splits, DV], stats [B, H, splits, 2], sizes as above, sinks [H].
# Output: out [B, H, DV] of T.
COMBINE_BODY = """
  constexpr float LOG2E = 1.44269504f;
  constexpr float HIDDEN = -1e30f;
  constexpr int TOGETHER = 8;             // splits read at once
  const int splits = sizes[1];
  const int dim = int(thread_position_in_threadgroup.x);
  const int head = int(threadgroup_position_in_grid.y);
  const int at = int(threadgroup_position_in_grid.z) * H + head;
  float most = HAS_SINKS ? float(sinks[head]) * LOG2E : HIDDEN;
  float all = HAS_SINKS ? 1.0f : 0.0f;
  float sum = 0.0f;
  for (int from = 0; from < splits; from += TOGETHER) {
    float tops[TOGETHER], weights[TOGETHER], values[TOGETHER];
    UNROLL for (int i = 0; i < TOGETHER; ++i) {
      const int s = at * splits + (from + i < splits ? from + i : splits - 1);
      tops[i] = stats[s * 2];
      weights[i] = stats[s * 2 + 1];
      values[i] = parts[long(s) * DV + dim];
    }
    float now = most;
    UNROLL for (int i = 0; i < TOGETHER; ++i) now = MAX(now, tops[i]);
    const float correction = EXP2(most - now);
    all *= correction;
    sum *= correction;
    most = now;
    UNROLL for (int i = 0; i < TOGETHER; ++i) {
      const float by = from + i < splits ? EXP2(tops[i] - now) : 0.0f;
      all += weights[i] * by;
      sum += values[i] * by;
    }
  }
  out[at * DV + dim] = T(sum / all);
"""
