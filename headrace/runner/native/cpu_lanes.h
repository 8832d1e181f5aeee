// Vectors of sixteen values, one for each output of a strip: what cpu_products.h computes with.
//
// Written with the compiler's vector types, which it cuts for processors of narrower ones; where AVX-512 has an
// instruction that the compiler would not find, it is named.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

constexpr int kStrip = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

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

inline Floats everywhere(float value) { return value - Floats{}; }  // x - 0 is x, which compilers know; 0 + x need not be
inline Ints everywhere(int32_t value) { return value + Ints{}; }

// a · b + sum with one rounding, where the processor has it.
inline Floats fused(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, sum);
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < kStrip; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
  return sum;
#else
  return sum + a * b;
#endif
}

// For each lane: both 16-bit halves of a times those of b, added to sum; exact.
inline Ints dot(Ints a, Ints b, Ints sum) {
#if defined(__AVX512VNNI__)
  return Ints(_mm512_dpwssd_epi32(__m512i(sum), __m512i(a), __m512i(b)));
#elif defined(__AVX512BW__)
  return sum + Ints(_mm512_madd_epi16(__m512i(a), __m512i(b)));
#elif defined(__AVX2__)
  __m256i low[2], high[2];
  std::memcpy(low, &a, sizeof a);
  std::memcpy(high, &b, sizeof b);
  for (int i = 0; i < 2; i++) low[i] = _mm256_madd_epi16(low[i], high[i]);
  return sum + read<Ints>(low);
#else
  return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// The same with one value for all lanes, from memory. GCC would load it into a register of its own first, where one
// instruction does both.
inline Floats fused(Floats a, const float* b, Floats sum) {
#if defined(__AVX512F__)
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));
  return sum;
#else
  return fused(a, everywhere(*b), sum);
#endif
}

inline Ints dot(Ints a, const int32_t* b, Ints sum) {
#if defined(__AVX512VNNI__)
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));
  return sum;
#else
  return dot(a, everywhere(*b), sum);
#endif
}

inline Ints rounded(Floats x) {  // |x| below 2^22: adding 1.5 · 2^23 leaves the integer in the low bits
  return Ints(x + 12582912.0f) - 0x4B400000;
}

inline Floats floats(Ints x) { return __builtin_convertvector(x, Floats); }

#if defined(__aarch64__)
typedef __fp16 HalfFloat;
#else
typedef _Float16 HalfFloat;
#endif

// Sixteen values stored with 16 bits.
template <bool Half>
inline Floats widened(const void* memory) {
#if defined(__AVX512F__)
  const __m256i bits = read<__m256i>(memory);
  if constexpr (Half) return Floats(_mm512_cvtph_ps(bits));
  return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#else
  Floats wide;
#if defined(__F16C__)
  if constexpr (Half) {
    const __m256 parts[2] = {_mm256_cvtph_ps(read<__m128i>(memory)),
                             _mm256_cvtph_ps(read<__m128i>(static_cast<const char*>(memory) + 16))};
    std::memcpy(&wide, parts, sizeof wide);
    return wide;
  }
#endif
  uint16_t bits[kStrip];
  std::memcpy(bits, memory, sizeof bits);
  for (int i = 0; i < kStrip; i++) {
    if constexpr (Half) {
      HalfFloat half;
      std::memcpy(&half, &bits[i], sizeof half);
      wide[i] = half;
    } else {
      uint32_t word = uint32_t(bits[i]) << 16;
      float value;
      std::memcpy(&value, &word, sizeof value);
      wide[i] = value;
    }
  }
  return wide;
#endif
}

inline float greatest(Floats x) {  // of values that are not negative; NaN counts as greater than all
  Ints bits = Ints(x);
  int32_t most = 0;
  for (int i = 0; i < kStrip; i++) most = bits[i] > most ? bits[i] : most;
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
