"""Source of paged prefill attention by tensor cores, CUDA only: prompts behind prefixes, read from the pools.

Algorithm (FlashAttention-2, Dao 2023; split over the context as in Flash-Decoding, Dao et al. 2023):

    rows     the G queries that share a KV head at one position are G rows: row n of a KV head is query n % G of
             position n / G of the chunk. So short chunks fill a tile, and keys are read once per KV head
    grid     (tile of 64 MT rows and KV head, split of the context, row of the forward). The tiles that see most
             come first
    block    4 warps of 16 MT rows each; BN keys and values at a time, two tiles of them in shared memory: one is
             multiplied while the next is on its way (``cp.async``). Block tables are looked up per key
    scores   ``mma.sync`` m16n8k16 with fragments from ``ldmatrix``; a fragment of keys serves MT tiles of rows
    softmax  online, float32, base 2. What was summed up is only rescaled when a maximum has grown by SLACK
             powers of two: until then weights are up to 2 ** SLACK, which all types hold
    values   weights are rounded to T and become fragments where they are; values are turned over by ``ldmatrix``
    shared   a row's 16-byte pieces are permuted by its number, or rows are an odd number of pieces apart: eight
             rows of a fragment lie in different banks

A forward's rows have their own starts and lengths. Slots behind a row's end are not read; positions that a query
may not see get a weight of zero. Outputs of pads are zero. Widths are multiples of 16. Lengths come from the
shapes that MLX passes as parameters: nothing is compiled for them.

Packed pools (``kv/packing.py``): codes and scales are copied, and unpacked to T between two tiles.

``ldmatrix``, ``cp.async``, ``mma.sync``: PTX ISA, compute capability 8.0 and up.
"""

from __future__ import annotations

from headrace.runner.attention.tile_decode_source import UNROLL_AND_EXP2
from headrace.runner.kernels.shared_memory_source import COPIES
from headrace.runner.products.small_rows_source import BOUNDS, MACHINE

THREADS = 128
# Blocks that shall share a multiprocessor: 255 registers a thread.
BLOCKS = 2

# fragments: four matrices of 8 x 8 numbers of 16 bits; lane i names row i % 8 of matrix i / 8.
_INSTRUCTIONS = """
#ifdef __CUDACC__
DEVICE void copy4(unsigned to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}
DEVICE uint4 taken16(unsigned from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
    : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
  return x;
}
DEVICE unsigned taken4(unsigned from) {
  unsigned x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
DEVICE void fragments(unsigned (&x)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
DEVICE void turned_fragments(unsigned (&x)[4], unsigned at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
    : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
DEVICE unsigned pair(float low, float high, const __nv_bfloat16*) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEVICE unsigned pair(float low, float high, const __half*) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
#endif
"""

