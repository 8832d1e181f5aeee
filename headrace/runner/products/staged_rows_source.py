"""CUDA source of products of up to some hundred rows: weights and inputs wait in shared memory.

``small_rows_source.py`` reads weights into registers, and inputs again in each warp for its few outputs: with more
rows than some ten that waits for the cache. Here

    block    BN outputs and MT tiles of 8 rows. With a gate every 16 outputs are 8 of the gate's and the 8 that
             they are for, so that both meet in one block
    ring     STAGES slices of DEEP strips of 64 inner positions, weights and inputs, in shared memory: while one
             is multiplied the others are on their way (``cp.async``). That keeps memory busy: by Little's law
             with some 40 KB per multiprocessor of an H200
    strip    128 bytes a row, pieces of 16 bytes permuted by the row's number as ``wgmma`` reads them
    product  ``wgmma`` m64nNk16: four warps, 64 outputs and all rows. It reads shared memory itself, the inputs
             once per 64 outputs; sums are float32
    splits   SPLITS blocks share the inner dimension and are a cluster: each adds up some rows of the sums of all
             its blocks, read from their shared memory
    start    weights are asked for before what comes earlier has ended (EARLY_START in ``kernels/language.py``).
             The first inputs come by registers: as copies they would be waited for with all those weights

The inner dimension is a multiple of 64. ``wgmma``, ``mapa``, ``barrier.cluster``: PTX ISA, capability 9.0a.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.runner.kernels.shared_memory_source import COPIES
from headrace.runner.products.small_rows_source import BOUNDS, MACHINE, SILU_GATE

# Inner positions of a strip: 128 bytes, what ``wgmma`` reads in one permutation.
STRIP = 64
# Tiles of 8 rows that there is a product for.
ROW_TILES = (1, 2, 4, 8, 16)

# matrix: 64 or more rows of a strip as wgmma takes them; groups of 8 rows are 1024 bytes apart, permuted in 128.
# visible: what this thread copied may be read by products. Products are begun, given and ended by four warps.
_INSTRUCTIONS = """
#ifdef __CUDACC__
DEVICE unsigned long long matrix(unsigned at) {
  return (unsigned long long)((at & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE void visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void given_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int MT> DEVICE void end_products(float (&total)[MT][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  #pragma unroll
  for (int i = 0; i < MT * 4; ++i) asm volatile("" : "+f"(total[i / 4][i % 4]) :: "memory");
}
DEVICE void put_float(unsigned to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" :: "r"(to), "f"(x) : "memory");
}
DEVICE void add4(float (&sum)[4], unsigned from) {
  float x, y, z, w;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
    : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(from) : "memory");
  sum[0] += x, sum[1] += y, sum[2] += z, sum[3] += w;
}
DEVICE void add4_of(float (&sum)[4], unsigned from, int block) {
  float x, y, z, w;
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(from), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
    : "=f"(x), "=f"(y), "=f"(z), "=f"(w) : "r"(there) : "memory");
  sum[0] += x, sum[1] += y, sum[2] += z, sum[3] += w;
}
DEVICE void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
#endif
"""


def _warpgroup_product(tiles: int, kind: str, short: str) -> str:
    """``multiply64``: adds 64 outputs (of four warps) x 8 * ``tiles`` rows over 16 inner positions."""
    count = 4 * tiles
    numbers = ",".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(c[{i // 4}][{i % 4}])' for i in range(count))
    return f"""
DEVICE void multiply64(float (&c)[{tiles}][4], unsigned weights, unsigned inputs, const {kind}*) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
    "wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.{short}.{short} {{{numbers}}}, %{count}, %{count + 1}, "
    "p, 1, 1, 0, 0;\\n}}\\n"
    : {sums} : "l"(matrix(weights)), "l"(matrix(inputs)), "r"(1));
}}
"""


_WARPGROUP_PRODUCTS = (
    "#ifdef __CUDACC__\n"
    + "".join(
        _warpgroup_product(tiles, kind, short)
        for tiles in ROW_TILES
        for kind, short in (("__nv_bfloat16", "bf16"), ("__half", "f16"))
    )
    + "#endif\n"
)

_NUMBERS = """
template <typename T> struct alignas(8) Four {
  T values[4];
};
"""


class Limits(NamedTuple):
    """What a kernel is compiled for beside its constants.

    Attributes:
        threads: of a block.
        resident: blocks that shall share a multiprocessor.
        splits: blocks of a cluster, along the grid's first dimension.
        shared_bytes: that a launch asks for.
    """

    threads: int
    resident: int
    splits: int
    shared_bytes: int


def header(limits: Limits) -> str:
    """What comes before the kernel."""
    bounds = BOUNDS.format(threads=limits.threads, blocks=limits.resident)
    if limits.splits > 1:
        bounds = f"{bounds.rstrip()} __cluster_dims__({limits.splits}, 1, 1)\n"
    return MACHINE + SILU_GATE + COPIES + _INSTRUCTIONS + _WARPGROUP_PRODUCTS + _NUMBERS + bounds


# Constants: T, MT, BN, DEEP, STAGES, SPLITS. Defined or not: GATE, RESIDUAL, BIAS. Inputs and output as in
# small_rows_source.py. Grid: splits, tiles of BN outputs, tiles of rows; 2 BN threads.
# A warp's fragment of sums: with g = lane / 4 and t = lane % 4, total[m] holds output g of rows 2 t and 2 t + 1 of
# tile m, then output g + 8 of both.
BODY = """
  NEXT_MAY_START();
  constexpr int THREADS = BN * 2;
  constexpr int LINES = THREADS / 8;          // rows of a strip that the threads copy at once
  constexpr int ROWS = MT * 8;
  constexpr int PASSES = (ROWS + LINES - 1) / LINES;
  constexpr unsigned WEIGHTS = BN * 128;      // bytes of a strip, before the inputs'
  constexpr unsigned BYTES = WEIGHTS + ROWS * 128;
  constexpr int HELD = 8;
