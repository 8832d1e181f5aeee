"""CUDA source of what stands between the library products of a decode step (``row_operations.py``).

Both kernels read and write 16 bytes a thread at a time and compute in float32.

    norm     a block per row, its values in registers; the norm's weights are read before what comes earlier has
             ended. Rounded where MLX's kernel rounds: after the factor of the row, and after the weights
    gate     a thread per 8 results, rounded once
"""

from __future__ import annotations

VECTORS = """
template <typename T> struct alignas(16) Eight { T v[8]; };
"""

# Constants: T, W warps, CHUNKS of W * 256 values that make up a row, EPS (bits of a float).
# Inputs: x [..., K], weight [K]. Output: y like x. K is a multiple of 8.
NORM_BODY = """
  NEXT_MAY_START();
  __shared__ float sums[W];
  const int K = weight_shape[0];
  const size_t row = size_t(blockIdx.x) * K;
  Eight<T> gain[CHUNKS], in[CHUNKS];
  #pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int at = (c * W * 32 + threadIdx.x) * 8;
    if (at < K) gain[c] = *reinterpret_cast<const Eight<T>*>(weight + at);
  }
  WAIT_FOR_EARLIER();
  float sum = 0.0f;
  #pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int at = (c * W * 32 + threadIdx.x) * 8;
    if (at >= K) continue;
    in[c] = *reinterpret_cast<const Eight<T>*>(x + row + at);
    #pragma unroll
    for (int i = 0; i < 8; ++i) sum += float(in[c].v[i]) * float(in[c].v[i]);
  }
  for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  #pragma unroll
  for (int w = 0; w < W; ++w) sum += sums[w];
  const float factor = rsqrtf(sum / float(K) + __uint_as_float(unsigned(EPS)));
  #pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int at = (c * W * 32 + threadIdx.x) * 8;
    if (at >= K) continue;
    Eight<T> out;
    #pragma unroll
    for (int i = 0; i < 8; ++i) {
      out.v[i] = T(float(gain[c].v[i]) * float(T(float(in[c].v[i]) * factor)));
    }
    *reinterpret_cast<Eight<T>*>(y + row + at) = out;
  }
"""

# Constants: T, W warps. Input: both [M, 2 H], a row's first half the gate's. Output: y [M, H]. H is a multiple
# of 8.
GATE_BODY = """
  const int H = both_shape[1] / 2;
  const int at = (blockIdx.x * W * 32 + threadIdx.x) * 8;
  if (at >= H) return;
  const size_t row = blockIdx.y;
  const Eight<T> gate = *reinterpret_cast<const Eight<T>*>(both + row * 2 * H + at);
  const Eight<T> up = *reinterpret_cast<const Eight<T>*>(both + row * 2 * H + H + at);
  Eight<T> out;
  #pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = float(gate.v[i]);
    out.v[i] = T(x / (1.0f + expf(-x)) * float(up.v[i]));
  }
  *reinterpret_cast<Eight<T>*>(y + row * H + at) = out;
"""
