"""Source of paged decode attention by tensor cores, CUDA only: 16-bit pools, and packed ones through their reader.

The same grid, inputs and outputs as ``paged_decode_source.py``; what differs is a warp's work, which is so small
that the bytes of the pool are what it waits for:

    tile     a warp takes 16 tokens of one block at a time, U tiles of them at once; W warps share a split
    scores   keys [16 tokens, 16 elements] x queries [16 elements, 8] (``mma.sync`` m16n8k16)
    values   [16 elements, 16 tokens] x weights [16 tokens, 8 queries]. A weight goes in as two 16-bit numbers, its
             rounded value and what rounding left, so that nothing is lost beside float32
    lanes    with g = lane / 4 and t = lane % 4 a lane reads 8 elements at a time of the keys of tokens g and
             g + 8 and of the values of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: the sums over elements and tokens
             do not notice their order, so what was read becomes fragments where it is. Scores come out with tokens
             as rows and go in with tokens as columns (``movmatrix``); nothing else moves between lanes but maxima
    waiting  a short context is read whole before anything is waited for: as many warps as it has tiles. With a
             long one the other warps' loads fill the time in which a warp computes
    end      warps combine by their maxima, first in pairs (``END`` there), a second kernel combines the splits

Tokens that are not the split's own are hidden by their weight; what is read in their place are ones that are, so
that nothing else in the pool matters. Sums are float32, exponentials of base 2.

A reader (``Reader``) says how pools are read: ``Query``, ``Keys`` and ``Values``, what a lane holds of each, and
``Sums``, what it makes of values. ``PLAIN`` is the one of 16-bit pools, ``packed_decode_source.PACKED`` the other.
"""

from __future__ import annotations

from headrace.runner.attention.paged_decode_source import END
from headrace.runner.kernels.language import CUDA_NAMES
from headrace.runner.products.small_rows_source import BOUNDS, MACHINE

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

