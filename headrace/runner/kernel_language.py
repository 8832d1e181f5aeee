"""Names that kernels of one source use, for CUDA and for Metal.

A body names ``threadgroup_position_in_grid`` and ``thread_position_in_threadgroup`` itself: MLX gives a kernel on
Metal only the positions that it finds in the body's text. Pools that are written are inputs; ``WRITABLE`` is what
their pointers are cast to. The Metal names have not been run on Metal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from headrace.errors import StartupError
from headrace.files import appearing, cache_folder

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


def cuda_kernel(
    *, name: str, input_names: Sequence[str], output_names: Sequence[str], source: str, header: str = ""
) -> Any:
    """``mx.fast.cuda_kernel``, with header and source moved into files that the kernel's text includes.

    MLX hashes the text at every use of a kernel; a few thousand characters cost as much there as the launch. The
    files are named by what they hold.
    """
    texts = [compact(header), compact(source)]
    with suppress(OSError, StartupError):  # without a cache folder the whole text does as well
        texts = [_included(text) for text in texts]
    # MLX passes the shapes that it finds in the text.
    wanted = [f"{array}_{part}" for array in input_names for part in ("shape", "strides", "ndim")]
    found = " ".join(word for word in wanted if word in source)
    return mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=f"{texts[1]}// {found}\n",
        header=texts[0],
    )


def _included(text: str) -> str:
    path = cache_folder("kernels") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.cuh"
    if not path.exists():
        with appearing(path) as temporary:
            temporary.write_text(text)
    return f'\n#include "{path}"\n'
