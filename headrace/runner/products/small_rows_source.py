"""CUDA source of the products of few rows (``small_rows.py``) and of experts (``substitutions/moe_decode.py``).

    block    NT tiles of 16 outputs, MT tiles of 8 rows; more rows are more blocks, started one after another so
             that they find the weights in the cache. W warps share the inner dimension, each takes a run of its
             32-wide chunks
    warp     tensor-core products of 16 outputs x 8 rows x 16 inner positions. A lane reads 16 bytes of a weight
             row and of an input row and uses them as fragments as they come: the inner positions are permuted the
             same way in both operands, which a sum does not notice; nothing is shuffled or staged
    norm     RMS norm is linear but for one factor per row: inputs are multiplied with the norm's weights on their
             way, their squares are summed beside the product, the factor is applied to the sums at the end
    end      the warps' sums meet in shared memory; bias, residual or SiLU gate are applied there

The inner dimension is a multiple of 32. ``mma.sync`` m16n8k16: PTX ISA, compute capability 8.0 and up.

``MACHINE`` holds all that is not plain C++, so that the rest can run on a CPU (``tests/runner/cuda_shim``). Sizes
come from the shapes that MLX passes as kernel parameters: one compiled kernel serves every matrix.
"""

from __future__ import annotations

# MLX writes a kernel's signature; only so can the compiler be told how many threads a block has, and how many
# blocks shall share a multiprocessor. Without it, it may give each thread more registers than there are. Last in a
# header.
BOUNDS = """
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__({threads}, {blocks})
"""

MACHINE = """
#define DEVICE __device__ __forceinline__
DEVICE void multiply(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                     const __nv_bfloat16*) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
    "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE void multiply(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                     const __half*) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
    "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// What no kernel writes, read once: past the cache.
DEVICE uint4 stream(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
// What the kernel before may have written: not as data that is constant while this kernel runs, which may have
// begun before that was written.
DEVICE uint4 once(const void* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
DEVICE uint4 cached(const void* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
DEVICE unsigned scaled(unsigned x, unsigned by) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(by), "r"(0x80008000u));
  return y;
}
DEVICE float low(unsigned x) { return __uint_as_float(x << 16); }
DEVICE float high(unsigned x) { return __uint_as_float(x & 0xffff0000u); }
DEVICE float exponential(float x) { return __expf(x); }
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE float of_bits(int x) { return __int_as_float(x); }
"""

SILU_GATE = """
DEVICE float gate(float x, float up) { return x / (1.0f + exponential(-x)) * up; }
"""

