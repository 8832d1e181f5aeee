// A few names of CUDA as C++; threads are those of shim.hpp.
#include "bfloat.hpp"
#include "shim.hpp"

#undef threadgroup_position_in_grid
#undef thread_position_in_threadgroup
#undef threadgroups_per_grid
#define __shared__ static
#define blockIdx shim::threadgroup_position
#define threadIdx shim::thread_position
using __nv_bfloat16 = bfloat;
inline void __syncthreads() { shim::group_barrier(); }
template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  return shim::shuffle_xor(value, mask);
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
// PTX ISA, prmt: each nibble of the selector picks one of the eight bytes of both words.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline float EXP2(float x) { return std::exp2(x); }
