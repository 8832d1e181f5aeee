"""The feed-forward half of a decoder block with experts, in few operations for decode steps on CUDA.

    h ─ norm, router product ─ route ─ norm, gate and up product of the chosen experts, SiLU ─ down product,
        weighted ─ sum over the choices + h ─ out

Five kernels of our own (``moe_source.py``), for 16-bit and packed experts and few rows; the unmodified module
computes everything else. Rounding may change which expert comes last among the chosen: logits are products of
16-bit numbers, and two of them can be as close as their rounding. ``settled`` says for which rows that is out of
question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from headrace.errors import one_line
from headrace.runner.kernels.language import cuda_kernel
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.mlx_lm_adapter import SwiGLU, SwitchGLU, SwitchLinear
from headrace.runner.products import small_rows_source
from headrace.runner.products.choice import MEASURED_ROWS, TOLERANCE, measured_bucket
from headrace.runner.products.kernel_products import packed_constants
from headrace.runner.products.packed_rows_source import PACKED_PRODUCT
from headrace.runner.products.packed_weights import PackedWeights, wide
from headrace.runner.products.small_rows import KINDS, MAX_ROWS, Dense, Norm, Product, Products, largest_difference
from headrace.runner.products.tiling import bounds
from headrace.runner.substitutions import moe_source as source
from headrace.runner.substitutions.packed_linear import PackedLinear, PackedSwitchLinear
from headrace.runner.timing import best_seconds

MAX_PAIRS = 1024
MAX_EXPERTS = 1024
# Logits closer than this share of the largest are not told apart.
_UNSETTLED = 2.0**-6
# Of rows that the kernel is tried with: what it adds to them is not lost in rounding.
_SMALL = 0.01


@dataclass(frozen=True, slots=True)
class Experts:
    """Weights of a layer's experts: gate and up ``[E, F, D]``, down ``[E, D, F]``; how rows choose among them.

    Attributes:
        gate: plain weights, as ``up`` and ``down``; None: there are only packed ones.
        packed: gate, up and down; None: there are only plain ones.
    """

    norm: Norm
    router: Dense
    gate: mx.array | None
    up: mx.array | None
    down: mx.array | None
    choices: int
    normalized: bool
    packed: tuple[PackedWeights, PackedWeights, PackedWeights] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, width of one, hidden width."""
        count, width, hidden = self._gate.shape
        return count, width, hidden

    @property
    def dtype(self) -> mx.Dtype:
        """Of the weights' values."""
        return self._gate.dtype

    @property
    def _gate(self) -> mx.array | PackedWeights:
        if self.gate is not None:
            return self.gate
        assert self.packed is not None, "weights are one or the other"
        return self.packed[0]

    @property
    def sides(self) -> list[Experts]:
        """The same experts by each way in which they are held, alone."""
        plain = [] if self.gate is None else [replace(self, packed=None)]
        packed = [] if self.packed is None else [replace(self, gate=None, up=None, down=None)]
        return [*packed, *plain]

    @property
    def matrices(self) -> list[mx.array | PackedWeights]:
        """Gate, up and down; plain where there are both."""
        plain = [array for array in (self.gate, self.up, self.down) if array is not None]
        return list(plain) or list(self.packed or ())


class ExpertsKernel(Protocol):
    """``h [B, 1, D]``, ``experts`` -> ``h`` plus what its chosen experts make of it; B * choices <= MAX_PAIRS."""

    def __call__(self, h: mx.array, experts: Experts, products: Products) -> mx.array: ...


