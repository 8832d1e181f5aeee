"""Products of few rows by CUDA kernels.

``small_rows_source.py`` over plain weights and ``packed_rows_source.py`` over packed ones; over plain weights
``staged_rows_source.py``, too, where the device has what it needs. How a kernel cuts a product is a *tiling*
(``tiling.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from headrace.runner.kernels.language import cuda_kernel, multiplies_by_warpgroups
from headrace.runner.products import small_rows_source as source
from headrace.runner.products import staged_rows_source
from headrace.runner.products.packed_rows_source import PACKED_PRODUCT
from headrace.runner.products.packed_weights import PackedWeights
from headrace.runner.products.row_operations import MLX_ROWS, RowOperations
from headrace.runner.products.small_rows import Dense, Norm, Product
from headrace.runner.products.tiling import BLOCK_ROWS, Staged, Tiling, bounds, staged_tilings, tilings

# Parts of a kernel that are no inputs of its.
_WITHOUT_ARRAY = ("GATE", "PACKED", "SHARED_INPUTS")


class KernelProducts:
    """``Products`` by the CUDA kernel, for what ``takes`` says; compiled forms are made as they are needed.

    Args:
        beside: what norms inputs that the kernel does not norm itself.
        anew: put before and behind a cluster of blocks (``Recorder.anew``); None: they need nothing.
    """

    def __init__(
        self, beside: RowOperations = MLX_ROWS, anew: Callable[[mx.array], mx.array] | None = None
    ) -> None:
        self._beside = beside
        self._anew = anew
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, x: mx.array, product: Product) -> mx.array:
        dense, norm, residual, gated = product.dense, product.norm, product.residual, product.gated
        tiling = product.tiling or self.tilings(x.shape[0], x.dtype, product)[0]
        if norm is not None and (tiling.apart or not _takes_norm(norm, x.dtype)):
            x, norm = self._beside.rms_norm(x, norm.weight, norm.eps), None
        outputs, packed = dense.shape[0], dense.packed
        weights = [dense.weight] if packed is None else [packed.words, packed.scales, packed.biases]
        extra = {
            "NORM": None if norm is None else norm.weight,
            "BIAS": dense.bias,
            "RESIDUAL": residual,
        }
        given = {name: array for name, array in extra.items() if array is not None}
        shared = isinstance(tiling, Tiling) and tiling.shared and packed is not None and x.shape[0] == 1
        others = {"GATE": gated, "PACKED": packed is not None, "SHARED_INPUTS": shared}
        parts = (*given, *(name for name, wanted in others.items() if wanted))
        shape = (x.shape[0], outputs // 2 if gated else outputs) if residual is None else residual.shape
        constants = tiling.constants
        if isinstance(tiling, Tiling):
            eps = 0.0 if norm is None else norm.eps
            constants = [*constants, ("EPS", int(np.float32(eps).view(np.int32)))]
            if shared:
                constants += [("SHARED", dense.shape[1])]
        blocks = tiling.blocks(x.shape[0], outputs)
        anew = self._anew if tiling.is_cluster else None
        if anew is not None:
            x = anew(x)
        y: mx.array = self._kernel(parts, tiling, _shared_bytes(tiling, dense))(
            inputs=[x, *weights, *given.values()],
            template=[("T", x.dtype), *constants, *([] if packed is None else packed_constants(packed))],
            grid=(blocks[0] * tiling.threads, *blocks[1:]),
            threadgroup=(tiling.threads, 1, 1),
            output_shapes=[shape],
            output_dtypes=[x.dtype],
        )[0]
        return y if anew is None else anew(y)

    @staticmethod
    def tilings(rows: int, dtype: mx.Dtype, product: Product, *, clusters: bool = True) -> list[Tiling | Staged]:
        """Those to try for ``rows`` rows; the first is the usual one. ``clusters``: of blocks, too."""
        normed = product.norm is not None and _takes_norm(product.norm, dtype)
        packed = product.dense.packed is not None
        outputs, inner = product.dense.shape
        found: list[Tiling | Staged] = []
        found += tilings(rows, outputs, inner, gated=product.gated, normed=normed, packed=packed)
        if not packed and multiplies_by_warpgroups():
            staged = staged_tilings(rows, outputs, inner)
            staged = [tiling for tiling in staged if clusters or not tiling.is_cluster]
            # Of more rows it is ahead of the other kernel everywhere (H200).
            found = [*([] if staged and rows > BLOCK_ROWS else found), *staged]
        return found

    def _kernel(self, parts: tuple[str, ...], tiling: Tiling | Staged, shared_bytes: int) -> Any:
        key = tiling.limits, shared_bytes, *parts
        if key not in self._made:
            defines = "".join(f"#define {part}\n" for part in parts)
            weights = ["w", "scales", "biases"] if "PACKED" in parts else ["w"]
            names = [part.lower() for part in parts if part not in _WITHOUT_ARRAY]
            if isinstance(tiling, Staged):
                name, body, header = (
                    "staged_rows",
                    staged_rows_source.BODY,
                    staged_rows_source.header(tiling.limits),
                )
            else:
                product = source.PRODUCT + (PACKED_PRODUCT if "PACKED" in parts else "")
                name, body, header = "rows", source.BODY, source.MACHINE + product + bounds(*tiling.limits)
            self._made[key] = cuda_kernel(
                name="_".join([name, *(part.lower() for part in parts)]),
                input_names=["x", *weights, *names],
                output_names=["y"],
                source=body,
                header=defines + header,
                shared_memory=shared_bytes,
            )
        return self._made[key]


def _shared_bytes(tiling: Tiling | Staged, dense: Dense) -> int:
    """What a launch asks for."""
    if isinstance(tiling, Staged):
        return tiling.limits.shared_bytes
    return 0 if dense.packed is None else tiling.shared_bytes(dense.shape[1], dense.packed.bits)


def _takes_norm(norm: Norm, dtype: mx.Dtype) -> bool:
    """Unscaled inputs times the norm's weights could leave float16's range."""
    return dtype == mx.bfloat16 and norm.weight.dtype == dtype


def packed_constants(packed: PackedWeights) -> list[tuple[str, int]]:
    """What kernels over packed weights are compiled for; WHOLE: a row is whole chunks."""
    whole = packed.shape[-1] % (512 // packed.bits) == 0
    return [("BITS", packed.bits), ("GROUP", packed.group), ("WHOLE", int(whole))]
