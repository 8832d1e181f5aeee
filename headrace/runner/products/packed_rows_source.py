"""CUDA source of products of few rows with packed weights: codes become tensor-core fragments in registers.

Weights are as MLX packs them, affine: words ``[N, K * BITS / 32]`` hold codes of consecutive inner positions, the
first in the lowest bits; a weight is scale * code + bias, one of each 16-bit pair per GROUP positions.

    chunk    64 positions of 8 bits, 128 of 4: a lane reads 16 bytes of a weight row, four lanes share a row. Warps
             take chunks in turn, so that a block reads rows in order
    ahead    DEEP chunks of codes are on their way while one is multiplied; inputs come from the cache
    4 bits   a code put among the mantissa bits of 128 (bfloat16) or 1024 (float16) is their sum; the offset is
             taken off exactly, then one multiply-add gives the weight, rounded once. A word's codes come out in
             pairs (i, i + 4), so the inputs' pairs are made the same: sums do not notice the order of positions
    8 bits   float16 alike. bfloat16 has no mantissa for 256 codes: they become floats, 32768 + code, and the
             offset is part of the bias, which costs at most 2^-9 of a scale before the weight is rounded
    norm     as in ``small_rows_source.py``, but for the squares: those are the diagonal of a tile's product with
             itself
    shared   the inputs of one row alone may be put into shared memory first, times the norm's weights and in the
             order in which lanes read them: chunks then wait for their codes alone

Everything else (tiles, gathering, ends) is the 16-bit product's. The inner dimension is a multiple of 32; lanes
whose positions are behind it add nothing.
"""

from __future__ import annotations

# What is not plain C++; ``tests/runner/cuda_shim`` has it for the CPU.
_MACHINE = """
#ifdef __CUDACC__
DEVICE unsigned half_word(const void* at) {
  unsigned short v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(at));
  return v;
}
DEVICE unsigned fused(unsigned x, unsigned by, unsigned plus, const __nv_bfloat16*) {
  unsigned y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(by), "r"(plus));
  return y;
}
DEVICE unsigned fused(unsigned x, unsigned by, unsigned plus, const __half*) {
  unsigned y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(by), "r"(plus));
  return y;
}
DEVICE unsigned masked(unsigned x, unsigned mask, unsigned with) {
  unsigned y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(with));
  return y;
}
// Shared memory that the launch asks for; COUNT pieces of it are used.
template <int COUNT> DEVICE uint4* shared_pieces() {
  extern __shared__ __align__(1024) uint4 storage[];
  return storage;
}
DEVICE unsigned rounded(float low, float high) {
  unsigned y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
#endif
"""

