"""One kernel between a block's query-key-value product and its attention, on a GPU.

It takes the product ``[B * L, (H + 2 KV) * D]``, normalizes query and key heads where the model does, rotates them
(rotary position embedding, Su et al. 2021), writes keys and values into the pool in place (see ``kv/store.py``),
packed where the pool is, and returns the queries; of prompts that are attended over keys and values as they are
made (``reads_new``), it returns those, too. See ``rotate_store_source.py``.

CUDA and Metal forms of one source. The Metal form has not been run on Metal; the check of the decoder block that
uses it decides at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.runner.attention import rotate_store_source as source
from headrace.runner.attention.gathered_prefill import planned_shape, reads_new
from headrace.runner.device_arrays import MARK_SHAPE, DeviceConstants
from headrace.runner.kernels.language import CUDA_NAMES, METAL_NAMES, compact, cuda_kernel
from headrace.runner.kv.packing import VectorPacking, scale_dtype
from headrace.runner.kv.view import LayerView

_FORMS: tuple[tuple[source.Form, bool], ...] = (
    ("step", False),
    ("step", True),
    ("chunk", False),
    ("chunk", True),
    ("prompt", False),
)
_SUFFIX: dict[source.Form, list[str]] = {"step": [], "chunk": ["chunk"], "prompt": ["prompt"]}
# Of prompts, heads of a token that a block handles, and their elements in shared memory, at most.
_MOST_HEADS = 8
_MOST_ELEMENTS = 2048


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """What an attention layer does to the heads of its product.

    Attributes:
        heads, kv_heads, head_dim: of the layer.
        inv_freq: ``[rotated_dims / 2]`` float32, radians per position of each pair.
        rotated_dims: leading elements of a head that are rotated.
        traditional: neighbouring elements rotate together; else element i and i + rotated_dims / 2.
        position_scale: positions are multiplied with it.
        q_norm, k_norm: ``[head_dim]`` weights of the heads' RMS norm, both or none.
        eps: of that norm.
    """

    heads: int
    kv_heads: int
    head_dim: int
    inv_freq: mx.array
    rotated_dims: int
    traditional: bool
    position_scale: float
    q_norm: mx.array | None
    k_norm: mx.array | None
    eps: float


class RotateAndStore:
    """The compiled kernel of one device; make one and keep it.

    Args:
        make: ``cuda_kernel`` or ``mx.fast.metal_kernel``.
        header: the matching names of ``kernels/language.py``.
    """

    def __init__(self, make: Callable[..., Any], header: str) -> None:
        self._constants = DeviceConstants()
        self._kernels = {
            (form, packed): make(
                name="_".join(["rotate_pack_store" if packed else "rotate_store", *_SUFFIX[form]]),
                input_names=source.input_names(packed=packed),
                output_names=source.output_names(form),
                source=compact(source.body(form, packed=packed)),
                header=header,
            )
            for form, packed in _FORMS
        }

    @staticmethod
    def for_device() -> RotateAndStore | None:
        """The kernel of the default device, or None where there is none."""
        if mx.default_device() != mx.gpu:
            return None
        if mx.metal.is_available():
            return RotateAndStore(mx.fast.metal_kernel, METAL_NAMES)
        return RotateAndStore(cuda_kernel, CUDA_NAMES)

    @staticmethod
    def supports(spec: RotarySpec, view: LayerView) -> bool:
        """Whether the pool is written in place and holds heads of this layer's."""
        layer = view.pool.layers[view.layer]
        return (
            view.pool.in_place
            and (layer.kv_heads, layer.key_dim, layer.value_dim) == (spec.kv_heads, spec.head_dim, spec.head_dim)
            and spec.head_dim <= 1024
            and spec.rotated_dims % 2 == 0
        )

    def __call__(self, qkv: mx.array, view: LayerView, spec: RotarySpec) -> mx.array:
        """Queries ``[B, H, L, D]`` of ``qkv [B * L, (H + 2 KV) * D]``; keys and values go to the tokens' slots.

        For prompts of which ``reads_new`` is true, ``view.new`` has them as well; then queries, keys and values
        have the rows and positions of ``planned_shape``, and what is beyond B and L means nothing.
        """
        pool, index = view.pool, view.layer
        layer, rows = pool.layers[index], view.batch.offsets.shape[0]
        length, packing = qkv.shape[0] // rows, layer.key_packing
        form: source.Form = "step" if length == 1 else "prompt" if reads_new(view) else "chunk"
        threads = -(-spec.head_dim // 32) * 32 if packing is None else packing.padded_dim
        each = 1 if form == "step" else _heads_together(spec.heads + 2 * spec.kv_heads, threads)
        blocks, shapes = _given_out(form, rows, length, view, spec)
        *given, pool.marks[index] = self._kernels[form, packing is not None](
            inputs=self._inputs(qkv, view, spec),
            template=_template(qkv.dtype, spec, threads, each, packing),
            grid=(blocks[1] * threads, blocks[0], (spec.heads + 2 * spec.kv_heads) // each),
            threadgroup=(threads, 1, 1),
            output_shapes=[*shapes, MARK_SHAPE],
            output_dtypes=[*[qkv.dtype] * len(shapes), mx.int32],
        )
        if form != "prompt":
            return given[0]  # type: ignore[no-any-return]
        queries, keys, values = (array.swapaxes(1, 2) for array in given)
        view.new = keys, values
        return queries  # type: ignore[no-any-return]

    def _inputs(self, qkv: mx.array, view: LayerView, spec: RotarySpec) -> list[mx.array]:
        """As ``input_names`` names them."""
        pool, index = view.pool, view.layer
        norm = spec.q_norm if spec.q_norm is not None and spec.k_norm is not None else None
        blank = spec.inv_freq if norm is None else norm
        return [
            qkv,
            pool.keys[index],
            *pool.key_affine[index],
            pool.values[index],
            *pool.value_affine[index],
            view.group.slots,
            view.batch.offsets,
            spec.inv_freq,
            blank,
            blank if spec.k_norm is None else spec.k_norm,
            self._constants.get((spec.position_scale, spec.eps), mx.float32),
            pool.marks[index],
        ]


def _given_out(
    form: source.Form, rows: int, length: int, view: LayerView, spec: RotarySpec
) -> tuple[tuple[int, int], list[tuple[int, ...]]]:
    """Rows and positions that blocks are started for, and the shapes of queries or queries, keys and values."""
    if form != "prompt":
        return (rows, length), [(rows, spec.heads, length, spec.head_dim)]
    layer = view.pool.layers[view.layer]
    planned = planned_shape(rows, length, layer, view.group.window)
    return planned, [(*planned, heads, spec.head_dim) for heads in (spec.heads, spec.kv_heads, spec.kv_heads)]


def _heads_together(heads: int, threads: int) -> int:
    """Heads of a token that a block handles: a divisor of ``heads``."""
    most = min(_MOST_HEADS, _MOST_ELEMENTS // threads)
    return max(count for count in range(1, max(most, 1) + 1) if heads % count == 0)


def _template(
    dtype: mx.Dtype, spec: RotarySpec, threads: int, each: int, packing: VectorPacking | None
) -> list[tuple[str, Any]]:
    constants: list[tuple[str, Any]] = [
        ("T", dtype),
        ("D", spec.head_dim),
        ("THREADS", threads),
        ("H", spec.heads),
        ("KV", spec.kv_heads),
        ("EACH", each),
        ("ROT", spec.rotated_dims),
        ("PAIRS", int(spec.traditional)),
        ("NORM", int(spec.q_norm is not None and spec.k_norm is not None)),
        ("MARKS", MARK_SHAPE[0]),
    ]
    if packing is not None:
        constants += [("S", scale_dtype(dtype)), ("BITS", packing.bits), ("GROUP", packing.group_size)]
    return constants
