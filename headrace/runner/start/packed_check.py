"""At load: is attention over packed KV that of the vectors which the codes stand for?

Packed logits differ from the model's own by the quantization, and no fixed bound on that is tight. So two exact
questions are asked instead. A trial runs over packed pools; what it left there is unpacked by definition
(``scale * code + bias``, in numpy, sharing nothing with the code under test). Then the model runs once more, in
one forward per row, its attention mlx-lm's own over those vectors:

    writes   every vector that the model makes lies within its own quantization step of what was stored
    reads    the logits are those of the trial up to rounding: ``TOLERANCE``, as for KV that is not packed

Nothing is quantized twice, so no value that lies between two codes can tip to another one in between.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from headrace.errors import one_line
from headrace.runner.forwards.logits_head import HeadSelector
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.packing import VectorPacking
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.store import Store
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.start.trial import BLOCK_SIZE, TABLES, TOLERANCE, Trial, difference, run_trial

Floats = npt.NDArray[np.float32]

# Unit roundoff of the dtypes of scales and biases.
_ROUNDOFF = {mx.bfloat16: 2.0**-9, mx.float16: 2.0**-11}


def packed_fault(
    model: nn.Module,
    selector: HeadSelector,
    found: ModelLayout,
    vocab_size: int,
    options: RunnerOptions,
    *,
    head_major: bool,
    store: Store | None,
) -> str:
    """What is wrong with packed KV under these options, in one line; "": nothing."""
    tolerance = TOLERANCE[found.layers[0].dtype.size]
    try:
        run = run_trial(model, selector, found, vocab_size, options, head_major=head_major, store=store)
        for row, (prompt, steps) in enumerate(Trial.of(vocab_size).rows):
            tokens = prompt + steps
            windows = [found.layout.groups[layer.group].window for layer in found.layers]
            caches = [_StoredCache(run.pool, i, row, len(tokens), window) for i, window in enumerate(windows)]
            selector.all_positions()
            logits = model(mx.array([tokens]), cache=caches)[0, len(prompt) - 1 :].astype(mx.float32)
            error = max(cache.error(tolerance) for cache in caches)
            if not error <= 1.0:
                return f"stored vectors are off by {error:.2f} times what packing may cost"
            worst = difference(logits, run.logits[row])
            if not worst <= tolerance:
                return f"logits differ by {worst:.3f} of their spread from those of the stored vectors"
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        return f"{type(error).__name__}: {one_line(error)}"
    return ""


class _StoredCache:
    """mlx-lm's cache protocol over one row of one layer: whatever the model gives, it gets what is stored."""

    offset = 0

    def __init__(self, pool: KVPool, layer: int, row: int, count: int, window: int | None) -> None:
        shape = pool.layers[layer]
        slots = [TABLES[row][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(count)]

        def taken(array: mx.array) -> Floats:
            """``[kv_heads, count, width]``, codes as they are."""
            cut = array[:, mx.array(slots)] if pool.head_major else array[mx.array(slots)].swapaxes(0, 1)
            return np.array(cut if cut.dtype == mx.uint32 else cut.astype(mx.float32))

        self._window = window
        self._given: tuple[mx.array, mx.array] | None = None
        self._stored: list[Floats] = []
        self._steps: list[Floats] = []  # what packing may cost each element
        for array, affine, packing in (
            (pool.keys[layer], pool.key_affine[layer], shape.key_packing),
            (pool.values[layer], pool.value_affine[layer], shape.value_packing),
        ):
            if packing is None:
                self._stored.append(taken(array))
                self._steps.append(np.zeros_like(self._stored[-1]))
                continue
            scales, biases = (_per_element(taken(part), packing) for part in affine)
            self._stored.append(_codes(taken(array), packing) * scales + biases)
            # MLX moves a scale so that zero has a code, which may cost the far end one step; then scale and bias
            # are rounded.
            rounding = 2 * (2**packing.bits - 1) * _ROUNDOFF[affine[0].dtype]
            self._steps.append(np.abs(scales) * (1 + rounding))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._given = keys, values
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._given is not None
        keys, values = (
            mx.array(stored)[None].astype(given.dtype)
            for stored, given in zip(self._stored, self._given, strict=True)
        )
        return keys, values

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = self._window or window_size or N
        query, key = mx.arange(N)[:, None], mx.arange(N)[None]
        return (key <= query) & (key > query - window)

    def error(self, tolerance: float) -> float:
        """Largest error of an element as a share of what it may be; 0: the layer has no KV of its own."""
        if self._given is None:
            return 0.0
        worst = 0.0
        for given, stored, steps in zip(self._given, self._stored, self._steps, strict=True):
            wanted = np.array(given[0].astype(mx.float32))
            bound = steps + tolerance * np.abs(wanted).max(axis=-1, keepdims=True) + 1e-6
            worst = max(worst, float((np.abs(wanted - stored) / bound).max()))
        return worst


def _codes(words: npt.NDArray[Any], packing: VectorPacking) -> Floats:
    """uint32 ``[..., words]`` -> ``[..., dim]``, from the lowest bits up."""
    per_word = 32 // packing.bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(packing.bits)
    codes: Floats = ((words[..., None] >> shifts) & np.uint32(2**packing.bits - 1)).astype(np.float32)
    return codes.reshape(*words.shape[:-1], -1)[..., : packing.dim]


def _per_element(groups: Floats, packing: VectorPacking) -> Floats:
    """``[..., groups]`` -> ``[..., dim]``."""
    return np.repeat(groups, packing.group_size, axis=-1)[..., : packing.dim]
