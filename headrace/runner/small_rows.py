"""Products of few rows with a large 16-bit matrix on CUDA: a kernel that streams the weights once.

A decode step multiplies 1 to 32 rows with every weight matrix, so it is bound by reading weights. The library MLX
calls picks kernels made for large products there (measured on an H200: 0.6 to 1.9 TB/s at 5 rows of 4.3).

    block    16 * NT outputs; WARPS warps share the inner dimension, each takes a slice of it
    warp     tensor-core products of 16 outputs x 8 rows x 16 inner positions. A lane reads 16 bytes of a weight
             row and of an input row and uses them as fragments as they come: the inner positions are permuted the
             same way in both operands, which a sum does not notice; nothing is shuffled or staged
    end      the warps' sums meet in shared memory

CUDA only: ``mma.sync`` m16n8k16 (PTX ISA, compute capability 8.0 and up).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

WARPS = 8
MAX_ROWS = 32
_TOLERANCE = 2e-2

_HEADER = """
__device__ __forceinline__ void multiply(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned b0, unsigned b1, const __nv_bfloat16*) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
    "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned b0, unsigned b1, const __half*) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
    "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint4 stream(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
__device__ __forceinline__ uint4 cached(const void* at) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
"""

# Constants: T, MT tiles of 8 rows, N outputs, K inner, NT tiles of 16 outputs per block.
# Inputs: x [M, K], w [N, K], rows [1] int32 (M). Output: y [M, N].
_BODY = """
  constexpr int WARPS = 8;
  constexpr int SLICE = K / WARPS;
  constexpr int DEEP = MT * NT >= 8 ? 2 : 4;
  __shared__ float sums[WARPS][MT * 8][NT * 16];
  const int M = rows[0];
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int first = blockIdx.x * NT * 16;
  const int start = warp * SLICE + t * 8;
  float total[NT][MT][4];
  for (int n = 0; n < NT; ++n)
    for (int m = 0; m < MT; ++m)
      for (int i = 0; i < 4; ++i) total[n][m][i] = 0.0f;
  const T* weights = w + size_t(first + g) * K + start;
  const T* inputs = x + size_t(g) * K + start;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int from = 0; from < SLICE; from += 32 * DEEP) {
    uint4 a[DEEP][NT], b[DEEP][NT], in[DEEP][MT];
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {  // all loads first: many in flight is what reaches the bandwidth
      const int k = from + d * 32;
      const bool inside = SLICE % (32 * DEEP) == 0 || k < SLICE;
      for (int n = 0; n < NT; ++n) {
        const T* at = weights + size_t(n) * 16 * K + k;
        a[d][n] = inside ? stream(at) : zero;
        b[d][n] = inside ? stream(at + size_t(8) * K) : zero;
      }
      for (int m = 0; m < MT; ++m) {
        const bool real = inside && m * 8 + g < M;
        in[d][m] = real ? cached(inputs + size_t(m) * 8 * K + k) : zero;
      }
    }
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      for (int n = 0; n < NT; ++n) {
        for (int m = 0; m < MT; ++m) {
          multiply(total[n][m], a[d][n].x, b[d][n].x, a[d][n].y, b[d][n].y, in[d][m].x, in[d][m].y, x);
          multiply(total[n][m], a[d][n].z, b[d][n].z, a[d][n].w, b[d][n].w, in[d][m].z, in[d][m].w, x);
        }
      }
    }
  }
  for (int n = 0; n < NT; ++n) {
    for (int m = 0; m < MT; ++m) {
      sums[warp][m * 8 + t * 2][n * 16 + g] = total[n][m][0];
      sums[warp][m * 8 + t * 2 + 1][n * 16 + g] = total[n][m][1];
      sums[warp][m * 8 + t * 2][n * 16 + g + 8] = total[n][m][2];
      sums[warp][m * 8 + t * 2 + 1][n * 16 + g + 8] = total[n][m][3];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < M * NT * 16; i += WARPS * 32) {
    const int m = i / (NT * 16);
    const int n = i % (NT * 16);
    float sum = 0.0f;
    for (int p = 0; p < WARPS; ++p) sum += sums[p][m][n];
    y[size_t(m) * N + first + n] = T(sum);
  }
"""


class SmallRowsKernel:
    """The kernel, and for which shapes it was right and faster than MLX's own product on this device."""

    def __init__(self) -> None:
        self._kernel: Any = mx.fast.cuda_kernel(
            name="small_rows", input_names=["x", "w", "rows"], output_names=["y"], source=_BODY, header=_HEADER
        )
        self._faster: dict[tuple[int, int, int], bool] = {}

    def __call__(self, x: mx.array, weight: mx.array) -> mx.array:
        """``x [M, K] @ weight [N, K].T``, 16-bit, M <= 32."""
        rows, inner = x.shape
        outputs = weight.shape[0]
        tiles = -(-rows // 8)
        wide = 2 if tiles > 1 and outputs % 32 == 0 and outputs >= 8192 else 1
        y: mx.array = self._kernel(
            inputs=[x, weight, mx.array([rows], mx.int32)],
            template=[
                ("T", x.dtype),
                ("MT", tiles),
                ("N", outputs),
                ("K", inner),
                ("NT", wide),
            ],
            grid=(outputs // (16 * wide) * WARPS * 32, 1, 1),
            threadgroup=(WARPS * 32, 1, 1),
            output_shapes=[(rows, outputs)],
            output_dtypes=[x.dtype],
        )[0]
        return y

    @staticmethod
    def takes(rows: int, weight: mx.array) -> bool:
        """Whether the kernel can compute this product at all."""
        outputs, inner = weight.shape
        wide = weight.dtype in (mx.bfloat16, mx.float16)
        return wide and 1 < rows <= MAX_ROWS and outputs % 16 == 0 and inner % (32 * WARPS) == 0

    def wins(self, rows: int, weight: mx.array) -> bool:
        """What ``measure`` found for the bucket of ``rows``; False where it did not look."""
        tiles = 1 if rows <= 16 else MAX_ROWS // 8
        return self._faster.get(_key(tiles, weight), False)

    def measure(self, weight: mx.array) -> None:
        """Check and time the kernel on one weight matrix for 8 and 32 rows; counts between go by the nearer."""
        for tiles in (1, MAX_ROWS // 8):
            key = _key(tiles, weight)
            if key in self._faster or not self.takes(tiles * 8, weight):
                continue
            x = mx.random.normal((tiles * 8, weight.shape[1])).astype(weight.dtype)
            expected = (x @ weight.T).astype(mx.float32)
            worst = mx.max(mx.abs(self(x, weight).astype(mx.float32) - expected)) / mx.max(mx.abs(expected))
            right = float(np.array(worst)) < _TOLERANCE
            own, usual = _seconds(partial(self, x, weight)), _seconds(partial(mx.matmul, x, weight.T))
            self._faster[key] = right and own < usual


def _key(tiles: int, weight: mx.array) -> tuple[int, int, int]:
    outputs, inner = weight.shape
    return tiles, outputs, inner


def _seconds(run: Callable[[], mx.array], rounds: int = 4, repeat: int = 16) -> float:
    mx.eval([run() for _ in range(4)])
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        mx.eval([run() for _ in range(repeat)])
        best = min(best, (time.perf_counter() - start) / repeat)
    return best
