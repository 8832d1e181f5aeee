"""Sampling by two kernels of our own on a GPU (``source.py``), over logits that are edited already.

What a row asks for is eight words, all rows' words are one array: MLX keeps what the host makes in memory that a
kernel waits for (``device_arrays.py``). It is copied there (``upload.py``), or else read by one operation only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from headrace.runner.device_arrays import on_device
from headrace.runner.kernels.language import CUDA_NAMES, compact, cuda_kernel
from headrace.runner.kernels.upload import Uploads
from headrace.runner.products.small_rows_source import BOUNDS
from headrace.runner.sampling import source
from headrace.runner.sampling.batch import RandomRows

STRIPS_TOGETHER = 8
CHOICE_THREADS = 1024
KINDS = (mx.float32, mx.bfloat16, mx.float16)
# Outputs have at least so many elements; MLX would take memory that the host shares for fewer bytes than nine.
LEAST_OUTPUTS = 16
# What a row asks for: the largest logit; noise; noise over what top_p and min_p keep; over what top_k keeps too.
GREEDY, PLAIN, TRUNCATED, TOP_K = range(4)


def row_words(rows: int, vocab: int, random: RandomRows) -> npt.NDArray[np.uint32]:
    """``[rows, 8]``: kind, temperature, both keys, top_k, top_p, log(min_p), nothing; floats by their bits."""
    words = np.zeros((rows, source.WORDS), np.uint32)
    index = np.arange(rows) if random.rows is None else np.array(random.rows)
    mine = np.zeros((len(index), source.WORDS), np.uint32)
    mine[:, 0] = PLAIN
    mine[:, 1] = random.temperatures.view(np.uint32)
    mine[:, 2], mine[:, 3] = random.key_add, random.key_mul
    mine[:, 4], mine[:, 5] = vocab, np.float32(2.0).view(np.uint32)  # off
    mine[:, 6] = np.float32(-np.inf).view(np.uint32)
    truncation = random.truncation
    if truncation is not None:
        mine[(truncation.top_p < 1) | (truncation.min_p > 0), 0] = TRUNCATED
        mine[truncation.top_k < vocab, 0] = TOP_K
        with np.errstate(divide="ignore"):
            least = np.log(truncation.min_p.astype(np.float64)).astype(np.float32)
        mine[:, 4] = truncation.top_k
        mine[:, 5], mine[:, 6] = truncation.top_p.view(np.uint32), least.view(np.uint32)
    words[index] = mine
    return words


class SamplingKernel:
    """The compiled kernels of one device; make one and keep it.

    Args:
        make: ``cuda_kernel`` or ``mx.fast.metal_kernel``.
        header: the matching names of ``kernels/language.py`` and ``source.py``.
        bounds: tell the compiler how many threads a block has (CUDA).
        threads: of the block that chooses a row's token: whole warps, at most 1024.
        strips: that one block reads.
        uploads: the way of words to the device; None: by an operation that reads them there.

    """

    def __init__(
        self,
        make: Callable[..., Any],
        header: str,
        *,
        bounds: bool = True,
        threads: int = CHOICE_THREADS,
        strips: int = STRIPS_TOGETHER,
        uploads: Uploads | None = None,
    ) -> None:
        self._threads = threads
        self._together = strips
        self._uploads = uploads
        self._greedy: dict[int, mx.array] = {}

        def kernel(name: str, inputs: list[str], outputs: list[str], body: str, block: int, blocks: int) -> Any:
            limits = BOUNDS.format(threads=block, blocks=blocks) if bounds else ""
            return make(
                name=name,
                input_names=inputs,
                output_names=outputs,
                source=compact(body),
                header=compact(header + source.FUNCTIONS) + limits,
            )

        inputs = ["logits", "words"]
        self._strips = kernel("sample_strips", inputs, ["found"], source.STRIPS_BODY, strips * 32, 4)
        self._choice = kernel(
            "sample_choice", [*inputs, "found"], ["tokens", "finite"], source.CHOICE_BODY, threads, 1
        )

    @staticmethod
    def for_device() -> SamplingKernel | None:
        """The kernels of a CUDA device, unchecked; None elsewhere (they have not been run on Metal)."""
        if mx.default_device() != mx.gpu or mx.metal.is_available():
            return None
        return SamplingKernel(cuda_kernel, CUDA_NAMES + source.CUDA_SAMPLING_NAMES, uploads=Uploads.checked())

    @staticmethod
    def takes(logits: mx.array) -> bool:
        """Whether the kernels can sample from ``logits [R, V]``."""
        return logits.dtype in KINDS and logits.shape[1] <= source.STRIP * source.COLLECTED

    def __call__(self, logits: mx.array, random: RandomRows | None) -> tuple[mx.array, mx.array]:
        """Tokens ``[R]`` int32 of ``logits [R, V]``, and whether the row's logits are finite.

        Not finite: NaN or +inf anywhere, or nothing but -inf.
        """
        rows, vocab = logits.shape
        strips = -(-vocab // source.STRIP)
        words = self._words(rows, vocab, random)
        found = self._strips(
            inputs=[logits, words],
            template=[("T", logits.dtype), ("WARPS", self._together)],
            grid=(-(-strips // self._together) * self._together * 32, rows, 1),
            threadgroup=(self._together * 32, 1, 1),
            output_shapes=[(rows, source.RESULTS, strips)],
            output_dtypes=[mx.uint32],
        )[0]
        made = max(rows, LEAST_OUTPUTS)
        tokens, finite = self._choice(
            inputs=[logits, words, found],
            template=[("T", logits.dtype), ("THREADS", self._threads)],
            grid=(rows * self._threads, 1, 1),
            threadgroup=(self._threads, 1, 1),
            output_shapes=[(made,), (made,)],
            output_dtypes=[mx.int32, mx.bool_],
        )
        return (tokens, finite) if made == rows else (tokens[:rows], finite[:rows])

    def _words(self, rows: int, vocab: int, random: RandomRows | None) -> mx.array:
        if random is not None and self._uploads is not None:
            return self._uploads(row_words(rows, vocab, random))
        if rows not in self._greedy:
            self._greedy[rows] = on_device(mx.zeros((rows, source.WORDS), mx.uint32))
        greedy = self._greedy[rows]
        # The sum is made by the device, in its own memory.
        return greedy if random is None else mx.array(row_words(rows, vocab, random)) + greedy