# accumulate: sums of chunks [from, to) of NT weight tiles and MT tiles of 8 rows, in fragments. Per lane, with
# g = lane / 4 and t = lane % 4: weights[n] and inputs[m] point at row g of their tile, position 8 t; total[n][m]
# holds output g of row 2 t, row 2 t + 1, then output g + 8 of both. With NORMED, squares[m] sums up the squares of
# the lane's inputs. The first weights are asked for before what comes earlier has ended (EARLY_START in
# kernels/language.py): a weight matrix is one that no kernel writes.
# gather: adds up the warps' sums in pairs, then leaves them in shared memory as [W / 2][NT][MT][4][32 lanes].
PRODUCT = """
DEVICE void normalize(uint4& x, const uint4& by, float& squares) {
  unsigned* v = &x.x;
  const unsigned* s = &by.x;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    squares += low(v[i]) * low(v[i]) + high(v[i]) * high(v[i]);
    v[i] = scaled(v[i], s[i]);
  }
}
// DEEP chunks of weights from one on; those from ``to`` on are zero.
template <typename T, int NT, int DEEP>
DEVICE void load_weights(uint4 (&a)[DEEP][NT], uint4 (&b)[DEEP][NT], const T* const (&weights)[NT], int K,
                         int chunk, int to) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  #pragma unroll
  for (int d = 0; d < DEEP; ++d) {
    const int k = (chunk + d) * 32;
    #pragma unroll
    for (int n = 0; n < NT; ++n) {
      a[d][n] = chunk + d < to ? stream(weights[n] + k) : zero;
      b[d][n] = chunk + d < to ? stream(weights[n] + size_t(8) * K + k) : zero;
    }
  }
}
template <typename T, int MT, int NT, bool NORMED, int DEEP>
DEVICE void accumulate(float (&total)[NT][MT][4], float (&squares)[MT], const T* const (&weights)[NT],
                       const T* const (&inputs)[MT], const bool (&real)[MT], const T* norm, int K, int from,
                       int to) {
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 a[DEEP][NT], b[DEEP][NT];
  load_weights<T, NT, DEEP>(a, b, weights, K, from, to);
  WAIT_FOR_EARLIER();
  for (int chunk = from; chunk < to; chunk += DEEP) {
    uint4 in[DEEP][MT], gain[DEEP];
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      const int k = (chunk + d) * 32;
      const bool inside = chunk + d < to;
      #pragma unroll
      for (int m = 0; m < MT; ++m) in[d][m] = inside && real[m] ? cached(inputs[m] + k) : zero;
      if (NORMED) gain[d] = inside ? cached(norm + k) : zero;
    }
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      #pragma unroll
      for (int m = 0; m < MT; ++m) {
        if (NORMED) normalize(in[d][m], gain[d], squares[m]);
        #pragma unroll
        for (int n = 0; n < NT; ++n) {
          multiply(total[n][m], a[d][n].x, b[d][n].x, a[d][n].y, b[d][n].y, in[d][m].x, in[d][m].y, norm);
          multiply(total[n][m], a[d][n].z, b[d][n].z, a[d][n].w, b[d][n].w, in[d][m].z, in[d][m].w, norm);
        }
      }
    }
    if (chunk + DEEP < to) load_weights<T, NT, DEEP>(a, b, weights, K, chunk + DEEP, to);
  }
}
template <int W, int MT, int NT, bool NORMED>
DEVICE void gather(const float (&total)[NT][MT][4], float (&squares)[MT], float (*sums)[NT * MT * 128],
                   float (*row_squares)[MT * 8], float* factors, int K, float eps) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const float* own = &total[0][0][0];
  if (warp >= W / 2) {
    #pragma unroll
    for (int i = 0; i < NT * MT * 4; ++i) sums[warp - W / 2][i * 32 + lane] = own[i];
  }
  if (NORMED) {
    #pragma unroll
    for (int m = 0; m < MT; ++m) {
      float sum = squares[m];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (lane % 4 == 0) row_squares[warp][m * 8 + lane / 4] = sum;
    }
  }
  __syncthreads();
  if (warp < W / 2) {
    #pragma unroll
    for (int i = 0; i < NT * MT * 4; ++i) sums[warp][i * 32 + lane] += own[i];
  } else if (NORMED && threadIdx.x - W * 16 < MT * 8) {
    const int row = threadIdx.x - W * 16;
    float sum = 0.0f;
    for (int w = 0; w < W; ++w) sum += row_squares[w][row];
    factors[row] = inverse_root(sum / float(K) + eps);
  }
  __syncthreads();
}
template <int W, int MT, int NT>
DEVICE float gathered(const float (*sums)[NT * MT * 128], int tile, int output, int row) {
  const int i = row % 2 + (output >= 8 ? 2 : 0);
  const int at = ((tile * MT + row / 8) * 4 + i) * 32 + output % 8 * 4 + row % 8 / 2;
  float sum = 0.0f;
  #pragma unroll
  for (int w = 0; w < W / 2; ++w) sum += sums[w][at];
  return sum;
}
"""
PRODUCT += SILU_GATE

