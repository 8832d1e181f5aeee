// Vectors as wide as the processor's own, one output a lane: what cpu_products.h computes with. Where a processor has
// an instruction that the compiler would not find, it is named.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#include "cpu_product.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace headrace {

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HEADRACE_LANES 16
#elif defined(__AVX2__)
#define HEADRACE_LANES 8
#else
#define HEADRACE_LANES 4
#endif

constexpr int kLanes = HEADRACE_LANES;
constexpr int kParts = kStrip / kLanes;  // vectors of a strip

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));

template <typename T>
inline T read(const void* memory) {
  T value;
  std::memcpy(&value, memory, sizeof value);
  return value;
}

template <typename T>
inline void save(void* memory, T value) {
  std::memcpy(memory, &value, sizeof value);
}

// Calls it(0) … it(N - 1), each with a constant.
template <int... I, class Task>
inline void each(std::integer_sequence<int, I...>, const Task& it) {
  (it(std::integral_constant<int, I>{}), ...);
}
template <int N, class Task>
inline void each(const Task& it) {
  each(std::make_integer_sequence<int, N>{}, it);
}

inline Floats everywhere(float value) { return value - Floats{}; }  // x - 0 is x, which compilers know; 0 + x need not be
inline Ints everywhere(int32_t value) { return value + Ints{}; }

// a · b + sum, with one rounding where the processor has that.
inline Floats fused(Floats a, Floats b, Floats sum) {
#if HEADRACE_LANES == 16
  return _mm512_fmadd_ps(a, b, sum);
#elif HEADRACE_LANES == 8 && defined(__FMA__)
  return _mm256_fmadd_ps(a, b, sum);
#elif defined(__aarch64__)
  return vfmaq_f32(sum, a, b);
#else
  return sum + a * b;
#endif
}

// The same with one value for all lanes, from memory. GCC would load it into a register of its own first, where one
// instruction does both.
inline Floats fused(Floats a, const float* b, Floats sum) {
#if HEADRACE_LANES == 16
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));
  return sum;
#else
  return fused(a, everywhere(*b), sum);
#endif
}

inline Ints rounded(Floats x) {  // |x| below 2^22: adding 1.5 · 2^23 leaves the integer in the low bits
  return Ints(x + 12582912.0f) - 0x4B400000;
}

// -- exact sums of products of integers -------------------------------------------------------------------

// Words of weights, a lane each, times 16-bit integers that are the same for all lanes. A word of Bits = 4 or 8 has
// 32 / Bits weights, which are never negative, and is met by kSteps words of x, which `arranged` makes from integers in
// their order along k.
//
// In pairs: every step masks two weights out of a word, as 16-bit integers, and multiplies both.

#if defined(__aarch64__)
struct Sums {
  int32x4_t low, high;
};
inline Sums operator+(Sums a, Sums b) { return {a.low + b.low, a.high + b.high}; }
#else
typedef Ints Sums;
#endif

// Keeps the compiler from collecting products, for which there are no registers, to add them up later.
inline Ints at_once(Ints sum) {
#if defined(__x86_64__)
  asm("" : "+x"(sum));
#endif
  return sum;
}

