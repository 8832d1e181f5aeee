"""One kernel between a decode step's query-key-value product and its attention, on a GPU.

It takes the product ``[B, (H + 2 KV) * D]``, normalizes query and key heads where the model does, rotates them
(rotary position embedding, Su et al. 2021), writes keys and values into the pool in place (see ``pool_store.py``)
and returns the queries. A thread block handles one head of one row, a thread one element.

CUDA and Metal forms of one source. The Metal form has not been run on Metal; the check of the decoder block that
uses it decides at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from headrace.runner.device_arrays import MARK_SHAPE, DeviceConstants
from headrace.runner.kernel_language import CUDA_NAMES, METAL_NAMES, compact, cuda_kernel
from headrace.runner.layer_view import LayerView

# Constants: T, D head size, THREADS (D rounded up to whole warps), H and KV heads, ROT rotated elements,
# PAIRS (1: neighbours rotate together, 0: halves), NORM (1: query and key heads are normalized).
# Inputs: qkv [B, (H + 2 KV) * D] of T, k and v [slots, KV, D] of T (written), slots [B] and offsets [B] int32,
# inv_freq [ROT / 2] float32, q_norm and k_norm [D] of T (read where NORM), params float32 (position scale,
# epsilon), mark. Outputs: queries [B, H, 1, D] of T, after [MARKS] int32, zeros.
BODY = """
  SHARED float values[THREADS];
  SHARED float sums[THREADS / 32];
  const int i = int(thread_position_in_threadgroup.x);
  const int head = int(threadgroup_position_in_grid.x);
  const int row = int(threadgroup_position_in_grid.y);
  const bool holds = i < D;
  const bool rotates = head < H + KV;
  float x = holds ? float(qkv[(row * (H + 2 * KV) + head) * D + i]) : 0.0f;
  if (NORM && rotates) {
    float sum = x * x;
    for (int mask = 16; mask > 0; mask /= 2) sum += SHUFFLE_XOR(sum, mask);
    if (i % 32 == 0) sums[i / 32] = sum;
    BARRIER();
    sum = 0.0f;
    for (int w = 0; w < THREADS / 32; ++w) sum += sums[w];
    const float weight = !holds ? 0.0f : head < H ? float(q_norm[i]) : float(k_norm[i]);
    x = float(T(x * RSQRT(sum / float(D) + params[1]) * weight));
  }
  values[i] = x;
  BARRIER();
  if (rotates && i < ROT) {
    const int pair = PAIRS ? i / 2 : i % (ROT / 2);
    const bool second = PAIRS ? i % 2 == 1 : i >= ROT / 2;
    const float other = values[PAIRS ? (i ^ 1) : (second ? i - ROT / 2 : i + ROT / 2)];
    const float angle = float(offsets[row]) * params[0] * inv_freq[pair];
    const float c = COS(angle);
    const float s = SIN(angle);
    x = second ? other * s + x * c : x * c - other * s;
  }
  if (holds) {
    const long slot = long(slots[row]);
    if (head < H) {
      queries[(row * H + head) * D + i] = T(x);
    } else if (rotates) {
      ((WRITABLE(T)*)(k))[(slot * KV + head - H) * D + i] = T(x);
    } else {
      ((WRITABLE(T)*)(v))[(slot * KV + head - H - KV) * D + i] = T(x);
    }
  }
  if (head == 0 && row == 0 && i < MARKS) after[i] = 0;
"""


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
        header: the matching names of ``kernel_language.py``.
    """

    def __init__(self, make: Callable[..., Any], header: str) -> None:
        self._constants = DeviceConstants()
        self._kernel = make(
            name="rotate_store",
            input_names=[
                "qkv",
                "k",
                "v",
                "slots",
                "offsets",
                "inv_freq",
                "q_norm",
                "k_norm",
                "params",
                "mark",
            ],
            output_names=["queries", "after"],
            source=compact(BODY),
            header=header,
        )

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
        """Whether the pool is written in place and holds this layer's heads as they are."""
        layer = view.pool.layers[view.layer]
        return (
            view.pool.in_place
            and layer.bits is None
            and (layer.kv_heads, layer.key_dim, layer.value_dim) == (spec.kv_heads, spec.head_dim, spec.head_dim)
            and spec.head_dim <= 1024
            and spec.rotated_dims % 2 == 0
        )

    def __call__(self, qkv: mx.array, view: LayerView, spec: RotarySpec) -> mx.array:
        """Queries ``[B, H, 1, D]`` of ``qkv [B, (H + 2 KV) * D]``; keys and values go to the rows' slots."""
        pool, index = view.pool, view.layer
        rows, dim = qkv.shape[0], spec.head_dim
        threads = -(-dim // 32) * 32
        norm = spec.q_norm if spec.q_norm is not None and spec.k_norm is not None else None
        blank = spec.inv_freq if norm is None else norm
        queries, pool.marks[index] = self._kernel(
            inputs=[
                qkv,
                pool.keys[index],
                pool.values[index],
                view.group.slots,
                view.batch.offsets,
                spec.inv_freq,
                blank,
                blank if norm is None else spec.k_norm,
                self._constants.get((spec.position_scale, spec.eps), mx.float32),
                pool.marks[index],
            ],
            template=[
                ("T", qkv.dtype),
                ("D", dim),
                ("THREADS", threads),
                ("H", spec.heads),
                ("KV", spec.kv_heads),
                ("ROT", spec.rotated_dims),
                ("PAIRS", int(spec.traditional)),
                ("NORM", int(norm is not None)),
                ("MARKS", MARK_SHAPE[0]),
            ],
            grid=((spec.heads + 2 * spec.kv_heads) * threads, rows, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, spec.heads, 1, dim), MARK_SHAPE],
            output_dtypes=[qkv.dtype, mx.int32],
        )
        return queries  # type: ignore[no-any-return]
