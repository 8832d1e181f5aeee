// What the native operations and products of the CPU share: a vector of float32 as wide as the processor's, its
// exponential, a transposition, scratch memory, and the threads that the products are computed with.
//
// Sums are written with vectors alone, whose multiply-adds a compiler always fuses or never: a value's rounding
// does not depend on how many others are computed beside it.

#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

// Every library has its own.
namespace headrace __attribute__((visibility("hidden"))) {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

inline Vector load(const float* memory) { return *reinterpret_cast<const Unaligned*>(memory); }
inline void save(float* memory, Vector v) { *reinterpret_cast<Unaligned*>(memory) = v; }
inline Vector all(float x) { return Vector{} + x; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
constexpr int whole(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

template <int... J>
inline Integers lanes(std::integer_sequence<int, J...>) {
  return Integers{J...};
}
// 0, 1, 2 …
inline Integers lane_numbers() { return lanes(std::make_integer_sequence<int, kLanes>{}); }

inline float greatest(Vector v) {
  float top = v[0];
  for (int i = 1; i < kLanes; i++) top = v[i] > top ? v[i] : top;
  return top;
}

// Halves added to halves: one order, whatever the caller.
inline float sum(Vector v) {
  float parts[kLanes];
  std::memcpy(parts, &v, sizeof v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) parts[i] += parts[i + half];
  return parts[0];
}

// exp, as in cpu/elementwise.py: 2^n times a polynomial, n = round(x·log2 e); relative error below 2e-7; saturates at
// 2^±126. NaN stays NaN.
inline Vector exp(Vector x) {
  constexpr float kRound = 12582912.0f;
  Vector y = x * 1.44269504088896341f;
  y = y < -126.0f ? all(-126.0f) : y;
  y = y > 126.0f ? all(126.0f) : y;
  Vector rounded = y + kRound;
  Vector f = y - (rounded - kRound);
  Vector p = all(1.5403530393381608e-4f);
  p = p * f + 1.3333558146428443e-3f;
  p = p * f + 9.6181291076284772e-3f;
  p = p * f + 5.5504108664821580e-2f;
  p = p * f + 2.4022650695910071e-1f;
  p = p * f + 6.9314718055994531e-1f;
  p = p * f + 1.0f;
  return (Vector)((Integers)p + ((Integers)rounded << 23));
}

inline float exp_of(float x) { return exp(all(x))[0]; }

// Transposes a square of floats: at every stride (1, 2, 4 …) pairs of rows swap blocks of that width.
template <int Stride, int... J>
inline void swap_blocks(Vector& low, Vector& high, std::integer_sequence<int, J...>) {
  constexpr int N = kLanes;
  const Integers lower = {(J & Stride ? N + J - Stride : J)...};
  const Integers upper = {(J & Stride ? N + J : J + Stride)...};
  Vector a = low, b = high;
  low = __builtin_shuffle(a, b, lower);
  high = __builtin_shuffle(a, b, upper);
}

template <int Stride = 1>
inline void transpose(Vector (&square)[kLanes]) {
  if constexpr (Stride < kLanes) {
    for (int i = 0; i < kLanes; i++)
      if (!(i & Stride))
        swap_blocks<Stride>(square[i], square[i + Stride], std::make_integer_sequence<int, kLanes>{});
    transpose<2 * Stride>(square);
  }
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};
using Floats = std::unique_ptr<float, Free>;

inline Floats floats(size_t count) {
  Floats memory(static_cast<float*>(std::aligned_alloc(64, (4 * count + 63) / 64 * 64)));
  if (!memory) std::abort();
  return memory;
}

// Memory of the calling thread that lives until it asks again.
inline float* scratch(size_t count) {
  thread_local Floats memory;
  thread_local size_t capacity = 0;
  if (count > capacity) {
    memory = floats(count);
    capacity = count;
  }
  return memory.get();
}

using Piece = void (*)(const void* task, int first, int last);

// Threads that may take part in parallel().
inline int threads() {
  static const auto found = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "headrace_threads"));
  return found == nullptr ? 1 : found();
}

// Calls task(first, last) for the whole range 0…size, cut every `step`, on the threads of the products
// (sgemm.cpp), or on this one where that library is not loaded.
template <class Task>
void parallel(int size, int step, const Task& task) {
  using Parallel = void (*)(const void*, Piece, int, int);
  static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "headrace_parallel"));
  if (size < 1) return;
  if (found == nullptr) {
    task(0, size);
    return;
  }
  found(
      &task, [](const void* it, int first, int last) { (*static_cast<const Task*>(it))(first, last); }, size, step);
}

}  // namespace headrace
