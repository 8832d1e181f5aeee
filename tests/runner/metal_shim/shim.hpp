// A few names of the Metal language as C++, enough to run the kernels of attention/paged_decode_source.py on a CPU.
//
// The threads of one threadgroup are fibers of one operating system thread: a barrier or a shuffle yields until every
// thread of the group (or of the simdgroup of 32) has arrived. Threadgroups run one after another, so threadgroup
// memory is static memory. What this shows: indexing, reductions, barriers in uniform control flow. What it does not:
// anything about the Metal compiler or a GPU's memory order.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

using ushort = unsigned short;
using uint = unsigned int;
using half = _Float16;
#define threadgroup static
#define device

struct uint3 {
  uint x, y, z;
};

namespace shim {
struct Group {
  int size = 0, current = 0;
  std::vector<ucontext_t> fibers;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<int> group_arrivals, warp_arrivals;
  std::vector<char> done;
  std::vector<float> lanes;
  ucontext_t scheduler;
  std::function<void()> body;
};
inline Group group;
inline uint3 threadgroup_position, thread_position, threadgroups;

inline void yield() { swapcontext(&group.fibers[group.current], &group.scheduler); }

inline int lowest(const std::vector<int>& arrivals, int first, int last) {
  int low = INT32_MAX;
  for (int t = first; t < last; ++t) low = std::min(low, group.done[t] ? INT32_MAX : arrivals[t]);
  return low;
}

inline void wait(std::vector<int>& arrivals, int first, int last) {
  const int mine = ++arrivals[group.current];
  while (lowest(arrivals, first, last) < mine) yield();
}

inline void group_barrier() { wait(group.group_arrivals, 0, group.size); }

inline void warp_barrier() {
  const int first = group.current / 32 * 32;
  wait(group.warp_arrivals, first, std::min(first + 32, group.size));
}

inline float shuffle_xor(float value, int mask) {
  const int me = group.current;
  group.lanes[me] = value;
  warp_barrier();
  const float other = group.lanes[me ^ mask];
  warp_barrier();
  return other;
}

inline uint shuffle_xor(uint value, int mask) {  // lanes hold bits, whatever they mean
  float word;
  std::memcpy(&word, &value, 4);
  word = shuffle_xor(word, mask);
  std::memcpy(&value, &word, 4);
  return value;
}

inline void entry() {
  group.body();
  group.done[group.current] = 1;
  swapcontext(&group.fibers[group.current], &group.scheduler);
}

inline void run_group(int size, std::function<void()> body) {
  constexpr size_t STACK = 256 * 1024;
  group.size = size;
  group.body = std::move(body);
  group.fibers.resize(size);
  group.group_arrivals.assign(size, 0);
  group.warp_arrivals.assign(size, 0);
  group.done.assign(size, 0);
  group.lanes.assign(size, 0.0f);
  while (int(group.stacks.size()) < size) group.stacks.emplace_back(new char[STACK]);
  for (int t = 0; t < size; ++t) {
    getcontext(&group.fibers[t]);
    group.fibers[t].uc_stack.ss_sp = group.stacks[t].get();
    group.fibers[t].uc_stack.ss_size = STACK;
    group.fibers[t].uc_link = nullptr;
    makecontext(&group.fibers[t], entry, 0);
  }
  for (int left = size; left > 0;) {
    left = 0;
    for (int t = 0; t < size; ++t) {
      if (group.done[t]) continue;
      ++left;
      group.current = t;
      thread_position = {uint(t), 0, 0};
      swapcontext(&group.scheduler, &group.fibers[t]);
    }
  }
  for (int t = 1; t < size; ++t) {  // a thread that misses a barrier leaves the others waiting for ever on a GPU
    if (group.group_arrivals[t] != group.group_arrivals[0]) {
      std::fprintf(stderr, "threads of one group met different numbers of barriers\n");
      std::abort();
    }
  }
}

// Grid in threads, as MLX launches it; threadgroups are one-dimensional.
inline void launch(uint3 grid, int threads, const std::function<void()>& body) {
  threadgroups = {grid.x / threads, grid.y, grid.z};
  for (uint z = 0; z < grid.z; ++z)
    for (uint y = 0; y < grid.y; ++y)
      for (uint x = 0; x < grid.x / threads; ++x) {
        threadgroup_position = {x, y, z};
        run_group(threads, body);
      }
}
}  // namespace shim

enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { shim::group_barrier(); }
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask) {
  return shim::shuffle_xor(value, mask);
}
namespace metal {
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float abs(float x) { return std::fabs(x); }
inline float round(float x) { return std::round(x); }
namespace fast {
inline float exp(float x) { return std::exp(x); }
inline float exp2(float x) { return std::exp2(x); }
}  // namespace fast
namespace precise {
inline float tanh(float x) { return std::tanh(x); }
inline float cos(float x) { return std::cos(x); }
inline float sin(float x) { return std::sin(x); }
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
}  // namespace precise
}  // namespace metal
#define threadgroup_position_in_grid shim::threadgroup_position
#define thread_position_in_threadgroup shim::thread_position
#define threadgroups_per_grid shim::threadgroups
