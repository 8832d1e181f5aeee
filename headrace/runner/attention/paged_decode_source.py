"""Source of the paged decode attention kernel: one body, a prelude for CUDA and one for Metal.

Algorithm (split over the context as in Flash-Decoding, Dao et al. 2023; online softmax, Milakov and Gimelshein
2018):

    grid      one thread block per (split of the context, KV head and part of its queries, row)
    block     WARPS warps; a lane group of LP lanes holds one token's head vector, 8 values a lane
    tile      scores of TILE tokens to shared memory; their maximum and exponentials; then the sum over values
    split     partial output, maximum and sum per query; a second kernel combines the splits

K and V are read once for the GT queries that share a KV head (up to 8). Positions come from the row's own bounds,
so splits of a short row next to a long one cost nothing. Accumulation is float32.

The body uses only names that both preludes define. The CUDA form is checked on a GPU against the reference; the
Metal form has not been run on Metal: the check at start (``kernel_check.py``) decides there.
"""

from __future__ import annotations

WARPS = 4
TILE = 128

CUDA_PRELUDE = """
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define POOL(type) const type
#define BLOCK_X blockIdx.x
#define BLOCK_Y blockIdx.y
#define BLOCK_Z blockIdx.z
#define THREAD threadIdx.x
#define EXP(x) __expf(x)
#define TANH(x) tanhf(x)
#define NEG_INF (-__int_as_float(0x7f800000))
#define MAX(a, b) fmaxf(a, b)
template <typename T> struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight { T v[8]; };
"""

METAL_PRELUDE = """
#define SHARED threadgroup
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(value, mask) simd_shuffle_xor(value, ushort(mask))
#define POOL(type) const device type
#define BLOCK_X threadgroup_position_in_grid.x
#define BLOCK_Y threadgroup_position_in_grid.y
#define BLOCK_Z threadgroup_position_in_grid.z
#define THREAD thread_position_in_threadgroup.x
#define EXP(x) metal::fast::exp(x)
#define TANH(x) metal::precise::tanh(x)
#define NEG_INF (-INFINITY)
#define MAX(a, b) metal::max(a, b)
template <typename T> struct alignas(sizeof(T) * 8 < 16 ? sizeof(T) * 8 : 16) Eight { T v[8]; };
"""

