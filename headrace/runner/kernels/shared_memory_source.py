"""CUDA source: copies into shared memory that go on while a block computes (``cp.async``).

PTX ISA, compute capability 8.0 and up. On a CPU, ``tests/runner/cuda_shim`` has these names.
"""

from __future__ import annotations

# Addresses of shared memory are bytes from its begin; what a launch asks for is at a multiple of 1024. copy16: 16
# bytes, or zeros. started: a thread's copies since the last time are a group. arrived: all groups of this thread
# have; arrived_but: all but the last so many.
COPIES = """
#ifdef __CUDACC__
DEVICE unsigned shared_memory() {
  extern __shared__ __align__(1024) uint4 storage[];
  return unsigned(__cvta_generic_to_shared(storage));
}
DEVICE void copy16(unsigned to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
    :: "r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
DEVICE void put16(unsigned to, uint4 x) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
    :: "r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
DEVICE void started() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void arrived() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }
template <int GROUPS> DEVICE void arrived_but() {
  asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
}
DEVICE void meet() { asm volatile("bar.sync 0;" ::: "memory"); }
#endif
"""