# weights_of: the part p (8 positions) of a lane's codes as four pairs of weights. arrange: inputs in the same
# order. accumulate_packed: the sums of one warp's chunks; words, scales and biases point at row g of their tiles,
# inputs and norm at position 0 of their rows; the rest as accumulate.
PACKED_PRODUCT = (
    _MACHINE
    + """
template <typename T> struct Magic;
template <> struct Magic<__nv_bfloat16> {
  static constexpr unsigned OFFSET = 0x43004300u, MINUS = 0xc300c300u, ONE = 0x3f803f80u;
};
template <> struct Magic<__half> {
  static constexpr unsigned OFFSET = 0x64006400u, MINUS = 0xe400e400u, ONE = 0x3c003c00u;
};
template <int BITS> struct Bits {};
struct Pairs { unsigned scale, bias; };
struct Floats { float scale, bias; };
template <typename T, int BITS> struct AffineOf { using Type = Pairs; };
template <> struct AffineOf<__nv_bfloat16, 8> { using Type = Floats; };
DEVICE void spread(Pairs& to, unsigned scale, unsigned bias) {
  to.scale = __byte_perm(scale, 0, 0x1010);
  to.bias = __byte_perm(bias, 0, 0x1010);
}
DEVICE void spread(Floats& to, unsigned scale, unsigned bias) {
  to.scale = low(scale);
  to.bias = low(bias) - 32768.0f * to.scale;
}
template <typename T>
DEVICE unsigned weighted(unsigned codes, const Pairs& by) {
  const T* kind = nullptr;
  return fused(fused(codes, Magic<T>::ONE, Magic<T>::MINUS, kind), by.scale, by.bias, kind);
}
template <typename T>
DEVICE void weights_of(Bits<4>, const uint4& codes, int p, const Pairs& by, unsigned (&pairs)[4]) {
  const unsigned word = (&codes.x)[p];
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = weighted<T>(masked(word >> (4 * i), 0x000f000fu, Magic<T>::OFFSET), by);
  }
}
template <typename T>
DEVICE void weights_of(Bits<8>, const uint4& codes, int p, const Pairs& by, unsigned (&pairs)[4]) {
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = (&codes.x)[p * 2 + i / 2];
    pairs[i] = weighted<T>(__byte_perm(word, Magic<T>::OFFSET, i % 2 == 0 ? 0x5150u : 0x5352u), by);
  }
}
DEVICE float weight_at(unsigned word, int which, const Floats& by) {
  return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7604u + which * 16)) * by.scale + by.bias;
}
template <typename T>
DEVICE void weights_of(Bits<8>, const uint4& codes, int p, const Floats& by, unsigned (&pairs)[4]) {
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned word = (&codes.x)[p * 2 + i / 2];
    pairs[i] = rounded(weight_at(word, i % 2 * 2, by), weight_at(word, i % 2 * 2 + 1, by));
  }
}
DEVICE void arrange(Bits<8>, uint4&) {}
DEVICE void arrange(Bits<4>, uint4& x) {
  x = make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                 __byte_perm(x.y, x.w, 0x7632));
}
// Products of rows with rows of a tile of inputs, which then are multiplied with the norm's weights. An even and
// an odd tile share a fragment of sums.
template <typename T>
DEVICE void normalize(uint4& x, const uint4& by, float (&products)[4], bool even, const T* kind) {
  if (even) {
    multiply(products, x.x, 0, x.y, 0, x.x, x.y, kind);
    multiply(products, x.z, 0, x.w, 0, x.z, x.w, kind);
  } else {
    multiply(products, 0, x.x, 0, x.y, x.x, x.y, kind);
    multiply(products, 0, x.z, 0, x.w, x.z, x.w, kind);
  }
  x = make_uint4(scaled(x.x, by.x), scaled(x.y, by.y), scaled(x.z, by.z), scaled(x.w, by.w));
}
// A lane's place in a weight tile: row g's codes, scales and biases.
struct Place {
  const unsigned* words;
  const unsigned short* scales;
  const unsigned short* biases;
};
// 16 bytes of codes of rows g and g + 8, and their scales and biases. One pointer each, as registers are scarce.
template <int BITS, int GROUP>
DEVICE void fetch(uint4 (&codes)[2], unsigned (&scale)[2], unsigned (&bias)[2], const Place& at, int ahead,
                  int K) {
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    codes[i] = stream(at.words + i * (K / 32 * BITS * 8) + ahead / 32 * BITS);
    scale[i] = half_word(at.scales + i * (K / GROUP * 8) + ahead / GROUP);
    bias[i] = half_word(at.biases + i * (K / GROUP * 8) + ahead / GROUP);
  }
}
// One row's K inputs in shared memory, in pieces of 8; a chunk's pieces go by part, then by lane of four.
template <int BITS, int K>
struct SharedInputs {
  static constexpr int PARTS = 16 / BITS;
  static constexpr int CHUNK = 4 * PARTS;
  static constexpr int PIECES = (K / 8 + CHUNK - 1) / CHUNK * CHUNK;
};
// Fills them from x. With NORMED the result is the sum of the warp's squares in lane 0.
template <typename T, int BITS, int K, int W, bool NORMED>
DEVICE float share_inputs(uint4* shared, const T* x, const T* norm) {
  using Sizes = SharedInputs<BITS, K>;
  constexpr int EACH = (Sizes::PIECES + W * 32 - 1) / (W * 32);
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 gain[NORMED ? EACH : 1];
  if (NORMED) {
    #pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int piece = e * W * 32 + threadIdx.x;
      gain[NORMED ? e : 0] = piece < K / 8 ? cached(norm + piece * 8) : zero;
    }
  }
  WAIT_FOR_EARLIER();
  float squares = 0.0f;
  #pragma unroll 8
  for (int e = 0; e < EACH; ++e) {
    const int piece = e * W * 32 + threadIdx.x;
    if (piece >= Sizes::PIECES) break;
    uint4 in = piece < K / 8 ? cached(x + piece * 8) : zero;
    if (NORMED) normalize(in, gain[NORMED ? e : 0], squares);
    arrange(Bits<BITS>(), in);
    const int place = piece % Sizes::CHUNK;
    shared[piece - place + place % Sizes::PARTS * 4 + place / Sizes::PARTS] = in;
  }
  if (NORMED) {
    #pragma unroll
    for (int by = 16; by > 0; by /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, by);
  }
  __syncthreads();
  return threadIdx.x % 32 == 0 ? squares : 0.0f;
}
// SHARED: so many inputs of the one row x wait in shared memory. 0: lanes read their inputs themselves.
template <typename T, int BITS, int GROUP, bool WHOLE, int W, int MT, int NT, bool NORMED, int DEEP,
          int SHARED = 0>
DEVICE void accumulate_packed(float (&total)[NT][MT][4], float (&squares)[MT],
                              const unsigned* const (&words)[NT], const unsigned short* const (&scales)[NT],
                              const unsigned short* const (&biases)[NT], const T* const (&inputs)[MT],
                              const bool (&real)[MT], const T* norm, int K, int warp, const T* x = nullptr) {
  constexpr int CODES = 128 / BITS;
  constexpr int PARTS = CODES / 8;
  constexpr int TOGETHER = MT <= 2 ? PARTS : 1;
  constexpr int STEP = W * 4 * CODES;
  using Affine = typename AffineOf<T, BITS>::Type;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  const int own = threadIdx.x % 4 * CODES;
  const int begin = warp * 4 * CODES + own;
  Place at[NT];
  const T* in_at[MT];
  const T* gain_at = norm + begin;
  #pragma unroll
  for (int n = 0; n < NT; ++n) {
    at[n] = {words[n] + begin / 8 * BITS / 4, scales[n] + begin / GROUP, biases[n] + begin / GROUP};
  }
  #pragma unroll
  for (int m = 0; m < MT; ++m) in_at[m] = inputs[m] + begin;
  float products[(MT + 1) / 2][4] = {};
  uint4 codes[DEEP][NT][2];
  unsigned scale[DEEP][NT][2], bias[DEEP][NT][2];
  int left = K - warp * 4 * CODES;  // positions from the warp's chunk on
  #pragma unroll
  for (int d = 0; d < DEEP; ++d) {
    #pragma unroll
    for (int n = 0; n < NT; ++n) {
      if (!WHOLE && own >= left - d * STEP) {
        codes[d][n][0] = codes[d][n][1] = zero;
        scale[d][n][0] = scale[d][n][1] = bias[d][n][0] = bias[d][n][1] = 0;
      } else if (d * STEP < left) {
        fetch<BITS, GROUP>(codes[d][n], scale[d][n], bias[d][n], at[n], d * STEP, K);
      }
    }
  }
  float shared_squares = 0.0f;
  const uint4* shared_at = nullptr;
  if constexpr (SHARED > 0) {
    uint4* shared = shared_pieces<SharedInputs<BITS, SHARED>::PIECES>();
    shared_squares = share_inputs<T, BITS, SHARED, W, NORMED>(shared, x, norm);
    shared_at = shared + warp * CODES / 2 + threadIdx.x % 4;
  } else {
    WAIT_FOR_EARLIER();
  }
  for (; left > 0; left -= DEEP * STEP) {
    #pragma unroll
    for (int d = 0; d < DEEP; ++d) {
      if (d * STEP >= left) break;
      const bool inside = WHOLE || own < left - d * STEP;
      Affine affine[NT][2];
      #pragma unroll
      for (int n = 0; n < NT; ++n) {
        spread(affine[n][0], scale[d][n][0], bias[d][n][0]);
        spread(affine[n][1], scale[d][n][1], bias[d][n][1]);
      }
      #pragma unroll
      for (int part = 0; part < PARTS; part += TOGETHER) {
        uint4 in[TOGETHER][MT], gain[TOGETHER];
        #pragma unroll
        for (int p = 0; p < TOGETHER; ++p) {
          const int ahead = d * STEP + (part + p) * 8;
          #pragma unroll
          for (int m = 0; m < MT; ++m) {
            if (SHARED > 0) {
              in[p][m] = inside && real[m] ? shared_at[d * STEP / 8 + (part + p) * 4] : zero;
            } else {
              in[p][m] = inside && real[m] ? cached(in_at[m] + ahead) : zero;
            }
          }
          if (NORMED && SHARED == 0) gain[p] = inside ? cached(gain_at + ahead) : zero;
        }
        #pragma unroll
        for (int p = 0; p < TOGETHER; ++p) {
          #pragma unroll
          for (int m = 0; m < MT; ++m) {
            if (NORMED && SHARED == 0) normalize(in[p][m], gain[p], products[m / 2], m % 2 == 0, norm);
            if (SHARED == 0) arrange(Bits<BITS>(), in[p][m]);
          }
          #pragma unroll
          for (int n = 0; n < NT; ++n) {
            unsigned a[4], b[4];
            weights_of<T>(Bits<BITS>(), codes[d][n][0], part + p, affine[n][0], a);
            weights_of<T>(Bits<BITS>(), codes[d][n][1], part + p, affine[n][1], b);
            #pragma unroll
            for (int m = 0; m < MT; ++m) {
              multiply(total[n][m], a[0], b[0], a[1], b[1], in[p][m].x, in[p][m].y, norm);
              multiply(total[n][m], a[2], b[2], a[3], b[3], in[p][m].z, in[p][m].w, norm);
            }
          }
        }
      }
      const int rest = left - (d + DEEP) * STEP;
      if (rest > (WHOLE ? 0 : own)) {
        #pragma unroll
        for (int n = 0; n < NT; ++n) {
          fetch<BITS, GROUP>(codes[d][n], scale[d][n], bias[d][n], at[n], (d + DEEP) * STEP, K);
        }
      }
    }
    #pragma unroll
    for (int n = 0; n < NT; ++n) {
      at[n].words += DEEP * STEP / 32 * BITS;
      at[n].scales += DEEP * STEP / GROUP;
      at[n].biases += DEEP * STEP / GROUP;
    }
    #pragma unroll
    for (int m = 0; m < MT; ++m) in_at[m] += DEEP * STEP;
    gain_at += DEEP * STEP;
    shared_at += DEEP * STEP / 8;
  }
  if (SHARED > 0) {
    squares[0] = shared_squares;
    return;
  }
  const int g = threadIdx.x % 32 / 4;
  #pragma unroll
  for (int m = 0; m < MT; ++m) {
    const float* found = &products[m / 2][m % 2 * 2];
    squares[m] = g / 2 != threadIdx.x % 4 ? 0.0f : g % 2 == 0 ? found[0] : found[1];
  }
}
"""
)
