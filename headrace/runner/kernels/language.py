"""Names that kernels of one source use, for CUDA and for Metal.

A body names ``threadgroup_position_in_grid`` and its like itself: MLX gives a kernel on
Metal only the positions that it finds in the body's text. Pools that are written are inputs; ``WRITABLE`` is what
their pointers are cast to. The Metal names have not been run on Metal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from headrace.errors import StartupError
from headrace.files import appearing, cache_folder
from headrace.runner.kernels.cache import KernelCache, device_cache
from headrace.runner.kernels.text import KernelSource

CUDA_NAMES = """
#define SHARED __shared__
#define BARRIER() __syncthreads()
#define SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define WRITABLE(type) type
#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define thread_position_in_threadgroup threadIdx
#define COS(x) cosf(x)
#define SIN(x) sinf(x)
#define RSQRT(x) rsqrtf(x)
#define ABS(x) fabsf(x)
#define MIN(a, b) fminf(a, b)
#define MAX(a, b) fmaxf(a, b)
#define ROUND(x) roundf(x)
"""

METAL_NAMES = """
#define SHARED threadgroup
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SHUFFLE_XOR(value, mask) simd_shuffle_xor(value, ushort(mask))
#define WRITABLE(type) device type
#define COS(x) metal::precise::cos(x)
#define SIN(x) metal::precise::sin(x)
#define RSQRT(x) metal::precise::rsqrt(x)
#define ABS(x) metal::abs(x)
#define MIN(a, b) metal::min(a, b)
#define MAX(a, b) metal::max(a, b)
#define ROUND(x) metal::round(x)
"""


# What the names of kernels have in them that wait themselves for what comes before them (see EARLY_START).
WAITING = "_waiting"
# A kernel may be started while the one before it still runs (native/graph_overlap.h). NEXT_MAY_START: so may the
# one after this; all of a block's work can still be ahead. Before WAIT_FOR_EARLIER a kernel reads what no kernel
# writes, such as weights, and writes nothing; behind it all is as if it had been started then. PTX ISA,
# griddepcontrol.
EARLY_START = """
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define NEXT_MAY_START() asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#define WAIT_FOR_EARLIER() asm volatile("griddepcontrol.wait;" ::: "memory")
#else
#define NEXT_MAY_START()
#define WAIT_FOR_EARLIER()
#endif
"""
_LEAST_CAPABILITY = 9
_WARPGROUP_CAPABILITY = 9


def _capability() -> int:
    """Major number of the default device's compute capability; 0 where it is no CUDA device."""
    if mx.default_device() != mx.gpu or mx.metal.is_available():
        return 0
    return int(mx.device_info().get("compute_capability_major", 0))


def launches_early() -> bool:
    """Whether the default device can start a kernel before the one ahead of it has ended."""
    return _capability() >= _LEAST_CAPABILITY


def multiplies_by_warpgroups() -> bool:
    """Whether the default device has ``wgmma``, which later devices have not (PTX ISA)."""
    return _capability() == _WARPGROUP_CAPABILITY


def compact(source: str) -> str:
    """``source`` without comments and indentation: MLX hashes a kernel's whole text each time it is used."""
    lines = (re.sub(r"//.*", "", line).strip() for line in source.splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def cuda_kernel(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    shared_memory: int = 0,
) -> Any:
    """``mx.fast.cuda_kernel``, with header and source moved into files that the kernel's text includes.

    MLX hashes the text at every use of a kernel; a few thousand characters cost as much there as the launch. The
    files are named by what they hold. Each form is compiled before it is first run, or found in the cache
    (``cache.py``).

    A source that does not say itself when the next kernel may start begins with that, and waits.
    """
    if "NEXT_MAY_START" not in source:
        source = f"NEXT_MAY_START();\nWAIT_FOR_EARLIER();\n{source}"
    if launches_early():
        name += WAITING
    texts = given = [compact(EARLY_START + header), compact(source)]
    with suppress(OSError, StartupError):  # without a cache folder the whole text does as well
        given = [_included(text) for text in texts]
    # MLX passes the shapes that it finds in the text.
    wanted = [f"{array}_{part}" for array in input_names for part in ("shape", "strides", "ndim")]
    found = " ".join(word for word in wanted if word in source)
    kernel_source = KernelSource(
        name,
        tuple(input_names),
        tuple(output_names),
        header=given[0],
        source=f"{given[1]}// {found}\n",
        full_header=texts[0],
        full_source=texts[1],
    )
    cache = device_cache()
    made = mx.fast.cuda_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=kernel_source.source,
        header=kernel_source.header,
        shared_memory=shared_memory,
    )
    return made if cache is None else CachedKernel(made, kernel_source, cache)


class CachedKernel:
    """``kernel``, called in the same way; forms not seen before are brought into ``cache`` first.

    A form is told by its constants. Should one be called with other types too, MLX compiles that itself.
    """

    def __init__(self, kernel: Any, source: KernelSource, cache: KernelCache) -> None:
        self._kernel = kernel
        self._source = source
        self._cache = cache
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
        **launch: Any,
    ) -> Any:
        constants = tuple(template)
        if constants not in self._seen:
            self._seen.add(constants)
            form = self._source.form(inputs, output_dtypes, constants)
            if form is not None:
                self._cache.ensure(form)
        return self._kernel(inputs=inputs, output_dtypes=output_dtypes, template=template, **launch)


def compile_ahead(build: Callable[[], object]) -> None:
    """Compile at the same time whatever kernels ``build`` calls, before they run.

    ``build`` evaluates no kernel's results. What goes wrong in it is left to the caller's own use of the kernels.
    """
    cache = device_cache()
    if cache is None:
        return
    with cache.together(), suppress(Exception):
        build()


def _included(text: str) -> str:
    path = cache_folder("kernels") / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.cuh"
    write_text(path, text)
    return f'\n#include "{path}"\n'


def write_text(path: Path, text: str) -> None:
    """Have exactly ``text`` in the file."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        with appearing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
