"""Names that kernels of one source use, for CUDA and for Metal.

A body names ``threadgroup_position_in_grid`` and ``thread_position_in_threadgroup`` itself: MLX gives a kernel on
Metal only the positions that it finds in the body's text. Pools that are written are inputs; ``WRITABLE`` is what
their pointers are cast to. The Metal names have not been run on Metal.
"""

from __future__ import annotations

import re

CUDA_NAMES = """
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define WRITABLE(type) type
#define threadgroup_position_in_grid blockIdx
#define thread_position_in_threadgroup threadIdx
#define COS(x) cosf(x)
#define SIN(x) sinf(x)
#define RSQRT(x) rsqrtf(x)
"""

METAL_NAMES = """
#define SHARED threadgroup
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(value, mask) simd_shuffle_xor(value, ushort(mask))
#define WRITABLE(type) device type
#define COS(x) metal::precise::cos(x)
#define SIN(x) metal::precise::sin(x)
#define RSQRT(x) metal::precise::rsqrt(x)
"""


def compact(source: str) -> str:
    """``source`` without comments and indentation: MLX hashes a kernel's whole text each time it is used."""
    lines = (re.sub(r"//.*", "", line).strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line) + "\n"