# A tile of rows of D elements in shared memory; ``moved``: the place of a piece that is an even number further on.
_TILE = """
template <int D> struct Tile {
  static constexpr int PIECES = D / 8;
  static constexpr bool PERMUTED = PIECES % 8 == 0;
  static constexpr int ROW = (PERMUTED ? PIECES : PIECES + 1) * 16;
};
template <int D> DEVICE unsigned place_in_tile(int row, int piece) {
  return row * Tile<D>::ROW + (Tile<D>::PERMUTED ? piece ^ (row % 8) : piece) * 16;
}
template <int D> DEVICE unsigned moved(unsigned place, int pieces) {
  return Tile<D>::PERMUTED ? (place ^ (pieces % 8 * 16)) + pieces / 8 * 128 : place + pieces * 16;
}
// Vectors of a packed pool on their way: pieces of 16 bytes of codes, an odd number a row.
template <int D, int GROUP, int BITS> struct Codes {
  static constexpr int GROUPS = (D + GROUP - 1) / GROUP;
  static constexpr int PIECES = GROUPS * GROUP * BITS / 128;
  static constexpr int ROW = (PIECES % 2 == 1 ? PIECES : PIECES + 1) * 16;
  static constexpr int WORDS = (GROUPS + 1) / 2;  // that hold the scales of a vector
};
template <int BITS> struct Bits {};
// Code j of the eighth-vector i of a piece, plus 32768.
DEVICE float code(uint4 x, int i, int j, Bits<8>) {
  const unsigned word = (&x.x)[i * 2 + j / 4];
  return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7504u | (j % 4 << 4)));
}
DEVICE float code(uint4 x, int i, int j, Bits<4>) {
  const unsigned word = ((&x.x)[i] >> (j % 2 * 4)) & 0x0f0f0f0fu;
  return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7504u | (j / 2 << 4)));
}
template <typename T> DEVICE float half_of(unsigned word, int which, const T*) {
  T both[2];
  *(unsigned*)both = word;
  return which ? float(both[1]) : float(both[0]);
}
// Unpacks a tile of BN vectors: codes and scales (biases WORDS * BN words after them) to where T is multiplied.
template <typename T, int D, int GROUP, int BITS, int BN>
DEVICE void unpack(unsigned to, unsigned codes, unsigned scales, int first, int stop, int heads, int head,
                   const T* type) {
  using C = Codes<D, GROUP, BITS>;
  constexpr int EIGHTS = 16 / BITS;       // of a piece
  UNROLL for (int i = 0; i < (BN * C::PIECES + 127) / 128; ++i) {
    const int at = int(threadIdx.x) + i * 128;
    if (BN * C::PIECES % 128 != 0 && at >= BN * C::PIECES) break;
    const int row = at % BN;
    const int piece = at / BN;
    const int position = first + row < stop ? first + row : stop - 1;
    // Scales came as whole words: those of a vector with an odd number of them may begin with the second half.
    const int half = (C::GROUPS % 2 == 0 ? 0 : (position * heads + head) % 2) + piece * EIGHTS * 8 / GROUP;
    const unsigned place = scales + (half / 2 * BN + row) * 4;
    const float scale = half_of(taken4(place), half % 2, type);
    const float bias = half_of(taken4(place + C::WORDS * BN * 4), half % 2, type) - 32768.0f * scale;
    const uint4 x = taken16(codes + row * C::ROW + piece * 16);
    UNROLL for (int e = 0; e < EIGHTS; ++e) {
      if ((piece * EIGHTS + e) * 8 >= D) break;
      uint4 y;
      UNROLL for (int j = 0; j < 4; ++j)
        (&y.x)[j] = pair(fmaf(code(x, e, 2 * j, Bits<BITS>()), scale, bias),
                         fmaf(code(x, e, 2 * j + 1, Bits<BITS>()), scale, bias), type);
      put16(to + place_in_tile<D>(row, piece * EIGHTS + e), y);
    }
  }
}
DEVICE float soft(float x) { return 1.0f - 2.0f / (1.0f + EXP2(x * 2.88539008f)); }
"""

HEADER = MACHINE + UNROLL_AND_EXP2 + COPIES + _INSTRUCTIONS + _TILE + BOUNDS.format(threads=THREADS, blocks=BLOCKS)