# Template constants: T, D head size, G queries per KV head, GT of them per block, KV heads, BS block size,
# HAS_SINKS, LP lanes per token (a power of two >= D / 8). What changes with the batch is an input, so that one
# compiled kernel serves all batches.
# Inputs: q [B, H, D] of T, k and v [slots, KV, D] of T, tables [B, width], bases [B], ends [B],
# sizes [3] int32 (table width, splits, window or 0), params [2] float32 (scale, softcap or 0), sinks [H] float32.
# Outputs: out [B, H, D] of T (WHOLE), else part_out [B, H, splits, D] and stats [B, H, splits, 2], float32.
DECODE_BODY = """
  constexpr int WARPS = 4;
  constexpr int TILE = 128;
  constexpr int PARTS = G / GT;
  constexpr int TOKENS = 32 / LP;         // tokens that one warp reads at once
  constexpr int STEP = WARPS * TOKENS;    // tokens that the block reads at once
  SHARED float scores[GT * TILE];
  SHARED float sums[WARPS * GT * D];
  SHARED float running[GT * 3];           // maximum, sum, correction per query

  const int thread = int(THREAD);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int sub = lane / LP;
  const int part = lane % LP;
  const bool holds = part * 8 < D;
  const int split = int(BLOCK_X);
  const int kv_head = int(BLOCK_Y) / PARTS;
  const int first_query = kv_head * G + (int(BLOCK_Y) % PARTS) * GT;
  const int row = int(BLOCK_Z);
  const int width = sizes[0];
  const int splits = sizes[1];
  const int window = sizes[2];
  const float scale = params[0];
  const float softcap = params[1];

  const int base = bases[row];
  const int high = ends[row] - base;
  const int low = (window > 0 && high > window) ? high - window : 0;
  const int share = (high - low + splits - 1) / splits;
  const int begin = low + split * share;
  const int stop = begin + share < high ? begin + share : high;

  float query[GT][8];
  float total[GT][8];
  for (int g = 0; g < GT; ++g) {
    for (int j = 0; j < 8; ++j) {
      query[g][j] = holds ? float(q[(row * KV * G + first_query + g) * D + part * 8 + j]) * scale : 0.0f;
      total[g][j] = 0.0f;
    }
  }
  if (thread < GT) {
    running[thread * 3] = NEG_INF;
    running[thread * 3 + 1] = 0.0f;
  }
  BARRIER();

  for (int tile = begin; tile < stop; tile += TILE) {
    const int count = stop - tile < TILE ? stop - tile : TILE;
    _Pragma("unroll 4")
    for (int t = warp * TOKENS + sub; t < TILE; t += STEP) {
      const bool inside = t < count;
      const int position = inside ? tile + t : begin;
      const long slot = long(tables[row * width + position / BS]) * BS + position % BS;
      float dot[GT];
      for (int g = 0; g < GT; ++g) dot[g] = 0.0f;
      if (holds) {
        const Eight<T> key = *reinterpret_cast<POOL(Eight<T>)*>(&k[(slot * KV + kv_head) * D + part * 8]);
        for (int j = 0; j < 8; ++j) {
          const float value = float(key.v[j]);
          for (int g = 0; g < GT; ++g) dot[g] += query[g][j] * value;
        }
      }
      for (int mask = LP / 2; mask > 0; mask /= 2) {
        for (int g = 0; g < GT; ++g) dot[g] += SHUFFLE_XOR(dot[g], mask);
      }
      if (part == 0 && inside) {
        for (int g = 0; g < GT; ++g) {
          scores[g * TILE + t] = softcap > 0.0f ? softcap * TANH(dot[g] / softcap) : dot[g];
        }
      }
    }
    BARRIER();
    for (int g = warp; g < GT; g += WARPS) {
      float top = NEG_INF;
      for (int t = lane; t < count; t += 32) top = MAX(top, scores[g * TILE + t]);
      for (int mask = 16; mask > 0; mask /= 2) top = MAX(top, SHUFFLE_XOR(top, mask));
      const float before = running[g * 3];
      const float now = MAX(before, top);
      float sum = 0.0f;
      for (int t = lane; t < count; t += 32) {
        const float weight = EXP(scores[g * TILE + t] - now);
        scores[g * TILE + t] = weight;
        sum += weight;
      }
      for (int mask = 16; mask > 0; mask /= 2) sum += SHUFFLE_XOR(sum, mask);
      if (lane == 0) {
        const float correction = EXP(before - now);
        running[g * 3] = now;
        running[g * 3 + 1] = running[g * 3 + 1] * correction + sum;
        running[g * 3 + 2] = correction;
      }
    }
    BARRIER();
    for (int g = 0; g < GT; ++g) {
      const float correction = running[g * 3 + 2];
      for (int j = 0; j < 8; ++j) total[g][j] *= correction;
    }
    if (holds) {
      _Pragma("unroll 4")
      for (int t = warp * TOKENS + sub; t < count; t += STEP) {
        const int position = tile + t;
        const long slot = long(tables[row * width + position / BS]) * BS + position % BS;
        const Eight<T> value = *reinterpret_cast<POOL(Eight<T>)*>(&v[(slot * KV + kv_head) * D + part * 8]);
        for (int g = 0; g < GT; ++g) {
          const float weight = scores[g * TILE + t];
          for (int j = 0; j < 8; ++j) total[g][j] += weight * float(value.v[j]);
        }
      }
    }
    BARRIER();
  }

  for (int g = 0; g < GT; ++g) {
    for (int j = 0; j < 8; ++j) {
      float sum = total[g][j];
      for (int mask = LP; mask < 32; mask *= 2) sum += SHUFFLE_XOR(sum, mask);
      if (sub == 0 && holds) sums[(warp * GT + g) * D + part * 8 + j] = sum;
    }
  }
  BARRIER();
  for (int i = thread; i < GT * D; i += WARPS * 32) {
    const int g = i / D;
    float sum = 0.0f;
    for (int w = 0; w < WARPS; ++w) sum += sums[w * GT * D + i];
    const int head = row * KV * G + first_query + g;
#ifdef WHOLE
      float weight = running[g * 3 + 1];
      if (HAS_SINKS) {
        const float sink = sinks[first_query + g];
        const float most = MAX(running[g * 3], sink);
        const float correction = EXP(running[g * 3] - most);
        sum *= correction;
        weight = weight * correction + EXP(sink - most);
      }
      out[head * D + i % D] = T(sum / weight);
#else
      part_out[(long(head) * splits + split) * D + i % D] = sum;
      if (i % D == 0) {
        stats[(head * splits + split) * 2] = running[g * 3];
        stats[(head * splits + split) * 2 + 1] = running[g * 3 + 1];
      }
#endif
  }
"""

# Combines splits. Grid: one block of D threads per (head, row). Constants: T, D, H, HAS_SINKS.
# Inputs: parts [B, H, splits, D], stats [B, H, splits, 2], sizes as above, sinks [H]. Output: out [B, H, D] of T.
COMBINE_BODY = """
  const int splits = sizes[1];
  const int dim = int(THREAD);
  const int head = int(BLOCK_Y);
  const int index = int(BLOCK_Z) * H + head;
  float most = HAS_SINKS ? float(sinks[head]) : NEG_INF;
  for (int s = 0; s < splits; ++s) most = MAX(most, stats[(index * splits + s) * 2]);
  float weight = HAS_SINKS ? EXP(float(sinks[head]) - most) : 0.0f;
  float sum = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const float correction = EXP(stats[(index * splits + s) * 2] - most);
    weight += stats[(index * splits + s) * 2 + 1] * correction;
    sum += parts[(long(index) * splits + s) * D + dim] * correction;
  }
  out[index * D + dim] = T(sum / weight);
"""