#ifdef GATE
  constexpr int OWN = BN / 2;
  constexpr int STEP = LINES / 2;             // weights' rows from one pass to the next
#else
  constexpr int OWN = BN;
  constexpr int STEP = LINES;
#endif
  const T* type = x;
  const int N = w_shape[0];
  const int K = w_shape[1];
  const int row0 = int(blockIdx.z) * ROWS;
  const int M = x_shape[0] - row0 < ROWS ? x_shape[0] - row0 : ROWS;
  const int rank = SPLITS == 1 ? 0 : int(blockIdx.x);
  const int index = int(threadIdx.x);
  const int warp = index / 32;
  const int lane = index % 32;
  const int first = int(blockIdx.y) * OWN;
  const int begin = K / 64 * rank / SPLITS;
  const int strips = K / 64 * (rank + 1) / SPLITS - begin;
  const int slices = (strips + DEEP - 1) / DEEP;

  const unsigned ring = shared_memory();
  const int line = index / 8;
  const unsigned spot = line * 128 + (index % 8 ^ line % 8) * 16;
#ifdef GATE
  const int output = line / 16 * 8 + line % 8 + first + (line % 16 < 8 ? 0 : N / 2);
#else
  const int output = line + first;
#endif
  const T* weights = w + size_t(output) * K + begin * 64 + index % 8 * 8;
  const T* inputs[PASSES];
  #pragma unroll
  for (int i = 0; i < PASSES; ++i) {
    const int row = line + i * LINES < M ? line + i * LINES : 0;
    inputs[i] = x + size_t(row0 + row) * K + begin * 64 + index % 8 * 8;
  }
  // Strips behind the last are zero; there are some in a slice of several.
  const auto load_weights = [&](int strip, unsigned at) {
    const bool real = DEEP == 1 || strip < strips;
    #pragma unroll
    for (int i = 0; i < 4; ++i)
      copy16(at + spot + i * LINES * 128, weights + size_t(i * STEP) * K + (real ? strip * 64 : 0), real);
  };
  const auto load_inputs = [&](int strip, unsigned at) {
    const bool real = DEEP == 1 || strip < strips;
    #pragma unroll
    for (int i = 0; i < PASSES; ++i)
      if (ROWS % LINES == 0 || line < ROWS)
        copy16(at + WEIGHTS + spot + i * LINES * 128, inputs[i] + (real ? strip * 64 : 0),
               real && line + i * LINES < M);
  };

  #pragma unroll
  for (int slice = 0; slice < STAGES - 1; ++slice) {
    if (slice < slices)
      for (int d = 0; d < DEEP; ++d) load_weights(slice * DEEP + d, ring + (slice * DEEP + d) * BYTES);
    started();
  }
  WAIT_FOR_EARLIER();
  constexpr int FIRST = (STAGES - 1) * DEEP * PASSES;
  #pragma unroll
  for (int from = 0; from < FIRST; from += HELD) {
    uint4 held[HELD];
    #pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int strip = (from + i) / PASSES;
      const int pass = (from + i) % PASSES;
      held[i] = make_uint4(0, 0, 0, 0);
      if (from + i < FIRST && strip < strips && line + pass * LINES < M)
        held[i] = cached(inputs[pass] + strip * 64);
    }
    #pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int strip = (from + i) / PASSES;
      const int pass = (from + i) % PASSES;
      if (from + i < FIRST && (ROWS % LINES == 0 || line < ROWS))
        put16(ring + strip * BYTES + WEIGHTS + spot + pass * LINES * 128, held[i]);
    }
  }

  float total[MT][4] = {};
  int stage = 0;
  for (int slice = 0; slice < slices; ++slice) {
    arrived_but<STAGES - 2>();
    visible();
    meet();                                   // the slice is there, and the one before it is used up
    const unsigned at = ring + stage * (DEEP * BYTES);
    begin_products();
    #pragma unroll
    for (int d = 0; d < DEEP; ++d)
      #pragma unroll
      for (int k = 0; k < 4; ++k)
        multiply64(total, at + d * BYTES + warp / 4 * (64 * 128) + k * 32,
                   at + d * BYTES + WEIGHTS + k * 32, type);
    given_products();
    const int next = slice + STAGES - 1;
    const unsigned unused = ring + (stage == 0 ? STAGES - 1 : stage - 1) * (DEEP * BYTES);
    if (next < slices) {
      #pragma unroll
      for (int d = 0; d < DEEP; ++d) {
        load_weights(next * DEEP + d, unused + d * BYTES);
        load_inputs(next * DEEP + d, unused + d * BYTES);
      }
    }
    started();
    end_products(total);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }

  // Rows of sums are so far apart that a warp's lanes write to different banks.
  constexpr int APART = BN + 4;
  meet();
  #pragma unroll
  for (int i = 0; i < MT * 4; ++i) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
    put_float(ring + (row * APART + warp * 16 + lane / 4 + i % 4 / 2 * 8) * 4, total[i / 4][i % 4]);
  }
  if (SPLITS > 1) meet_cluster(); else meet();
  const int rows = (M - rank + SPLITS - 1) / SPLITS;
  for (int i = index; i < rows * (OWN / 4); i += THREADS) {
    const int row = i / (OWN / 4) * SPLITS + rank;
    const int n = i % (OWN / 4) * 4;
#ifdef GATE
    const unsigned place = ring + (row * APART + n / 8 * 16 + n % 8) * 4;
    float up[4] = {};
#else
    const unsigned place = ring + (row * APART + n) * 4;
#endif
    float sum[4] = {};
    if (SPLITS == 1) add4(sum, place);
    for (int s = 0; SPLITS > 1 && s < SPLITS; ++s) add4_of(sum, place, s);
#ifdef GATE
    if (SPLITS == 1) add4(up, place + 32);
    for (int s = 0; SPLITS > 1 && s < SPLITS; ++s) add4_of(up, place + 32, s);
#endif
    Four<T> result;
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
#ifdef BIAS
      sum[j] += float(bias[first + n + j]);
#endif
#ifdef GATE
#ifdef BIAS
      up[j] += float(bias[N / 2 + first + n + j]);
#endif
      sum[j] = gate(sum[j], up[j]);
#endif
#ifdef RESIDUAL
      sum[j] += float(residual[size_t(row0 + row) * N + first + n + j]);
#endif
      result.values[j] = T(sum[j]);
    }
#ifdef GATE
    T* to_here = y + size_t(row0 + row) * (N / 2) + first + n;
#else
    T* to_here = y + size_t(row0 + row) * N + first + n;
#endif
    *reinterpret_cast<Four<T>*>(to_here) = result;
  }
  if (SPLITS > 1) meet_cluster();             // others still read this block's sums
"""