// For each lane: both 16-bit halves of a times those of b, added to sum. NEON multiplies into lanes of 32 bits, and
// holds the products of the first lanes and of the others apart until they are asked for.
inline Sums dot(Ints a, Ints b, Sums sum) {
#if defined(__AVX512VNNI__) && HEADRACE_LANES == 16
  return Ints(_mm512_dpwssd_epi32(__m512i(sum), __m512i(a), __m512i(b)));
#elif HEADRACE_LANES == 16
  return sum + Ints(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#elif HEADRACE_LANES == 8 && defined(__AVXVNNI__)
  return Ints(_mm256_dpwssd_avx_epi32(__m256i(sum), __m256i(a), __m256i(b)));
#elif HEADRACE_LANES == 8
  return at_once(sum + Ints(_mm256_madd_epi16(__m256i(a), __m256i(b))));
#elif defined(__x86_64__)
  return at_once(sum + Ints(_mm_madd_epi16(__m128i(a), __m128i(b))));
#elif defined(__aarch64__)
  return {vmlal_s16(sum.low, vget_low_s16(int16x8_t(a)), vget_low_s16(int16x8_t(b))),
          vmlal_high_s16(sum.high, int16x8_t(a), int16x8_t(b))};
#else
  return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Sums under way that keep dot() busy: with VNNI each waits for the one before.
#if HEADRACE_LANES == 16 || defined(__AVXVNNI__)
constexpr int kSumsUnderWay = 6;
#else
constexpr int kSumsUnderWay = 1;
#endif

template <int Bits>
struct Pairs {
  static constexpr int kSteps = 16 / Bits;

  static Ints arranged(Ints a, Ints b) {
    constexpr auto all = std::make_integer_sequence<int, kLanes>{};
    return (chosen<kSteps>(a, b, all) << 16) | (chosen<0>(a, b, all) & 0xffff);
  }
  template <int Step>
  static Ints weights(Ints word) {
    return Ints(Words(word) >> (Step * Bits)) & (Bits == 4 ? 0x000F000F : 0x00FF00FF);
  }
  // `Shared`: whether x meets other weights as well, so that it is worth a register.
  template <int Step, bool Shared>
  static Sums add(Ints weights, const int32_t* x, Sums sum) {
#if defined(__AVX512VNNI__) && HEADRACE_LANES == 16
    if constexpr (!Shared) {  // GCC would load x first, where one instruction does both
      asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(x[Step]));
      return sum;
    }
#endif
    return dot(weights, everywhere(x[Step]), sum);
  }
  static Ints whole(Sums sum) {
#if defined(__aarch64__)
    return Ints(vpaddq_s32(sum.low, sum.high));
#else
    return sum;
#endif
  }

 private:
  // Of the values a, b: those that come first (Offset 0) or second in their pairs.
  template <int Offset, int... J>
  static Ints chosen(Ints a, Ints b, std::integer_sequence<int, J...>) {
    return __builtin_shuffle(a, b, Ints{(J / kSteps * 2 * kSteps + J % kSteps + Offset)...});
  }
};

template <int Bits>
struct Dots : Pairs<Bits> {};

#if defined(__ARM_FEATURE_DOTPROD)
// In bytes, where one instruction sums four products a lane: weights times the low bytes of x, which are not negative,
// and times the high ones, which have the sign. Values of x are lanes of a register.
template <int Bits>
struct Bytes {
  static constexpr int kSteps = 16 / Bits;

  static Ints arranged(Ints a, Ints b) {
    constexpr uint8_t kFour[16] = {0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15};
    constexpr uint8_t kEight[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
    const int16x8_t both = vmovn_high_s32(vmovn_s32(a), b);
    return Ints(vqtbl1q_u8(uint8x16_t(both), vld1q_u8(Bits == 4 ? kFour : kEight)));
  }
  template <int Step>
  static Ints weights(Ints word) {
    if constexpr (Bits == 8) return word;
    return Ints(Words(word) >> (Step % 2 * 4)) & 0x0F0F0F0F;
  }
  template <int Step, bool Shared>
  static Sums add(Ints weights, const int32_t* x, Sums sum) {
    const auto q = uint8x16_t(weights);
    if constexpr (Bits == 4) {
      const int32x4_t values = vld1q_s32(x);
      if constexpr (Step < 2)
        sum.low = int32x4_t(vdotq_laneq_u32(uint32x4_t(sum.low), q, uint8x16_t(values), Step));
      else
        sum.high = vdotq_laneq_s32(sum.high, int8x16_t(q), int8x16_t(values), Step);
    }
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (Bits == 8) {
      const int32x2_t values = vld1_s32(x);
      if constexpr (Step == 0)
        sum.low = int32x4_t(vdotq_lane_u32(uint32x4_t(sum.low), q, uint8x8_t(values), Step));
      else
        sum.high = vusdotq_lane_s32(sum.high, q, int8x8_t(values), Step);
    }
#endif
    return sum;
  }
  static Ints whole(Sums sum) { return sum.low + (sum.high << 8); }
};

template <>
struct Dots<4> : Bytes<4> {};
#if defined(__ARM_FEATURE_MATMUL_INT8)
template <>
struct Dots<8> : Bytes<8> {};
#endif
#endif

// -- float32 ----------------------------------------------------------------------------------------------

inline Floats floats(Ints x) { return __builtin_convertvector(x, Floats); }

// Unsigned 16-bit integers, as many as there are lanes.
inline Words shorts(const void* memory) {
#if HEADRACE_LANES == 16
  return Words(_mm512_cvtepu16_epi32(read<__m256i>(memory)));
#elif HEADRACE_LANES == 8
  return Words(_mm256_cvtepu16_epi32(read<__m128i>(memory)));
#elif defined(__x86_64__)
  return Words(_mm_unpacklo_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(memory)), _mm_setzero_si128()));
#else
  return __builtin_convertvector(read<Shorts>(memory), Words);
#endif
}

// Floats stored with 16 bits, likewise.
template <bool Half>
inline Floats widened(const void* memory) {
#if defined(__aarch64__)
  if constexpr (!Half) return Floats(vshll_n_u16(read<uint16x4_t>(memory), 16));
#endif
  if constexpr (!Half) return Floats(shorts(memory) << 16);
#if HEADRACE_LANES == 16
  return _mm512_cvtph_ps(read<__m256i>(memory));
#elif HEADRACE_LANES == 8 && defined(__F16C__)
  return _mm256_cvtph_ps(read<__m128i>(memory));
#elif defined(__aarch64__)
  return vcvt_f32_f16(read<float16x4_t>(memory));
#else
  // Exponent and mantissa in float32's places are the value times 2^-112, of the smallest numbers as well.
  const Words bits = shorts(memory);
  const Floats value = Floats((bits & 0x7fff) << 13) * 0x1p112f;
  const Words special = Words(value >= 65536.0f) & 0x7f800000u;  // infinity, NaN
  return Floats(Words(value) | special | (bits & 0x8000) << 16);
#endif
}

inline float greatest(Floats x) {  // of values that are not negative; NaN counts as greater than all
  Ints bits = Ints(x);
  int32_t most = 0;
  for (int i = 0; i < kLanes; i++) most = bits[i] > most ? bits[i] : most;
  float value;
  std::memcpy(&value, &most, sizeof value);
  return value;
}

inline Floats larger(Floats a, Floats b) {  // likewise
  return Floats(Ints(a) > Ints(b) ? Ints(a) : Ints(b));
}

inline Floats magnitude(Floats x) { return Floats(Ints(x) & 0x7fffffff); }

// e^x: 2^n times a polynomial in the rest (Taylor series of 2^f, degree 6, |f| <= 1/2), saturating at 2^±126.
inline Floats exponential(Floats x) {
  Floats y = x * 1.44269504f;
  y = y < -126.0f ? everywhere(-126.0f) : y;
  y = y > 126.0f ? everywhere(126.0f) : y;
  const Ints n = rounded(y);
  const Floats f = y - floats(n);
  Floats p = everywhere(1.5403530e-4f);
  for (float c : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f})
    p = fused(p, f, everywhere(c));
  return Floats(Ints(p) + (n << 23));
}

inline Floats silu(Floats x) { return x / (exponential(-x) + 1.0f); }

}  // namespace headrace
