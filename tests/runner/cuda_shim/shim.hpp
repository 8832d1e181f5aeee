// A few CUDA names as C++, enough to run the kernels of products/small_rows_source.py on a CPU: threads are fibers, see
// metal_shim/shim.hpp. This file takes the place of the sources' MACHINE part, so it also says what its instructions do:
// a warp's tensor-core product (mma.sync m16n8k16) gathers the fragments of 32 lanes and multiplies them by definition.
#include "../metal_shim/shim.hpp"

#define __shared__ static
#define __device__
#define __forceinline__ inline
#define __noinline__ inline
#define DEVICE static inline
#define __syncthreads() shim::block_barrier()
#define NEXT_MAY_START()
#define WAIT_FOR_EARLIER()

struct uint4 {
  unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float of_bits(int x) {
  float value;
  std::memcpy(&value, &x, 4);
  return value;
}

inline unsigned __float_as_uint(float value) {
  unsigned x;
  std::memcpy(&x, &value, 4);
  return x;
}

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    unsigned x;
    std::memcpy(&x, &value, 4);
    bits = (unsigned short)((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);  // to nearest, ties to even
  }
  operator float() const { return of_bits(int(unsigned(bits) << 16)); }
};
using __half = _Float16;

inline uint3 grid_dim, block_dim;
#define gridDim grid_dim
#define blockDim block_dim

// A cluster's blocks are one group of fibers, one block's after another's.
namespace shim {
inline int cluster_blocks = 1;
inline int block_in_cluster() { return group.current / int(block_dim.x); }
inline uint3 thread_index() { return {uint(group.current) % block_dim.x, 0, 0}; }
inline uint3 block_index() {
  return {threadgroup_position.x * cluster_blocks + block_in_cluster(), threadgroup_position.y, threadgroup_position.z};
}
inline std::vector<int> block_arrivals;
inline void block_barrier() {
  if (cluster_blocks == 1) return group_barrier();
  const int first = block_in_cluster() * int(block_dim.x);
  wait(block_arrivals, first, first + int(block_dim.x));
}
}  // namespace shim
#define threadIdx shim::thread_index()
#define blockIdx shim::block_index()

template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  static_assert(sizeof(T) == 4);
  float word;
  std::memcpy(&word, &value, 4);
  word = shim::shuffle_xor(word, mask);
  std::memcpy(&value, &word, 4);
  return value;
}
inline float __uint_as_float(unsigned x) { return of_bits(int(x)); }
// PTX ISA, prmt: each nibble of the selector picks one of the eight bytes of both words.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = uint64_t(high) << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline int __any_sync(unsigned mask, int holds) {
  for (int by = 16; by > 0; by /= 2) holds |= __shfl_xor_sync(mask, holds, by);
  return holds;
}
inline float EXP2(float x) { return std::exp2(x); }
inline int atomicAdd(int* at, int value) {
  const int old = *at;
  *at += value;
  return old;
}

namespace shim {
struct Fragments {
  unsigned a[4], b[2];
};
inline Fragments lanes_of_block[1024];

template <typename T>
inline float element(unsigned pair, int which) {
  T values[2];
  std::memcpy(values, &pair, 4);
  return float(values[which]);
}

template <typename T>
void multiply(float* c, Fragments mine) {
  const int me = group.current;
  const int warp = me / 32 * 32;
  const int g = me % 32 / 4, t = me % 4;
  lanes_of_block[me] = mine;
  warp_barrier();
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i >= 2 ? 8 : 0), column = t * 2 + i % 2;
    double sum = 0.0;
    for (int k = 0; k < 16; ++k) {
      // A [16, 16]: register 0 rows 0-7, 1 rows 8-15, 2 and 3 the same for k >= 8. B [16, 8]: register 1 for k >= 8.
      const Fragments& left = lanes_of_block[warp + row % 8 * 4 + k % 8 / 2];
      const Fragments& right = lanes_of_block[warp + column * 4 + k % 8 / 2];
      sum += double(element<T>(left.a[row / 8 + k / 8 * 2], k % 2)) * element<T>(right.b[k / 8], k % 2);
    }
    c[i] += float(sum);
  }
  warp_barrier();
}

