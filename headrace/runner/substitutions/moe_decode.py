"""The feed-forward half of a decoder block with experts, in few operations for decode steps on CUDA.

    h ─ norm, router product ─ route ─ norm, gate and up product of the chosen experts, SiLU ─ down product,
        weighted ─ sum over the choices + h ─ out

Five kernels of our own (``moe_source.py``), for unpacked 16-bit experts and few rows; the unmodified module
computes everything else. Rounding may change which expert comes last among the chosen: logits are products of
16-bit numbers, and two of them can be as close as their rounding. ``settled`` says for which rows that is out of
question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchLinear

from headrace.runner import small_rows_source
from headrace.runner.kernel_language import cuda_kernel
from headrace.runner.small_rows import (
    KINDS,
    MAX_ROWS,
    MEASURED_ROWS,
    TOLERANCE,
    Dense,
    Norm,
    Product,
    Products,
    bounds,
    largest_difference,
    measured_bucket,
    plain_product,
)
from headrace.runner.step_graphs import Recorder
from headrace.runner.substitutions import moe_source as source
from headrace.runner.timing import best_seconds

MAX_PAIRS = 256
MAX_EXPERTS = 1024
# Logits closer than this share of the largest are not told apart.
_UNSETTLED = 2.0**-6


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of a layer's experts: gate and up ``[E, F, D]``, down ``[E, D, F]``; how rows choose among them."""

    norm: Norm
    router: Dense
    gate: mx.array
    up: mx.array
    down: mx.array
    choices: int
    normalized: bool


class ExpertsKernel(Protocol):
    """``h [B, 1, D]``, ``experts`` -> ``h`` plus what its chosen experts make of it; B * choices <= MAX_PAIRS."""

    def __call__(self, h: mx.array, experts: Experts, products: Products) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class _Tiling:
    wide: int
    warps: int
    deep: int


_GATE = _Tiling(2, 8, 4)
_DOWN = _Tiling(2, 8, 4)