_COMMON = (
    MACHINE
    + CUDA_NAMES
    + UNROLL_AND_EXP2
    + """
#ifdef __CUDACC__
// A matrix of 8 x 8 numbers of 16 bits, row g in the lanes of g, turned over.
DEVICE unsigned transposed(unsigned x) {
  unsigned y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// What lies in shared memory, read at each use: registers are for what is on its way from the pool.
DEVICE uint4 anew(const uint4* shared) {
  uint4 v;
  asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(unsigned(__cvta_generic_to_shared(shared))));
  return v;
}
// The same in all lanes of a warp, which the compiler is to know.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
#else
DEVICE uint4 anew(const uint4* shared) { return *shared; }
DEVICE int uniform(int x) { return x; }
#endif
template <int N> struct alignas(N * 4) Words { unsigned w[N]; };
struct Lane { int warp, g, t; };
template <bool IS> struct Flag {};
// Where a tile's tokens are, counted in vectors: the first one, and which of the tile's rows are the split's own.
template <int KV> struct Rows {
  unsigned first;
  int low, high;
  __forceinline__ unsigned at(int row) const {
    row = row < low ? low : row;
    return first + unsigned((row < high ? row : high) * KV);
  }
};
DEVICE unsigned word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
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

# Elements beyond a vector's width are its first ones, times queries of zero, or summed for nobody.
PLAIN = """
#define KEY_POOL k
#define VALUE_POOL v
#define READER Reader<T, DK, DV, KV>
template <typename T> __forceinline__ unsigned pair(T x, T y) {
  const T both[2] = {x, y};
  return *reinterpret_cast<const unsigned*>(both);
}
template <typename T, int DK, int DV, int KV> struct Reader {
  static constexpr int CK = (DK + 31) / 32;
  static constexpr int CV = (DV + 63) / 64;
  struct Query {
    const uint4* own;
    __forceinline__ void read(const T* q, int count, Lane lane) {
      SHARED uint4 pieces[CK * 32];
      uint4* at = pieces + lane.g * 4 + lane.t;
      own = at;
      UNROLL for (int c = 0; c < CK; ++c) {
        if (c % 4 != lane.warp) continue;
        const int dim = c * 32 + lane.t * 8;
        const bool real = c * 32 + 32 <= DK || dim < DK;
        at[c * 32] = real ? cached(q + (lane.g < count ? lane.g : 0) * DK + dim) : make_uint4(0, 0, 0, 0);
      }
    }
    __forceinline__ void ready(Lane) {}
  };
  struct Keys {
    uint4 piece[2][CK];
    __forceinline__ void read(const T* k, const Rows<KV>& rows, Lane lane) {
      UNROLL for (int n = 0; n < 2; ++n) {
        const uint4* own = reinterpret_cast<const uint4*>(k) + (rows.at(lane.g + n * 8) * (DK / 8) + lane.t);
        UNROLL for (int c = 0; c < CK; ++c)
          piece[n][c] = once(own + (c * 4 + 4 <= DK / 8 || c * 4 + lane.t < DK / 8 ? c * 4 : 0));
      }
    }
    __forceinline__ void scores(const Query& query, float (&score)[2][2]) const {
      float part[2][4] = {};                // two, so that one need not wait for the other
      UNROLL for (int c = 0; c < CK; ++c) {
        const uint4 asked = anew(query.own + c * 32);
        UNROLL for (int s = 0; s < 2; ++s)
          multiply(part[s], word(piece[0][c], 2 * s), word(piece[1][c], 2 * s), word(piece[0][c], 2 * s + 1),
                   word(piece[1][c], 2 * s + 1), word(asked, 2 * s), word(asked, 2 * s + 1), (const T*)(nullptr));
      }
      UNROLL for (int i = 0; i < 4; ++i) score[i / 2][i % 2] = part[0][i] + part[1][i];
    }
  };
  struct Values {
    uint4 piece[4][CV];
    __forceinline__ void read(const T* v, const Rows<KV>& rows, Lane lane) {
      UNROLL for (int i = 0; i < 4; ++i) {
        const unsigned at = rows.at(2 * lane.t + i % 2 + i / 2 * 8) * (DV / 8);
        UNROLL for (int c = 0; c < CV; ++c)
          piece[i][c] = once(reinterpret_cast<const uint4*>(v) +
                               (at + (c * 8 + 8 <= DV / 8 || c * 8 + lane.g < DV / 8 ? c * 8 + lane.g : 0)));
      }
    }
    // Element j of 8 of tokens i and i + 1.
    __forceinline__ unsigned of(int c, int i, int j) const {
      return __byte_perm(word(piece[i][c], j / 2), word(piece[i + 1][c], j / 2), j % 2 == 0 ? 0x5410u : 0x7632u);
    }
  };
  struct Sums {
    float total[CV][4][4];                  // elements 8 g + 2 j + r of query h at [j][2 r + h]
    __forceinline__ void clear() {
      UNROLL for (int c = 0; c < CV; ++c)
        UNROLL for (int j = 0; j < 4; ++j)
          UNROLL for (int i = 0; i < 4; ++i) total[c][j][i] = 0.0f;
    }
    template <int U, bool FIRST>
    __forceinline__ void add(const Values (&value)[U], const float (&weight)[U][2][2],
                             const float (&correction)[2], Flag<FIRST>) {
      UNROLL for (int c = 0; c < CV; ++c)
        UNROLL for (int j = 0; j < 4; ++j)
          UNROLL for (int i = 0; i < 4; ++i) total[c][j][i] = FIRST ? 0.0f : total[c][j][i] * correction[i % 2];
      UNROLL for (int u = 0; u < U; ++u) {
        unsigned most[2], left[2];
        UNROLL for (int n = 0; n < 2; ++n) {
          const T x = T(weight[u][n][0]), y = T(weight[u][n][1]);
          most[n] = transposed(pair(x, y));
          left[n] = transposed(pair(T(weight[u][n][0] - float(x)), T(weight[u][n][1] - float(y))));
        }
        UNROLL for (int c = 0; c < CV; ++c) {
          UNROLL for (int j = 0; j < 4; ++j) {
            const unsigned a = value[u].of(c, 0, 2 * j), b = value[u].of(c, 0, 2 * j + 1);
            const unsigned d = value[u].of(c, 2, 2 * j), e = value[u].of(c, 2, 2 * j + 1);
            multiply(total[c][j], a, b, d, e, most[0], most[1], (const T*)(nullptr));
            multiply(total[c][j], a, b, d, e, left[0], left[1], (const T*)(nullptr));
          }
        }
      }
    }
    __forceinline__ void finish() {}
    // Element 8 g + i of piece c, of query h.
    __forceinline__ float at(int c, int i, int h) const { return total[c][i / 2][i % 2 * 2 + h]; }
  };
};
"""

# Constants: those of ``paged_decode_source.DECODE_BODY`` without LP, GK and GV, and W warps (even); packed, BITS.
# GT is at most 8; BS is a multiple of 16. Inputs and outputs are the same.
BODY = (
    """
  constexpr int WARPS = W;
  constexpr int SLOTS = W / 2;
  constexpr int PARTS = G / GT;
  constexpr int STEP = WARPS * 16;
  constexpr float HIDDEN = -1e30f;
  constexpr float LOG2E = 1.44269504f;
  using Pool = READER;
  constexpr int CV = Pool::CV;
  constexpr int STRIDE = 36;              // of 32 lanes' sums; so neither writing nor reading meets a bank twice
  SHARED float sums[SLOTS * CV * 16 * STRIDE];
  SHARED float tops[WARPS * GT];
  SHARED float weights[WARPS * GT];

  const int index = int(thread_position_in_threadgroup.x);
  const int warp = uniform(index / 32);
  const int g = index % 32 / 4;
  const int t = index % 4;
  const Lane lane = {warp, g, t};
  const int split = int(threadgroup_position_in_grid.x);
  const int kv_head = int(threadgroup_position_in_grid.y) / PARTS;
  const int first_query = kv_head * G + (int(threadgroup_position_in_grid.y) % PARTS) * GT;
  const int row = int(threadgroup_position_in_grid.z);
  Pool::Query query;
  query.read(q + (row * KV * G + first_query) * DK, GT, lane);
  const int width = sizes[0];
  const int splits = sizes[1];
  const int window = sizes[2];
  const float softcap = params[1];
  SHARED uint4 factors[1];
  if (index == 0) factors[0].x = __float_as_uint(HAS_SOFTCAP ? params[0] / softcap : params[0] * LOG2E);

  const int base = bases[row];
  const int high = ends[row] - base;
  const int low = (window > 0 && high > window) ? high - window : 0;
#ifdef WHOLE
  const int begin = uniform(low);
  const int stop = uniform(high);
#else
  const int share = ((high - low + splits - 1) / splits + 15) / 16 * 16;
  const int begin = uniform(low + split * share);
  const int stop = uniform(begin + share < high ? begin + share : high);
#endif
  const int last = (stop - 1) / 16 * 16;

  // A lane has queries 2 t and 2 t + 1 (h) and tokens g and g + 8 (n) of a tile.
  float top[2] = {HIDDEN, HIDDEN}, weight[2] = {0.0f, 0.0f};
  Pool::Sums total;
  total.clear();
  const int* table = tables + row * width;
  int from = begin < stop ? begin / 16 * 16 + warp * 16 : stop;
  Pool::Keys key[U];
  Pool::Values value[U];
  const auto read = [&]() {
    UNROLL for (int u = 0; u < U; ++u) {
      // A tile lies in one block. One behind the last is the last again; its tokens are hidden.
      const int tile = from + u * STEP < last ? from + u * STEP : last;
      const unsigned block = unsigned(table[unsigned(tile) / unsigned(BS)]);
      const Rows<KV> rows = {(block * BS + unsigned(tile) % unsigned(BS)) * KV + kv_head, begin - tile,
                             stop - 1 - tile};
      key[u].read(KEY_POOL, rows, lane);
      value[u].read(VALUE_POOL, rows, lane);
    }
  };
  const auto use = [&](auto first) {
    const float factor = __uint_as_float(anew(factors).x);
    float score[U][2][2];
    float now[2] = {top[0], top[1]}, correction[2];
    UNROLL for (int u = 0; u < U; ++u) {
      key[u].scores(query, score[u]);
      UNROLL for (int n = 0; n < 2; ++n) {
        const int token = from + u * STEP + g + 8 * n;
        UNROLL for (int h = 0; h < 2; ++h) {
          float x = score[u][n][h] * factor;
          if (HAS_SOFTCAP) x = softcap * LOG2E * tanhf(x);
          score[u][n][h] = token < begin || token >= stop ? HIDDEN : x;
          now[h] = MAX(now[h], score[u][n][h]);
        }
      }
    }
    UNROLL for (int h = 0; h < 2; ++h) {
      now[h] = most_of_tokens(now[h]);
      correction[h] = EXP2(top[h] - now[h]);
      top[h] = now[h];
      weight[h] *= correction[h];
      UNROLL for (int u = 0; u < U; ++u) {
        UNROLL for (int n = 0; n < 2; ++n) {
          score[u][n][h] = EXP2(score[u][n][h] - now[h]);
          weight[h] += score[u][n][h];
        }
      }
    }
    total.add(value, score, correction, first);
  };
  // The first tiles by themselves: all that is needed is asked for before anything is waited for.
  if (from < stop) read();
  BARRIER();
  query.ready(lane);
  if (from < stop) use(Flag<true>());
  for (from += STEP * U; from < stop; from += STEP * U) {
    read();
    use(Flag<false>());
  }

  // Warps combine in pairs: the upper half leaves its sums, the lower half adds its own.
  UNROLL for (int h = 0; h < 2; ++h) weight[h] = sum_of_tokens(weight[h]);
  total.finish();
  float* slot = sums + (warp % SLOTS) * (CV * 16 * STRIDE) + t * 8 + g;
  if (warp >= SLOTS) {
    UNROLL for (int h = 0; h < 2; ++h) {
      if (g == 0 && 2 * t + h < GT) {
        tops[warp * GT + 2 * t + h] = top[h];
        weights[warp * GT + 2 * t + h] = weight[h];
      }
      UNROLL for (int i = 0; i < CV * 8; ++i) slot[(h * CV * 8 + i) * STRIDE] = total.at(i / 8, i % 8, h);
    }
  }
  BARRIER();
  if (warp < SLOTS) {
    UNROLL for (int h = 0; h < 2; ++h) {
      if (2 * t + h >= GT) continue;
      const int one = warp * GT + 2 * t + h;
      const int other = one + SLOTS * GT;
      const float most = MAX(top[h], tops[other]);
      const float by = EXP2(top[h] - most);
      const float other_by = EXP2(tops[other] - most);
      UNROLL for (int i = 0; i < CV * 8; ++i) {
        float& sum = slot[(h * CV * 8 + i) * STRIDE];
        sum = total.at(i / 8, i % 8, h) * by + sum * other_by;
      }
      if (g == 0) {
        tops[one] = most;
        weights[one] = weight[h] * by + weights[other] * other_by;
      }
    }
  }
  BARRIER();
#define SUM_AT(w, one, dim) \\
  (((w) * 2 + (one) % 2) * (CV * 8) + (dim) / 64 * 8 + (dim) % 8) * STRIDE + (one) / 2 * 8 + (dim) % 64 / 8
"""
    + END
)


def header(reader: str, definitions: str, threads: int, blocks: int) -> str:
    """What stands before the body: ``blocks`` of ``threads`` shall share a multiprocessor."""
    return definitions + _COMMON + reader + BOUNDS.format(threads=threads, blocks=blocks)