@dataclass(frozen=True, slots=True)
class ExpertsTiling:
    """Constants of one compiled form: tiles of 16 outputs, warps, chunks loaded at once, blocks that share a
    multiprocessor, tiles of 8 rows."""

    wide: int
    warps: int
    deep: int
    resident: int
    tiles: int = 1

    @staticmethod
    def of(pairs: int, experts: int, *, packed: bool, gate: bool) -> ExpertsTiling:
        """For ``pairs`` among ``experts``, by the rows that an expert has on average; measured on an H200."""
        tiles = 1 if pairs <= 4 * experts else 2 if pairs <= 12 * experts else 4
        if not packed:
            return ExpertsTiling(2, 8, 2, 2, max(2, tiles)) if gate else ExpertsTiling(2, 4, 3, 4, tiles)
        if tiles == 4:
            return ExpertsTiling(2, 4, 1, 2, tiles)
        if gate:
            return ExpertsTiling(2, 4, 2 if tiles == 1 else 1, 4, tiles)
        return ExpertsTiling(2, 2, 1, 12 if tiles == 1 else 8, tiles)


class CudaExperts:
    """``ExpertsKernel`` by the CUDA kernels; make one and keep it.

    Args:
        tiling: of the products: of pairs, experts, and whether packed and gate.
    """

    def __init__(self, tiling: Callable[..., ExpertsTiling] = ExpertsTiling.of) -> None:
        self._tiling = tiling
        self._route = _kernel(
            "moe_route", ["logits"], ["chosen", "weights"], source.ROUTE, small_rows_source.MACHINE
        )
        self._combine = _kernel("moe_combine", ["parts", "residual"], ["y"], source.COMBINE, "")
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, h: mx.array, experts: Experts, products: Products) -> mx.array:
        """Of experts that are held both ways the plain ones are read."""
        norm = experts.norm
        logits = products(h, Product(experts.router, norm))
        chosen, weights = self.route(logits, experts)
        hidden = self.gated(h, experts, chosen)
        return self.combine(self.down(hidden, experts, chosen, weights), h, experts.choices)

    def gated(self, h: mx.array, experts: Experts, chosen: mx.array) -> mx.array:
        """``[B * C, F]``: what each pair's expert makes of its row's norm, before the down product."""
        norm, normed = experts.norm, h.dtype == mx.bfloat16
        x = h if normed else mx.fast.rms_norm(h, norm.weight, norm.eps)
        gate, up, _ = experts.matrices
        inputs = {"x": x, **_named("w", gate), **_named("up", up), "chosen": chosen}
        if normed:
            inputs["norm"] = norm.weight
        return self._product(["GATE", *(["NORM"] if normed else [])], inputs, gate, h.dtype, norm.eps)

    def down(self, hidden: mx.array, experts: Experts, chosen: mx.array, weights: mx.array) -> mx.array:
        """``[B * C, D]`` float32: the down products, weighted."""
        matrix = experts.matrices[2]
        inputs = {"x": hidden, **_named("w", matrix), "chosen": chosen, "weights": weights}
        return self._product([], inputs, matrix, mx.float32, 0.0)

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

    def _product(
        self,
        parts: list[str],
        inputs: dict[str, mx.array],
        matrix: mx.array | PackedWeights,
        dtype: mx.Dtype,
        eps: float,
    ) -> mx.array:
        """Products of pairs with the matrices of their experts."""
        chosen = inputs["chosen"]
        experts, outputs, _ = matrix.shape
        packed = matrix if isinstance(matrix, PackedWeights) else None
        gate = "GATE" in parts
        tiling = self._tiling(chosen.size, experts, packed=packed is not None, gate=gate)
        threads = tiling.warps * 32
        together = 16 * tiling.wide // (2 if gate else 1)
        kernel = self._made_for([*parts, *([] if packed is None else ["PACKED"])], list(inputs), tiling)
        y: mx.array = kernel(
            inputs=list(inputs.values()),
            template=[
                ("T", matrix.dtype),
                ("E", experts),
                ("MT", tiling.tiles),
                ("NT", tiling.wide),
                ("W", tiling.warps),
                ("DEEP", tiling.deep),
                ("EPS", _bits(eps)),
                *([] if packed is None else packed_constants(packed)),
            ],
            grid=(outputs // together * threads, min(chosen.size, experts), 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(chosen.size, outputs)],
            output_dtypes=[dtype],
        )[0]
        return y

    def _made_for(self, parts: list[str], names: list[str], tiling: ExpertsTiling) -> Any:
        limits = bounds(tiling.warps, tiling.wide, tiling.resident)
        key = limits, *parts
        if key not in self._made:
            defines = "".join(f"#define {part}\n" for part in parts)
            product = small_rows_source.PRODUCT + (PACKED_PRODUCT if "PACKED" in parts else "")
            self._made[key] = _kernel(
                "_".join(
                    ["moe", "gate" if "GATE" in parts else "down", *(["packed"] if "PACKED" in parts else [])]
                ),
                names,
                ["y"],
                source.EXPERTS,
                defines + small_rows_source.MACHINE + product + limits,
            )
        return self._made[key]

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


def _named(name: str, matrix: mx.array | PackedWeights) -> dict[str, mx.array]:
    """A matrix's arrays by the names that they have in the kernel."""
    if isinstance(matrix, mx.array):
        return {name: matrix}
    return {name: matrix.words, f"{name}_scales": matrix.scales, f"{name}_biases": matrix.biases}


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
        self._wins: dict[tuple[Any, ...], str | None] = {}
        self.faults: list[str] = []

    def of(self, h: mx.array, experts: Experts) -> tuple[ExpertsKernel, Experts] | None:
        """The kernel for ``h [B, 1, D]`` and the side of the experts that it reads; None: the module is better."""
        rows = h.shape[0]
        won = self._wins.get((measured_bucket(rows), *_form(experts)))
        if won is None or self._kernel is None or not self._takes(rows, h.dtype, experts):
            return None
        return self._kernel, next(side for side in experts.sides if _side(side) == won)

    def call_kernels(self, half: ExpertsFeedForward, products: Products) -> None:
        """Call what ``measure`` will run, without evaluating anything (see ``compile_ahead``)."""
        experts = half.experts
        for rows in MEASURED_ROWS:
            h = mx.zeros((rows, 1, experts.shape[2]), experts.dtype)
            if self._takes(rows, h.dtype, experts):
                self._kernel = self._kernel or self._make()
                for side in experts.sides:
                    self._kernel(h, side, products)

    def measure(self, halves: Sequence[ExpertsFeedForward], products: Products) -> None:
        """Check and time the kernel on some layers that are alike but for their values."""
        experts = halves[0].experts
        for rows in MEASURED_ROWS:
            key = (measured_bucket(rows), *_form(experts))
            if key in self._wins or not self._takes(rows, experts.dtype, experts):
                continue
            self._wins[key] = None
            # rows that differ choose different experts
            h = (mx.random.normal((rows, 1, experts.shape[2])) * _SMALL).astype(experts.dtype)
            expected = [expected_change(h, half.experts) for half in halves]
            right = []
            for place in range(len(experts.sides)):
                some = [replace(half, experts=half.experts.sides[place]) for half in halves]
                what = f"experts of {_side(some[0].experts)} at {rows} rows"
                try:
                    self._kernel = self._kernel or self._make()
                    fault = self._fault(h, some, expected, products)
                    if fault is None:
                        right.append(some)
                    else:
                        self.faults.append(f"{what}: {fault}")
                except Exception as error:
                    # Whatever a compiler or driver says about a kernel, the unmodified module can serve.
                    self.faults.append(f"{what}: {one_line(error)}")
            if right:
                self._wins[key] = self._fastest(h, right, products)

    def _takes(self, rows: int, dtype: mx.Dtype, experts: Experts) -> bool:
        """Whether the kernel can compute this at all."""
        count, width, hidden = experts.shape
        return (
            dtype in self._dtypes
            and 1 <= rows <= MAX_ROWS
            and rows * experts.choices <= MAX_PAIRS
            and experts.choices < count <= MAX_EXPERTS
            and all(one.dtype == dtype for side in experts.sides for one in side.matrices)
            and experts.norm.weight.dtype == dtype
            and hidden % 32 == 0
            and width % 32 == 0
        )

    def _fault(
        self,
        h: mx.array,
        halves: Sequence[ExpertsFeedForward],
        expected: Sequence[tuple[mx.array, mx.array]],
        products: Products,
    ) -> str | None:
        """What differs from the expected changes in rows whose choice is settled."""
        assert self._kernel is not None
        for half, (change, settled) in zip(halves, expected, strict=True):
            if not bool(mx.any(settled).item()):
                continue
            got = self._kernel(h, half.experts, products).astype(mx.float32) - h.astype(mx.float32)
            worst = largest_difference(mx.where(settled, got, 0), mx.where(settled, change, 0))
            if not worst <= 2 * TOLERANCE:
                return f"differs by {worst:.2g}"
        return None

    def _fastest(
        self, h: mx.array, candidates: Sequence[Sequence[ExpertsFeedForward]], products: Products
    ) -> str | None:
        """The side that takes the least time; None: the unmodified module does, which is not tried where it would
        unpack its weights first."""
        assert self._kernel is not None
        own = partial(self._kernel, products=products)
        runs = [partial(_chained, halves, h, own) for halves in candidates]
        first = candidates[0][0]
        if not self._timed or not first.has_plain:
            return _side(first.experts)
        *times, plain = self._seconds([*runs, partial(_chained, candidates[0], h, None)])
        best = min(range(len(times)), key=times.__getitem__)
        return _side(candidates[best][0].experts) if times[best] < plain else None

    def _seconds(self, runs: Sequence[Callable[[], mx.array]]) -> list[float]:
        """Of each run, all measured in the same way."""
        if self._recorder is not None:
            with suppress(RuntimeError):  # one of them cannot be recorded
                return [self._recorder.device_seconds(partial(_alone, run)) for run in runs]
        return [best_seconds(run, 3, 2) for run in runs]

    def note(self) -> str:
        """What ``measure`` found, in one line; empty when there was nothing."""
        won = [side for side in self._wins.values() if side is not None]
        text = f"experts: kernel for {len(won)} of {len(self._wins)} measured"
        if any("by" in side for side in won):
            text += f", {sum('by' in side for side in won)} of them over packed weights"
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
        """``h [N, D]`` or ``[N, 1, D]`` -> the same shape."""
        rows = h.reshape(h.shape[0], 1, h.shape[-1])
        found = self.choice.of(rows, self.experts)
        if found is None:
            return self.unmodified(rows).reshape(h.shape)
        kernel, experts = found
        return kernel(rows, experts, products).reshape(h.shape)

    def unmodified(self, h: mx.array) -> mx.array:
        norm = self.experts.norm
        return h + self.module(mx.fast.rms_norm(h, norm.weight, norm.eps))  # type: ignore[no-any-return]

    @property
    def has_plain(self) -> bool:
        """Whether the module has plain weights."""
        return "weight" in self.module.switch_mlp.gate_proj

    def settled(self, h: mx.array) -> mx.array:
        """``[B]`` bool: whether the row's choice of experts does not hang on rounding."""
        return _settled(_wide_logits(_wide_norm(h, self.experts), self.experts), self.experts.choices)


def expected_change(h: mx.array, experts: Experts) -> tuple[mx.array, mx.array]:
    """What ``experts`` add to ``h [B, 1, D]``, evaluated, and ``[B, 1, 1]`` where that does not hang on rounding.

    In float32 and by plain products alone: MLX's products over packed weights may round sums to 16 bits (on a CPU
    they are off by up to 8 hundredths), so that a kernel that differs from them need not be wrong.
    """
    x = _wide_norm(h, experts)
    logits = _wide_logits(x, experts)
    least = mx.sort(logits, axis=-1)[:, -experts.choices, None]
    shares = mx.where(logits >= least, mx.softmax(logits, axis=-1), 0)
    if experts.normalized:
        shares = shares / mx.sum(shares, axis=-1, keepdims=True)
    total = mx.zeros_like(x)
    for expert in np.flatnonzero(np.array(mx.any(shares > 0, axis=0))).tolist():
        gate, up, down = (wide(matrix[expert]) for matrix in experts.matrices)
        total = total + shares[:, expert, None] * ((nn.silu(x @ gate.T) * (x @ up.T)) @ down.T)
        mx.eval(total)  # one expert's values at a time
    return total.reshape(h.shape), _settled(logits, experts.choices)[:, None, None]


def _wide_norm(h: mx.array, experts: Experts) -> mx.array:
    """``[B, D]`` float32."""
    norm = experts.norm
    wide_h = h.astype(mx.float32).reshape(h.shape[0], -1)
    return mx.fast.rms_norm(wide_h, norm.weight.astype(mx.float32), norm.eps)


def _wide_logits(x: mx.array, experts: Experts) -> mx.array:
    """``[B, E]`` float32."""
    return x @ wide(experts.router.held).T


def _settled(logits: mx.array, choices: int) -> mx.array:
    """``[B]`` bool: whether a row's choice does not hang on rounding."""
    ordered = mx.sort(logits, axis=-1)
    gap = ordered[:, -choices] - ordered[:, -choices - 1]
    return gap > _UNSETTLED * mx.max(mx.abs(ordered), axis=-1)


def _chained(
    halves: Sequence[ExpertsFeedForward], h: mx.array, kernel: Callable[[mx.array, Experts], mx.array] | None
) -> mx.array:
    for half in halves:
        h = half.unmodified(h) if kernel is None else kernel(h, half.experts)
    return h


def _form(experts: Experts) -> tuple[Any, ...]:
    return (*experts.shape, experts.choices, experts.normalized, *map(_side, experts.sides))


def _side(experts: Experts) -> str:
    """How the experts of one side are held."""
    packed = experts.packed
    return "16 bits" if packed is None else f"{packed[0].bits} bits by {packed[0].group}"


def _router_of(linear: Any) -> Dense | None:
    if type(linear) is PackedLinear:
        return linear.dense
    return Dense(linear.weight, linear.get("bias")) if type(linear) is nn.Linear else None


def experts_feed_forward(norm: Norm | None, module: Any, choice: ExpertsChoice) -> ExpertsFeedForward | None:
    """``module`` as a feed-forward half, or None when it is not softmax, top k and SiLU experts without more."""
    if norm is None or set(module.children()) != {"gate", "switch_mlp"}:
        return None
    router, switch = module.gate, module.switch_mlp
    choices, normalized = getattr(module, "top_k", None), getattr(module, "norm_topk_prob", None)
    route = _router_of(router)
    if route is None or route.bias is not None or type(switch) is not SwitchGLU:
        return None
    linears = [switch.gate_proj, switch.up_proj, switch.down_proj]
    kind = type(linears[0])
    if kind not in (SwitchLinear, PackedSwitchLinear) or any(type(linear) is not kind for linear in linears):
        return None
    if any("bias" in linear for linear in linears):
        return None
    alone = getattr(module, "sharding_group", None) is None
    if not isinstance(choices, int) or not isinstance(normalized, bool) or type(switch.activation) is not SwiGLU:
        return None
    gate, up, down = (linear.get("weight") for linear in linears)
    packed = None
    if kind is PackedSwitchLinear:
        packed = linears[0].packed, linears[1].packed, linears[2].packed
        if len({(one.bits, one.group) for one in packed}) != 1:
            return None
    experts = Experts(norm, route, gate, up, down, choices, normalized, packed)
    if not alone or route.shape[0] != experts.shape[0]:
        return None
    return ExpertsFeedForward(experts, module, choice)