# Constants: T, MT tiles of 8 rows, NT tiles of 16 outputs, W warps, DEEP chunks loaded at once, EPS (bits of a
# float). Defined or not: PACKED, NORM, GATE, RESIDUAL, BIAS. Inputs: x [M, ...] with K values a row, w [N, K], and
# in this order, each where defined: norm [K], bias [N], residual like y. Output: y [M, N]; with GATE [M, N / 2],
# w's first half is the gate's. With PACKED (packed_rows_source.py) BITS, GROUP and WHOLE (rows are whole chunks)
# are constants too, w [N, K * BITS / 32] are words, and after them come scales and biases [N, K / GROUP].
BODY = """
  NEXT_MAY_START();
  __shared__ float sums[W / 2][NT * MT * 128];
  __shared__ float row_squares[W][MT * 8];
  __shared__ float factors[MT * 8];
  const int row0 = blockIdx.x * MT * 8;
  const int M = x_shape[0] - row0 < MT * 8 ? x_shape[0] - row0 : MT * 8;
  const int N = w_shape[0];
#ifdef PACKED
  const int K = w_shape[1] / BITS * 32;
  const unsigned* weights[NT];
  const unsigned short* tile_scales[NT];
  const unsigned short* tile_biases[NT];
  const int lane_first = 0;
#else
  const int K = w_shape[1];
  const T* weights[NT];
  const int lane_first = threadIdx.x % 4 * 8;
#endif
  const int warp = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
#ifdef GATE
  constexpr int OWN = NT / 2;
#else
  constexpr int OWN = NT;
#endif
  const int first = blockIdx.y * OWN * 16;
  for (int n = 0; n < NT; ++n) {
    const int row = g + (n < OWN ? first + n * 16 : N / 2 + first + (n - OWN) * 16);
    weights[n] = w + size_t(row) * w_shape[1] + lane_first;
#ifdef PACKED
    tile_scales[n] = reinterpret_cast<const unsigned short*>(scales) + size_t(row) * (K / GROUP);
    tile_biases[n] = reinterpret_cast<const unsigned short*>(biases) + size_t(row) * (K / GROUP);
#endif
  }
  const T* inputs[MT];
  bool real[MT];
  float total[NT][MT][4] = {};
  float squares[MT] = {};
  for (int m = 0; m < MT; ++m) {
    inputs[m] = x + size_t(row0 + m * 8 + g) * K + lane_first;
    real[m] = m * 8 + g < M;
  }
#ifdef NORM
  constexpr bool NORMED = true;
  const T* gains = norm + lane_first;
#else
  constexpr bool NORMED = false;
  const T* gains = x;
#endif
#ifdef SHARED_INPUTS
  accumulate_packed<T, BITS, GROUP, WHOLE, W, MT, NT, NORMED, DEEP, SHARED>(
      total, squares, weights, tile_scales, tile_biases, inputs, real, gains, K, warp, x);
#elif defined(PACKED)
  accumulate_packed<T, BITS, GROUP, WHOLE, W, MT, NT, NORMED, DEEP>(
      total, squares, weights, tile_scales, tile_biases, inputs, real, gains, K, warp);
#else
  accumulate<T, MT, NT, NORMED, DEEP>(total, squares, weights, inputs, real, gains, K, K / 32 * warp / W,
                                     K / 32 * (warp + 1) / W);
#endif
  gather<W, MT, NT, NORMED>(total, squares, sums, row_squares, factors, K, of_bits(EPS));
  for (int i = threadIdx.x; i < M * OWN * 16; i += W * 32) {
    const int m = i / (OWN * 16);
    const int n = i % (OWN * 16);
    float sum = gathered<W, MT, NT>(sums, n / 16, n % 16, m);
    if (NORMED) sum *= factors[m];
#ifdef BIAS
    sum += float(bias[first + n]);
#endif
#ifdef GATE
    float up = gathered<W, MT, NT>(sums, OWN + n / 16, n % 16, m);
    if (NORMED) up *= factors[m];
#ifdef BIAS
    up += float(bias[N / 2 + first + n]);
#endif
    y[size_t(row0 + m) * (N / 2) + first + n] = T(gate(sum, up));
#else
#ifdef RESIDUAL
    sum += float(residual[size_t(row0 + m) * N + first + n]);
#endif
    y[size_t(row0 + m) * N + first + n] = T(sum);
#endif
  }
"""
