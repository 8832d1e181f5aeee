"""The text that MLX makes of a custom CUDA kernel, and the shorter one that is compiled in its place.

MLX puts a header of its own before a kernel and a signature around it, and names the compiled module by the hash
of the whole. NVRTC needs eight times longer for that header than for one of our kernels, and our kernels use none
of it but the vectors in which shapes are passed. So ``own`` has the same header, signature and body behind a
prelude of a few lines: the machine code of the kernel is the same.

The form of MLX's text is that of MLX 0.32. A version that makes another text finds no module by its hash and
compiles for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

NAMESPACE = "mlx::core::cu"
# Elements of the vectors in which MLX passes shapes and strides come from the header that MLX itself uses.
PRELUDE = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "mlx/backend/cuda/device/config.h"
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
namespace mlx::core::cu {
template <typename T> struct PerDimension {
  T values[MAX_NDIM];
  __device__ const T& operator[](int i) const { return values[i]; }
};
using Shape = PerDimension<int32_t>;
using Strides = PerDimension<int64_t>;
}
"""
_MLX_PRELUDE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
# MLX's name of a type in C++, and in the name of a kernel.
_TYPES = {
    mx.bool_: ("bool", "bool"),
    mx.int8: ("int8_t", "int8_t"),
    mx.int16: ("int16_t", "int16_t"),
    mx.int32: ("int32_t", "int32_t"),
    mx.int64: ("int64_t", "int64_t"),
    mx.uint8: ("uint8_t", "uint8_t"),
    mx.uint16: ("uint16_t", "uint16_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
    mx.uint64: ("uint64_t", "uint64_t"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.float32: ("float", "float"),
}
Template = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class KernelForm:
    """One compiled form of a kernel.

    Attributes:
        name: of the function, in ``NAMESPACE``.
        mlx: the text whose hash MLX names the module by.
        own: the text that is compiled.
    """

    name: str
    mlx: str
    own: str


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel as it is given to MLX (header and source may be includes), and both in full."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    header: str
    source: str
    full_header: str
    full_source: str

    def form(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template
    ) -> KernelForm | None:
        """The form for these types and constants; None for types that are not known here."""
        try:
            name = f"custom_kernel_{self.name}" + "".join(f"_{_in_name(value)}" for _, value in template)
            opening = self._opening(name, inputs, output_dtypes, template)
        except KeyError:
            return None
        closing = f"\n}}\n\n}} // namespace {NAMESPACE}\n"
        begin = f"namespace {NAMESPACE} {{\n\n"
        mlx = _MLX_PRELUDE + self.header + begin + "namespace cg = cooperative_groups;\n\n"
        own = PRELUDE + self.full_header + begin
        return KernelForm(name, mlx + opening + self.source + closing, own + opening + self.full_source + closing)

    def _opening(
        self, name: str, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Template
    ) -> str:
        """Signature and constants."""
        parameters = []
        for parameter, array in zip(self.input_names, inputs, strict=True):
            parameters.append(f"    const {_TYPES[array.dtype][0]}* {parameter}")
            for part, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                if array.ndim > 0 and f"{parameter}_{part}" in self.source:
                    parameters.append(f"    const __grid_constant__ {kind} {parameter}_{part}")
        for parameter, dtype in zip(self.output_names, output_dtypes, strict=True):
            parameters.append(f"    {_TYPES[dtype][0]}* {parameter}")
        constants = "".join(_constant(constant, value) for constant, value in template)
        signature = ",\n".join(parameters)
        return f"__global__ void {name}(\n{signature}) {{\n{constants}" + ("\n" if template else "")


def _in_name(value: Any) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value) if isinstance(value, int) else _TYPES[value][1]


def _constant(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"  constexpr int {name} = {value};\n"
    return f"  using {name} = {_TYPES[value][0]};\n"