# Constants: T, DK and DV elements of a key and a value, G queries per KV head, KV heads, MT tiles of 16 rows per
# warp, BN keys at a time, HAS_SOFTCAP; WHOLE: one split, which writes the result.
# Inputs: q [B, H, L, DK], k [slots, KV, DK] and v [slots, KV, DV] of T, tables [B, width], bases [B], offsets [B],
# ends [B] (``ForwardBatch``, ``GroupBatch``), sizes [3] int32 (positions per block as a power of two, window or 0,
# whether there are sinks), params [2] float32 (scale, softcap or 0), sinks [H] float32, mark (orders the kernel
# after writes; not read).
# Packed (PACKED): k and v are words of codes, each followed by scales and biases [slots, KV, groups] of T; BITS of
# a code, GK and GV elements that share a scale.
# Outputs: out [B, L, H, DV] of T (WHOLE), else part_out [B, L, H, splits, DV] and stats [B, L, H, splits, 2], both
# float32.
BODY = """
  constexpr int BM = 64 * MT;
  constexpr int H = KV * G;
  constexpr int STEPS = DK / 16;
  constexpr int KEYS = BN / 8;            // tiles of 8 keys
  constexpr int DIMS = DV / 8;            // tiles of 8 elements of a value
  constexpr bool HELD = DK <= 64;         // queries stay in registers
  constexpr int KEY_BYTES = BN * Tile<DK>::ROW;
  constexpr int VALUE_BYTES = BN * Tile<DV>::ROW;
  constexpr float LOG2E = 1.44269504f;
  constexpr float HIDDEN = -1e30f;
  constexpr float LEAST = -1e20f;         // far from HIDDEN, so that what is hidden weighs nothing from the start
  constexpr float SLACK = 8.0f;
  const T* type = q;
#ifdef PACKED
  constexpr int STAGES = 1;               // of what is multiplied; the next tile's codes come while it is
#else
  constexpr int STAGES = 2;
#endif

  const int length = q_shape[2];
  const int width = tables_shape[1];
  const int index = int(threadIdx.x);
  const int warp = index / 32;
  const int lane = index % 32;
  const int g = lane / 4;
  const int t = lane % 4;
  const int kv_head = int(blockIdx.x) % KV;
  const int first_row = (int(gridDim.x) / KV - 1 - int(blockIdx.x) / KV) * BM;
  const int split = int(blockIdx.y);
  const int splits = int(gridDim.y);
  const int row = int(blockIdx.z);
  const int shift = sizes[0];
  const int window = sizes[1] > 0 ? sizes[1] : 1 << 30;
  const float inner = HAS_SOFTCAP ? params[0] / params[1] : 1.0f;
  const float factor = (HAS_SOFTCAP ? params[1] : params[0]) * LOG2E;

  // Positions are counted from the table's first slot.
  const int offset = offsets[row] - bases[row];
  const int rows = (ends[row] - offsets[row]) * G;
  const int last_row = (first_row + BM < rows ? first_row + BM : rows) - 1;
  const int oldest = offset + first_row / G - window + 1;
  const int stop = offset + last_row / G + 1;
  int from = oldest > 0 ? oldest / BN : 0;
  int to = (stop + BN - 1) / BN;
  const int share = (to - from + splits - 1) / splits;
  from += split * share;
  to = first_row >= rows ? from : from + share < to ? from + share : to;

  const unsigned queries_at = shared_memory();
  const unsigned keys_at = queries_at + BM * Tile<DK>::ROW;
  const unsigned values_at = keys_at + STAGES * KEY_BYTES;

  // Places in the pools are counted in 16 bytes.
  const int* table = tables + row * width;
  const unsigned within = (1u << shift) - 1;
  const auto slot_of = [&](int position) {
    const int at = position < stop ? position : stop - 1;
    return unsigned(table[at >> shift]) * (within + 1) + (unsigned(at) & within);
  };
#ifdef PACKED
  const unsigned key_codes_at = values_at + VALUE_BYTES;
  const unsigned value_codes_at = key_codes_at + BN * Codes<DK, GK, BITS>::ROW;
  const unsigned key_scales_at = value_codes_at + BN * Codes<DV, GV, BITS>::ROW;
  const unsigned value_scales_at = key_scales_at + 2 * Codes<DK, GK, BITS>::WORDS * BN * 4;
  const auto load = [&](int tile, int) {
    using CK = Codes<DK, GK, BITS>;
    using CV = Codes<DV, GV, BITS>;
    UNROLL for (int i = 0; i < (BN * CK::PIECES + 127) / 128; ++i) {
      const int at = index + i * 128;
      if (BN * CK::PIECES % 128 != 0 && at >= BN * CK::PIECES) break;
      const int position = tile * BN + at / CK::PIECES;
      const unsigned place = (slot_of(position) * KV + kv_head) * CK::PIECES + at % CK::PIECES;
      copy16(key_codes_at + at / CK::PIECES * CK::ROW + at % CK::PIECES * 16, (const uint4*)k + place,
             position < stop);
    }
    UNROLL for (int i = 0; i < (BN * CV::PIECES + 127) / 128; ++i) {
      const int at = index + i * 128;
      if (BN * CV::PIECES % 128 != 0 && at >= BN * CV::PIECES) break;
      const int position = tile * BN + at / CV::PIECES;
      const unsigned place = (slot_of(position) * KV + kv_head) * CV::PIECES + at % CV::PIECES;
      copy16(value_codes_at + at / CV::PIECES * CV::ROW + at % CV::PIECES * 16, (const uint4*)v + place,
             position < stop);
    }
    if (index < 2 * BN) {
      const bool of_keys = index < BN;
      const int groups = of_keys ? CK::GROUPS : CV::GROUPS;
      const int words = of_keys ? CK::WORDS : CV::WORDS;
      const unsigned place = (slot_of(tile * BN + index % BN) * KV + kv_head) * groups / 2;
      const unsigned to_here = (of_keys ? key_scales_at : value_scales_at) + index % BN * 4;
      for (int w = 0; w < words; ++w) {
        copy4(to_here + w * BN * 4, (const unsigned*)(of_keys ? ks : vs) + place + w);
        copy4(to_here + (words + w) * BN * 4, (const unsigned*)(of_keys ? kb : vb) + place + w);
      }
    }
  };
#else
  const auto load = [&](int tile, int stage) {
    constexpr int PK = Tile<DK>::PIECES;
    constexpr int PV = Tile<DV>::PIECES;
    UNROLL for (int i = 0; i < (BN * PK + 127) / 128; ++i) {
      const int at = index + i * 128;
      if (BN * PK % 128 == 0 || at < BN * PK) {
        const int position = tile * BN + at / PK;
        const unsigned place = (slot_of(position) * KV + kv_head) * PK + at % PK;
        const unsigned spot = place_in_tile<DK>(at / PK, at % PK);
        copy16(keys_at + stage * KEY_BYTES + spot, (const uint4*)k + place, position < stop);
        if (DK == DV) copy16(values_at + stage * VALUE_BYTES + spot, (const uint4*)v + place, position < stop);
      }
    }
    if (DK == DV) return;
    UNROLL for (int i = 0; i < (BN * PV + 127) / 128; ++i) {
      const int at = index + i * 128;
      if (BN * PV % 128 == 0 || at < BN * PV) {
        const int position = tile * BN + at / PV;
        const unsigned place = (slot_of(position) * KV + kv_head) * PV + at % PV;
        copy16(values_at + stage * VALUE_BYTES + place_in_tile<DV>(at / PV, at % PV), (const uint4*)v + place,
               position < stop);
      }
    }
  };
#endif

  // This lane's rows: g and g + 8 of the warp's tiles of 16.
  const int warp_row = first_row + warp * MT * 16;
  int seen[MT][2];                        // last position that a row sees
  float total[MT][DIMS][4];
  float top[MT][2], weight[MT][2];
  UNROLL for (int m = 0; m < MT; ++m) {
    UNROLL for (int h = 0; h < 2; ++h) {
      seen[m][h] = offset + (warp_row + m * 16 + h * 8 + g) / G;
      top[m][h] = LEAST;
      weight[m][h] = 0.0f;
    }
    UNROLL for (int d = 0; d < DIMS; ++d)
      UNROLL for (int i = 0; i < 4; ++i) total[m][d][i] = 0.0f;
  }
  const int lowest = offset + warp_row / G;
  const int warp_last = warp_row + MT * 16 <= rows ? warp_row + MT * 16 - 1 : rows - 1;
  const int highest = warp_row < rows ? offset + warp_last / G : -1;
  const unsigned query_spot = place_in_tile<DK>(warp * MT * 16 + lane % 16, lane / 16);
  const unsigned key_spot = place_in_tile<DK>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const unsigned value_spot = place_in_tile<DV>(lane % 16, lane / 16);

  unsigned held[HELD ? MT : 1][HELD ? STEPS : 1][4];
  if (from < to) {
    constexpr int PK = Tile<DK>::PIECES;
    UNROLL for (int i = 0; i < BM * PK / 128; ++i) {
      const int at = index + i * 128;
      const int n = first_row + at / PK;
      const int real = n < rows ? n : rows - 1;
      const size_t vector = size_t(row * H + kv_head * G + real % G) * length + real / G;
      copy16(queries_at + place_in_tile<DK>(at / PK, at % PK), q + vector * DK + at % PK * 8, n < rows);
    }
    load(from, 0);
    started();
    if (HELD) {
      arrived();
      meet();
      UNROLL for (int m = 0; m < (HELD ? MT : 0); ++m)
        UNROLL for (int s = 0; s < STEPS; ++s)
          fragments(held[m][s], queries_at + moved<DK>(query_spot, 2 * s) + m * 16 * Tile<DK>::ROW);
    }
  }

  for (int tile = from; tile < to; ++tile) {
    const int stage = (tile - from) % STAGES;
    arrived();
    meet();                               // the tile before is used up
#ifdef PACKED
    unpack<T, DK, GK, BITS, BN>(keys_at, key_codes_at, key_scales_at, tile * BN, stop, KV, kv_head, type);
    unpack<T, DV, GV, BITS, BN>(values_at, value_codes_at, value_scales_at, tile * BN, stop, KV, kv_head, type);
    meet();
#endif
    if (tile + 1 < to) load(tile + 1, 1 - stage);
    started();
    if (tile * BN > highest || tile * BN + BN - 1 <= lowest - window) continue;

    float score[MT][KEYS][4];
    UNROLL for (int m = 0; m < MT; ++m)
      UNROLL for (int n = 0; n < KEYS; ++n)
        UNROLL for (int i = 0; i < 4; ++i) score[m][n][i] = 0.0f;
    UNROLL for (int s = 0; s < STEPS; ++s) {
      unsigned query[MT][4];
      UNROLL for (int m = 0; m < MT; ++m) {
        if (HELD) {
          UNROLL for (int i = 0; i < 4; ++i) query[m][i] = held[HELD ? m : 0][HELD ? s : 0][i];
        } else {
          fragments(query[m], queries_at + moved<DK>(query_spot, 2 * s) + m * 16 * Tile<DK>::ROW);
        }
      }
      const unsigned at = keys_at + stage * KEY_BYTES + moved<DK>(key_spot, 2 * s);
      UNROLL for (int n = 0; n < KEYS; n += 2) {
        unsigned key[4];
        fragments(key, at + n * 8 * Tile<DK>::ROW);
        UNROLL for (int m = 0; m < MT; ++m) {
          multiply(score[m][n], query[m][0], query[m][1], query[m][2], query[m][3], key[0], key[1], type);
          multiply(score[m][n + 1], query[m][0], query[m][1], query[m][2], query[m][3], key[2], key[3], type);
        }
      }
    }

    if (HAS_SOFTCAP)
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int n = 0; n < KEYS; ++n)
          UNROLL for (int i = 0; i < 4; ++i) score[m][n][i] = soft(score[m][n][i] * inner);
    if (tile * BN + BN - 1 > lowest || tile * BN <= highest - window) {
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int n = 0; n < KEYS; ++n)
          UNROLL for (int i = 0; i < 4; ++i) {
            const int key = tile * BN + n * 8 + t * 2 + i % 2;
            if (key > seen[m][i / 2] || key <= seen[m][i / 2] - window) score[m][n][i] = HIDDEN;
          }
    }
    float now[MT][2];
    int grown = 0;
    UNROLL for (int m = 0; m < MT; ++m)
      UNROLL for (int h = 0; h < 2; ++h) {
        float most = HIDDEN;
        UNROLL for (int n = 0; n < KEYS; ++n)
          most = fmaxf(most, fmaxf(score[m][n][2 * h], score[m][n][2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        now[m][h] = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        grown |= (now[m][h] - top[m][h]) * factor > SLACK;
      }
    if (__any_sync(0xffffffffu, grown)) {
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int h = 0; h < 2; ++h) {
          const float next = fmaxf(top[m][h], now[m][h]);
          const float correction = EXP2((top[m][h] - next) * factor);
          top[m][h] = next;
          weight[m][h] *= correction;
          UNROLL for (int d = 0; d < DIMS; ++d)
            UNROLL for (int i = 0; i < 2; ++i) total[m][d][2 * h + i] *= correction;
        }
    }
    UNROLL for (int m = 0; m < MT; ++m)
      UNROLL for (int h = 0; h < 2; ++h) {
        const float subtracted = -top[m][h] * factor;
        UNROLL for (int n = 0; n < KEYS; ++n)
          UNROLL for (int i = 0; i < 2; ++i) {
            score[m][n][2 * h + i] = EXP2(fmaf(score[m][n][2 * h + i], factor, subtracted));
            weight[m][h] += score[m][n][2 * h + i];
          }
      }

    UNROLL for (int s = 0; s < BN / 16; ++s) {
      unsigned share[MT][4];
      UNROLL for (int m = 0; m < MT; ++m)
        UNROLL for (int i = 0; i < 4; ++i)
          share[m][i] = pair(score[m][2 * s + i / 2][i % 2 * 2], score[m][2 * s + i / 2][i % 2 * 2 + 1], type);
      const unsigned at = values_at + stage * VALUE_BYTES + s * 16 * Tile<DV>::ROW;
      UNROLL for (int d = 0; d < DIMS; d += 2) {
        unsigned value[4];
        turned_fragments(value, at + moved<DV>(value_spot, d));
        UNROLL for (int m = 0; m < MT; ++m) {
          multiply(total[m][d], share[m][0], share[m][1], share[m][2], share[m][3], value[0], value[1], type);
          multiply(total[m][d + 1], share[m][0], share[m][1], share[m][2], share[m][3], value[2], value[3], type);
        }
      }
    }
  }

  UNROLL for (int m = 0; m < MT; ++m) {
    UNROLL for (int h = 0; h < 2; ++h) {
      const int n = warp_row + m * 16 + h * 8 + g;
      const int head = kv_head * G + n % G;
      float sum = weight[m][h];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (n >= length * G) continue;
      const size_t vector = size_t(row * length + n / G) * H + head;
#ifdef WHOLE
      float by = n < rows ? 1.0f / sum : 0.0f;
      if (sizes[2] && n < rows) {
        const float most = top[m][h] * factor;
        const float sink = sinks[head] * LOG2E;
        const float greatest = fmaxf(most, sink);
        const float correction = EXP2(most - greatest);
        by = correction / (sum * correction + EXP2(sink - greatest));
      }
      unsigned* to_here = (unsigned*)(out + vector * DV);
      UNROLL for (int d = 0; d < DIMS; ++d)
        to_here[d * 4 + t] = pair(total[m][d][2 * h] * by, total[m][d][2 * h + 1] * by, type);
#else
      float* to_here = part_out + (vector * splits + split) * DV;
      UNROLL for (int d = 0; d < DIMS; ++d) {
        to_here[d * 8 + t * 2] = n < rows ? total[m][d][2 * h] : 0.0f;
        to_here[d * 8 + t * 2 + 1] = n < rows ? total[m][d][2 * h + 1] : 0.0f;
      }
      if (t == 0) {
        stats[(vector * splits + split) * 2] = n < rows ? top[m][h] * factor : 0.0f;
        stats[(vector * splits + split) * 2 + 1] = n < rows ? sum : 1.0f;
      }
#endif
    }
  }
"""
