"""One kernel between a decode step's query-key-value product and its attention, on a GPU.

It takes the product ``[B, (H + 2 KV) * D]``, normalizes query and key heads where the model does, rotates them
(rotary position embedding, Su et al. 2021), writes keys and values into the pool in place (see ``pool_store.py``)
and returns the queries. A thread block handles one head of one row, a thread one element.

Where the pool is packed, a key or value head is packed before it is written, as ``kv_packing.py`` says and with
the arithmetic of ``mx.quantize`` on CUDA, in float32: of a group from ``low`` to ``high`` the end farther from
zero is ``edge``; the step is ``(high - low) / largest code``, negative where the edge is ``high``; then it is
moved so that zero has a code, to ``edge / round(edge / step)``, and ``edge`` is the bias. Groups that reach no
zero keep their true ends, where MLX on CUDA stretches those below zero up to it.

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
from headrace.runner.kv_packing import VectorPacking, scale_dtype
from headrace.runner.layer_view import LayerView

# Constants: T, D head size, THREADS (D rounded up to whole warps), H and KV heads, ROT rotated elements,
# PAIRS (1: neighbours rotate together, 0: halves), NORM (1: query and key heads are normalized).
# Inputs: qkv [B, (H + 2 KV) * D] of T, k and v [slots, KV, D] of T (written), slots [B] and offsets [B] int32,
# inv_freq [ROT / 2] float32, q_norm and k_norm [D] of T (read where NORM), params float32 (position scale,
# epsilon), mark. Outputs: queries [B, H, 1, D] of T, after [MARKS] int32, zeros.
# Packed: THREADS is the padded D, S the type of scales and biases, BITS of a code, GROUP elements that share a
# scale; k and v are codes [slots, KV, words] uint32, each followed by scales and biases [slots, KV, groups] of S.
_ROTATED = """
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
"""
_AFTER = """
  if (head == 0 && row == 0 && i < MARKS) after[i] = 0;
"""
_STORED = """
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
"""
_ENDS = """
  SHARED float ends[THREADS / 16];  // low and high of every 32 elements
"""
_PACKED = """
  if (head < H) {
    if (holds) queries[(row * H + head) * D + i] = T(x);
  } else {
    constexpr int CODES = 32 / BITS;  // of a word
    constexpr float MOST = float((1 << BITS) - 1);
    const float element = holds ? float(T(x)) : 0.0f;
    float low = element, high = element;
    for (int mask = 16; mask > 0; mask /= 2) {
      low = MIN(low, SHUFFLE_XOR(low, mask));
      high = MAX(high, SHUFFLE_XOR(high, mask));
    }
    if (GROUP > 32) {
      if (i % 32 == 0) {
        ends[i / 16] = low;
        ends[i / 16 + 1] = high;
      }
      BARRIER();
      for (int w = i / GROUP * (GROUP / 32); w < (i / GROUP + 1) * (GROUP / 32); ++w) {
        low = MIN(low, ends[2 * w]);
        high = MAX(high, ends[2 * w + 1]);
      }
    }
    const bool below = ABS(low) > ABS(high);
    const float edge = below ? low : high;
    const float least = MAX((high - low) / MOST, 1e-7f);
    const float step = below ? least : -least;
    const float steps = ROUND(edge / step);
    const float scale = steps == 0.0f ? step : edge / steps;
    const float bias = steps == 0.0f ? 0.0f : edge;
    unsigned word = unsigned(MIN(MAX(ROUND((element - bias) / scale), 0.0f), MOST)) << (i % CODES * BITS);
    for (int mask = 1; mask < CODES; mask *= 2) word |= SHUFFLE_XOR(word, mask);
    const long place = long(slots[row]) * KV + (rotates ? head - H : head - H - KV);
    if (i % CODES == 0) ((WRITABLE(unsigned)*)(rotates ? k : v))[place * (THREADS / CODES) + i / CODES] = word;
    if (i % GROUP == 0) {
      ((WRITABLE(S)*)(rotates ? ks : vs))[place * (THREADS / GROUP) + i / GROUP] = S(scale);
      ((WRITABLE(S)*)(rotates ? kb : vb))[place * (THREADS / GROUP) + i / GROUP] = S(bias);
    }
  }
"""


def body(*, packed: bool) -> str:
    """The kernel over pools that hold vectors as they are, or packed."""
    return (_ENDS if packed else "") + _ROTATED + (_PACKED if packed else _STORED) + _AFTER


def input_names(*, packed: bool) -> list[str]:
    pools = ["k", "ks", "kb", "v", "vs", "vb"] if packed else ["k", "v"]
    return ["qkv", *pools, "slots", "offsets", "inv_freq", "q_norm", "k_norm", "params", "mark"]


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
        self._kernels = {
            packed: make(
                name="rotate_pack_store" if packed else "rotate_store",
                input_names=input_names(packed=packed),
                output_names=["queries", "after"],
                source=compact(body(packed=packed)),
                header=header,
            )
            for packed in (False, True)
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
        """Queries ``[B, H, 1, D]`` of ``qkv [B, (H + 2 KV) * D]``; keys and values go to the rows' slots."""
        pool, index = view.pool, view.layer
        rows, packing = qkv.shape[0], pool.layers[index].key_packing
        norm = spec.q_norm if spec.q_norm is not None and spec.k_norm is not None else None
        blank = spec.inv_freq if norm is None else norm
        threads = -(-spec.head_dim // 32) * 32 if packing is None else packing.padded_dim
        queries, pool.marks[index] = self._kernels[packing is not None](
            inputs=[
                qkv,
                pool.keys[index],
                *pool.key_affine[index],
                pool.values[index],
                *pool.value_affine[index],
                view.group.slots,
                view.batch.offsets,
                spec.inv_freq,
                blank,
                blank if norm is None else spec.k_norm,
                self._constants.get((spec.position_scale, spec.eps), mx.float32),
                pool.marks[index],
            ],
            template=_template(qkv.dtype, spec, threads, packing),
            grid=((spec.heads + 2 * spec.kv_heads) * threads, rows, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, spec.heads, 1, spec.head_dim), MARK_SHAPE],
            output_dtypes=[qkv.dtype, mx.int32],
        )
        return queries  # type: ignore[no-any-return]


def _template(
    dtype: mx.Dtype, spec: RotarySpec, threads: int, packing: VectorPacking | None
) -> list[tuple[str, Any]]:
    constants: list[tuple[str, Any]] = [
        ("T", dtype),
        ("D", spec.head_dim),
        ("THREADS", threads),
        ("H", spec.heads),
        ("KV", spec.kv_heads),
        ("ROT", spec.rotated_dims),
        ("PAIRS", int(spec.traditional)),
        ("NORM", int(spec.q_norm is not None and spec.k_norm is not None)),
        ("MARKS", MARK_SHAPE[0]),
    ]
    if packing is not None:
        constants += [("S", scale_dtype(dtype)), ("BITS", packing.bits), ("GROUP", packing.group_size)]
    return constants