class CudaExperts:
    """``ExpertsKernel`` by the CUDA kernels; make one and keep it."""

    def __init__(self) -> None:
        self._route = _kernel(
            "moe_route", ["logits"], ["chosen", "weights"], source.ROUTE, small_rows_source.MACHINE
        )
        self._combine = _kernel("moe_combine", ["parts", "residual"], ["y"], source.COMBINE, "")
        self._gates = {
            normed: _kernel(
                "moe_gate",
                ["x", "w", "up", "chosen", *(["norm"] if normed else [])],
                ["y"],
                source.EXPERTS,
                _header(["GATE", *(["NORM"] if normed else [])], _GATE),
            )
            for normed in (False, True)
        }
        self._down = _kernel(
            "moe_down", ["x", "w", "chosen", "weights"], ["y"], source.EXPERTS, _header([], _DOWN)
        )

    def __call__(self, h: mx.array, experts: Experts, products: Products) -> mx.array:
        norm = experts.norm
        normed = h.dtype == mx.bfloat16
        logits = products(h, Product(experts.router, norm))
        x = h if normed else mx.fast.rms_norm(h, norm.weight, norm.eps)
        chosen, weights = self.route(logits, experts)
        gate = [x, experts.gate, experts.up, chosen, *([norm.weight] if normed else [])]
        hidden = self._product(self._gates[normed], _GATE, gate, experts.gate, h.dtype, norm.eps, 2)
        down = [hidden, experts.down, chosen, weights]
        parts = self._product(self._down, _DOWN, down, experts.down, mx.float32, 0.0, 1)
        return self.combine(parts, h, experts.choices)

    def route(self, logits: mx.array, experts: Experts) -> tuple[mx.array, mx.array]:
        """Chosen experts ``[B, C]`` int32 and their weights, float32, of ``logits [B, E]``."""
        rows = logits.shape[0]
        shape = rows, experts.choices
        chosen, weights = self._route(
            inputs=[logits],
            template=[
                ("T", logits.dtype),
                ("E", logits.shape[1]),
                ("C", experts.choices),
                ("NORMALIZE", int(experts.normalized)),
                ("SCALE", _bits(1.0)),
            ],
            grid=(32 * rows, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[shape, shape],
            output_dtypes=[mx.int32, mx.float32],
        )
        return chosen, weights

    @staticmethod
    def _product(
        kernel: Any,
        tiling: _Tiling,
        inputs: list[mx.array],
        weights: mx.array,
        dtype: mx.Dtype,
        eps: float,
        matrices: int,
    ) -> mx.array:
        """Products of pairs; ``matrices``: how many share a block's tiles."""
        chosen = next(array for array in inputs if array.dtype == mx.int32)
        experts, outputs, _ = weights.shape
        threads = tiling.warps * 32
        y: mx.array = kernel(
            inputs=inputs,
            template=[
                ("T", weights.dtype),
                ("E", experts),
                ("NT", tiling.wide),
                ("W", tiling.warps),
                ("DEEP", tiling.deep),
                ("EPS", _bits(eps)),
            ],
            grid=(outputs * matrices // (16 * tiling.wide) * threads, min(chosen.size, experts), 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(chosen.size, outputs)],
            output_dtypes=[dtype],
        )[0]
        return y

    def combine(self, parts: mx.array, residual: mx.array, choices: int) -> mx.array:
        """``residual`` plus the sums of ``parts [B * choices, N]``."""
        y: mx.array = self._combine(
            inputs=[parts, residual],
            template=[("T", residual.dtype), ("C", choices)],
            grid=(-(-parts.shape[1] // 256) * 256, residual.shape[0], 1),
            threadgroup=(256, 1, 1),
            output_shapes=[residual.shape],
            output_dtypes=[residual.dtype],
        )[0]
        return y


def _kernel(name: str, inputs: list[str], outputs: list[str], body: str, header: str) -> Any:
    return cuda_kernel(name=name, input_names=inputs, output_names=outputs, source=body, header=header)


def _header(parts: Sequence[str], tiling: _Tiling) -> str:
    defines = "".join(f"#define {part}\n" for part in parts)
    limits = bounds(tiling.warps, tiling.wide)
    return defines + small_rows_source.MACHINE + small_rows_source.PRODUCT + limits


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


# -- as a block's feed-forward half ------------------------------------------------------------------------


class ExpertsChoice:
    """Which numbers of rows the kernel takes: where ``measure`` found it right and faster.

    Args:
        kernel: makes the kernel when it is first needed.
        dtypes: of weights that it takes.
        timed: whether it must also be faster.
        recorder: where decode steps are recorded and replayed, so that only the device's time counts.

    Attributes:
        faults: what was wrong with the kernel, one line each.
    """

    def __init__(
        self,
        kernel: Callable[[], ExpertsKernel] = CudaExperts,
        *,
        dtypes: Sequence[mx.Dtype] = KINDS,
        timed: bool = True,
        recorder: Recorder | None = None,
    ) -> None:
        self._dtypes = dtypes
        self._recorder = recorder
        self._make = kernel
        self._timed = timed
        self._kernel: ExpertsKernel | None = None
        self._wins: dict[tuple[Any, ...], bool] = {}
        self.faults: list[str] = []

    def of(self, h: mx.array, experts: Experts) -> ExpertsKernel | None:
        """The kernel for ``h [B, 1, D]``, or None for the unmodified module."""
        rows = h.shape[0]
        wins = self._wins.get((measured_bucket(rows), *_form(experts)), False)
        return self._kernel if wins and self._takes(rows, h.dtype, experts) else None

    def call_kernels(self, half: ExpertsFeedForward, products: Products) -> None:
        """Call what ``measure`` will run, without evaluating anything (see ``compile_ahead``)."""
        experts = half.experts
        for rows in MEASURED_ROWS:
            h = mx.zeros((rows, 1, experts.gate.shape[2]), experts.gate.dtype)
            if self._takes(rows, h.dtype, experts):
                self._kernel = self._kernel or self._make()
                self._kernel(h, experts, products)

    def measure(self, halves: Sequence[ExpertsFeedForward], products: Products) -> None:
        """Check and time the kernel on some layers that are alike but for their values."""
        experts = halves[0].experts
        for rows in MEASURED_ROWS:
            key = (measured_bucket(rows), *_form(experts))
            if key in self._wins or not self._takes(rows, experts.gate.dtype, experts):
                continue
            self._wins[key] = False
            h = (mx.random.normal((rows, 1, experts.gate.shape[2])) * 0.1).astype(experts.gate.dtype)
            try:
                self._kernel = self._kernel or self._make()
                fault = self._fault(h, halves, products)
                if fault is not None:
                    self.faults.append(f"experts at {rows} rows: {fault}")
                    continue
                self._wins[key] = not self._timed or self._is_faster(h, halves, products)
            except Exception as error:
                # Whatever a compiler or driver says about a kernel, the unmodified module can serve.
                self.faults.append(f"experts at {rows} rows: {(str(error).splitlines() or ['?'])[0][:160]}")

    def _takes(self, rows: int, dtype: mx.Dtype, experts: Experts) -> bool:
        """Whether the kernel can compute this at all."""
        count, width, hidden = experts.gate.shape
        return (
            dtype in self._dtypes
            and 1 <= rows <= MAX_ROWS
            and rows * experts.choices <= MAX_PAIRS
            and experts.choices < count <= MAX_EXPERTS
            and all(
                array.dtype == dtype for array in (experts.gate, experts.up, experts.down, experts.norm.weight)
            )
            and hidden % 32 == 0
            and width % 32 == 0
        )

    def _fault(self, h: mx.array, halves: Sequence[ExpertsFeedForward], products: Products) -> str | None:
        """What differs in rows whose choice is settled."""
        assert self._kernel is not None
        for half in halves:
            settled = half.settled(h)[:, None, None]
            expected = mx.where(settled, half.unmodified(h) - h, 0)
            got = mx.where(settled, self._kernel(h, half.experts, products) - h, 0)
            if not bool(mx.any(settled).item()):
                continue
            worst = largest_difference(got, expected)
            if not worst <= 2 * TOLERANCE:
                return f"differs by {worst:.2g}"
        return None

    def _is_faster(self, h: mx.array, halves: Sequence[ExpertsFeedForward], products: Products) -> bool:
        assert self._kernel is not None
        runs = [partial(_chained, halves, h, by) for by in (partial(self._kernel, products=products), None)]
        own, plain = self._seconds(runs)
        return own < plain

    def _seconds(self, runs: Sequence[Callable[[], mx.array]]) -> list[float]:
        """Of each run, all measured in the same way."""
        if self._recorder is not None:
            with suppress(RuntimeError):  # one of them cannot be recorded
                return [self._recorder.device_seconds(partial(_alone, run)) for run in runs]
        return [best_seconds(run, 3, 2) for run in runs]

    def note(self) -> str:
        """What ``measure`` found, in one line; empty when there was nothing."""
        text = f"experts: kernel for {sum(self._wins.values())} of {len(self._wins)} measured"
        return "; ".join([text, *self.faults]) if self._wins else ""


def _alone(run: Callable[[], mx.array]) -> list[mx.array]:
    return [run()]


@dataclass(frozen=True, slots=True)
class ExpertsFeedForward:
    """The feed-forward half of a block with experts; ``module`` is the unmodified one."""

    experts: Experts
    module: nn.Module
    choice: ExpertsChoice

    def __call__(self, h: mx.array, products: Products) -> mx.array:
        kernel = self.choice.of(h, self.experts)
        return self.unmodified(h) if kernel is None else kernel(h, self.experts, products)

    def unmodified(self, h: mx.array) -> mx.array:
        norm = self.experts.norm
        return h + self.module(mx.fast.rms_norm(h, norm.weight, norm.eps))  # type: ignore[no-any-return]

    def settled(self, h: mx.array) -> mx.array:
        """``[B]`` bool: whether the row's choice of experts does not hang on rounding."""
        logits = mx.sort(
            plain_product(h, Product(self.experts.router, self.experts.norm)).astype(mx.float32), axis=-1
        )
        last, next_one = logits[:, -self.experts.choices], logits[:, -self.experts.choices - 1]
        return last - next_one > _UNSETTLED * mx.max(mx.abs(logits), axis=-1)


def _chained(
    halves: Sequence[ExpertsFeedForward], h: mx.array, kernel: Callable[[mx.array, Experts], mx.array] | None
) -> mx.array:
    for half in halves:
        h = half.unmodified(h) if kernel is None else kernel(h, half.experts)
    return h


def _form(experts: Experts) -> tuple[Any, ...]:
    return (*experts.gate.shape, experts.choices, experts.normalized)


def experts_feed_forward(norm: Norm | None, module: Any, choice: ExpertsChoice) -> ExpertsFeedForward | None:
    """``module`` as a feed-forward half, or None when it is not softmax, top k and SiLU experts without more."""
    if norm is None or set(module.children()) != {"gate", "switch_mlp"}:
        return None
    router, switch = module.gate, module.switch_mlp
    choices, normalized = getattr(module, "top_k", None), getattr(module, "norm_topk_prob", None)
    if type(router) is not nn.Linear or "bias" in router or type(switch) is not SwitchGLU:
        return None
    linears = [switch.gate_proj, switch.up_proj, switch.down_proj]
    if any(type(linear) is not SwitchLinear or "bias" in linear for linear in linears):
        return None
    alone = getattr(module, "sharding_group", None) is None
    if not isinstance(choices, int) or not isinstance(normalized, bool) or type(switch.activation) is not SwiGLU:
        return None
    if not alone or router.weight.shape[0] != linears[0].weight.shape[0]:
        return None
    gate, up, down = (linear.weight for linear in linears)
    experts = Experts(norm, Dense(router.weight), gate, up, down, choices, normalized)
    return ExpertsFeedForward(experts, module, choice)