// movmatrix m8n8 b16: row r is in lanes 4 r ... 4 r + 3, two elements each.
inline unsigned transpose(unsigned mine) {
  const int me = group.current, warp = me / 32 * 32;
  lanes_of_block[me].a[0] = mine;
  warp_barrier();
  unsigned result = 0;
  for (int i = 0; i < 2; ++i) {
    const int from = me % 4 * 2 + i, column = me % 32 / 4;
    const unsigned pair = lanes_of_block[warp + from * 4 + column / 2].a[0];
    result |= (pair >> column % 2 * 16 & 0xffffu) << i * 16;
  }
  warp_barrier();
  return result;
}

// Shared memory that is asked for at the launch: addresses are places in it. Each block of a cluster has its own.
inline std::vector<unsigned char> shared_bytes;
inline unsigned char* shared_at(unsigned at, unsigned count, int block = block_in_cluster()) {
  const size_t own = shared_bytes.size() / cluster_blocks;
  if (at % count != 0 || at + count > own) {
    std::fprintf(stderr, "shared memory at %u of %zu\n", at, own);
    std::abort();
  }
  return &shared_bytes[block * own + at];
}

// cp.async: a copy may arrive at once or as late as it is waited for; every other one does so late.
struct Copy {
  unsigned to, count;
  int group;
  unsigned char bytes[16];
};
inline std::vector<Copy> under_way[1024];
inline int groups_started[1024];
inline void copy(unsigned to, const void* from, unsigned count, bool real) {
  Copy copy{to, count, groups_started[group.current], {}};
  if (real) std::memcpy(copy.bytes, from, count);
  unsigned char* place = shared_at(to, count);
  static unsigned copies = 0;
  if ((++copies * 2654435761u >> 16) % 2) {
    std::memcpy(place, copy.bytes, count);
  } else {
    under_way[group.current].push_back(copy);
  }
}
// All groups of copies have arrived but the last ``groups``; what is in none yet may be late still.
inline void arrived(int groups) {
  const int last = groups_started[group.current] - groups;
  std::vector<Copy> late;
  for (const Copy& copy : under_way[group.current]) {
    if (copy.group < last) {
      std::memcpy(shared_at(copy.to, copy.count), copy.bytes, copy.count);
    } else {
      late.push_back(copy);
    }
  }
  under_way[group.current] = late;
}

// wgmma m64nNk16: both matrices are read from shared memory, rows 128 bytes apart; pieces of 16 bytes are permuted by
// address bits 7 to 9. Fragments of warp w of four are those of mma.sync for outputs 16 w to 16 w + 15.
template <typename T>
inline float strip_element(unsigned at, int row, int k) {
  const unsigned place = at + row * 128 + k * 2;
  T value;
  std::memcpy(&value, shared_at(place ^ (place >> 7 & 7) << 4, 2), 2);
  return float(value);
}
template <typename T, int MT>
inline void multiply64(float (&c)[MT][4], unsigned weights, unsigned inputs) {
  const int lane = group.current % 32, warp = group.current % block_dim.x / 32 % 4;
  for (int m = 0; m < MT; ++m)
    for (int i = 0; i < 4; ++i) {
      const int output = warp * 16 + lane / 4 + i / 2 * 8, row = m * 8 + lane % 4 * 2 + i % 2;
      double sum = 0.0;
      for (int k = 0; k < 16; ++k)
        sum += double(strip_element<T>(weights, output, k)) * strip_element<T>(inputs, row, k);
      c[m][i] += float(sum);
    }
}

// ldmatrix x4: lane i names row i % 8 of matrix i / 8; lane i gets elements i % 4 * 2 and the next of row i / 4.
inline void fragments(unsigned (&x)[4], unsigned at, bool turned) {
  const int me = group.current, warp = me / 32 * 32, row = me % 32 / 4, column = me % 4 * 2;
  lanes_of_block[me].a[0] = at;
  warp_barrier();
  for (int matrix = 0; matrix < 4; ++matrix) {
    unsigned short pair[2];
    for (int i = 0; i < 2; ++i) {
      const int r = turned ? column + i : row, c = turned ? row : column + i;
      std::memcpy(&pair[i], shared_at(lanes_of_block[warp + matrix * 8 + r].a[0], 16) + 2 * c, 2);
    }
    std::memcpy(&x[matrix], pair, 4);
  }
  warp_barrier();
}

inline void launch_cuda(uint3 blocks, int threads, const std::function<void()>& body, int bytes = 0, int cluster = 1) {
  grid_dim = blocks;
  cluster_blocks = cluster;
  shared_bytes.assign(bytes * cluster, 0xff);
  block_dim = {uint(threads), 1, 1};
  block_arrivals.assign(threads * cluster, 0);
  launch({blocks.x * threads, blocks.y, blocks.z}, threads * cluster, body);
}
}  // namespace shim

template <typename T>
inline void multiply(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1,
                     const T*) {
  shim::multiply<T>(c, {{a0, a1, a2, a3}, {b0, b1}});
}
inline unsigned transposed(unsigned x) { return shim::transpose(x); }
inline uint4 cached(const void* at) {
  uint4 value;
  std::memcpy(&value, at, 16);
  return value;
}
inline uint4 stream(const void* at) { return cached(at); }
inline uint4 once(const void* at) { return cached(at); }
inline float low(unsigned x) { return of_bits(int(x << 16)); }
inline float high(unsigned x) { return of_bits(int(x & 0xffff0000u)); }
inline unsigned scaled(unsigned x, unsigned by) {
  const unsigned first = __nv_bfloat16(low(x) * low(by)).bits, second = __nv_bfloat16(high(x) * high(by)).bits;
  return first | second << 16;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float exponential(float x) { return std::exp(x); }
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline unsigned half_word(const void* at) {
  unsigned short value;
  std::memcpy(&value, at, 2);
  return value;
}
template <typename T>
inline unsigned fused(unsigned x, unsigned by, unsigned plus, const T*) {
  T values[2];
  for (int i = 0; i < 2; ++i) {
    values[i] = T(shim::element<T>(x, i) * shim::element<T>(by, i) + shim::element<T>(plus, i));
  }
  unsigned result;
  std::memcpy(&result, values, 4);
  return result;
}
inline unsigned masked(unsigned x, unsigned mask, unsigned with) { return (x & mask) | with; }
inline unsigned rounded(float low, float high) {
  return __nv_bfloat16(low).bits | unsigned(__nv_bfloat16(high).bits) << 16;
}

inline unsigned shared_memory() { return 0; }
inline void copy16(unsigned to, const void* from, bool real) { shim::copy(to, from, 16, real); }
inline void copy4(unsigned to, const void* from) { shim::copy(to, from, 4, true); }
template <typename T>
inline T taken(unsigned from) {
  T x;
  std::memcpy(&x, shim::shared_at(from, sizeof(T)), sizeof(T));
  return x;
}
inline uint4 taken16(unsigned from) { return taken<uint4>(from); }
inline unsigned taken4(unsigned from) { return taken<unsigned>(from); }
inline void put16(unsigned to, uint4 x) { std::memcpy(shim::shared_at(to, 16), &x, 16); }
template <int COUNT>
inline uint4* shared_pieces() {
  return reinterpret_cast<uint4*>(shim::shared_at(0, 16) + 0 * *shim::shared_at(COUNT * 16 - 16, 16));
}
inline void started() { ++shim::groups_started[shim::group.current]; }
template <int GROUPS>
inline void arrived_but() { shim::arrived(GROUPS); }
inline void arrived() { shim::arrived(0); }
inline void meet() { shim::block_barrier(); }
inline void visible() {}
inline void begin_products() {}
inline void given_products() {}
template <int MT>
inline void end_products(float (&)[MT][4]) {}
template <typename T, int MT>
inline void multiply64(float (&c)[MT][4], unsigned weights, unsigned inputs, const T*) {
  shim::multiply64<T, MT>(c, weights, inputs);
}
inline void put_float(unsigned to, float x) { std::memcpy(shim::shared_at(to, 4), &x, 4); }
inline void add4_of(float (&sum)[4], unsigned from, int block) {
  float values[4];
  std::memcpy(values, shim::shared_at(from, 16, block), 16);
  for (int i = 0; i < 4; ++i) sum[i] += values[i];
}
inline void add4(float (&sum)[4], unsigned from) { add4_of(sum, from, shim::block_in_cluster()); }
inline void meet_cluster() { shim::group_barrier(); }
inline void fragments(unsigned (&x)[4], unsigned at) { shim::fragments(x, at, false); }
inline void turned_fragments(unsigned (&x)[4], unsigned at) { shim::fragments(x, at, true); }
template <typename T>
inline unsigned pair(float low, float high, const T*) {
  const T both[2] = {T(low), T(high)};
  unsigned y;
  std::memcpy(&y, both, 4);
  return y;
}
inline float fmaf(float x, float y, float z) { return std::fma(x, y, z); }
