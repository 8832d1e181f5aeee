"""Module substitution, CPU: mixtures of experts over weights that stay narrow in memory.

Each ``SwitchLinear`` that was loaded packed (affine, 4 or 8 bits) or with 16 bits is laid out anew, one at a time,
and computes with float32 activations. The first of every form must give what the weights that it replaces give.
Where gate, up and down of a ``SwitchGLU`` are such layers and the activation is known, the whole of it becomes one
operation (``native/cpu_experts.h``), if that gives what the module does; an unknown activation stays the module's
own, between products.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import StartupError
from headrace.runner.cpu.narrow_weights import (
    Activation,
    NarrowForm,
    NarrowProducts,
    NarrowStack,
    interleaved_biases,
    takes_dtype,
    takes_packing,
)
from headrace.runner.mlx_lm_adapter import QuantizedSwitchLinear, SwiGLU, SwigluOAI, SwitchGLU, SwitchLinear
from headrace.runner.substitutions.modules import agree, each_module, put

log = logging.getLogger("headrace.runner")

KINDS = (SwitchLinear,)
# What a mixture keeps between its products (native/cpu_experts.h), once for all layers.
SCRATCH_BYTES = 16 << 20
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = 1e-3


class NarrowSwitchLinear(nn.Module):  # type: ignore[misc]
    """``SwitchLinear``: rows multiplied with the matrices of the experts that ``indices`` names; float32."""

    def __init__(self, stack: NarrowStack, products: NarrowProducts, bias: mx.array | None = None) -> None:
        super().__init__()
        self.strips = stack.strips
        if bias is not None:
            self.bias = bias.astype(mx.float32)
        self._form = stack.form
        self._products = products

    @property
    def stack(self) -> NarrowStack:
        return NarrowStack(self._form, self.strips)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """``x [..., M, inputs]``, its first axes broadcast with those of ``indices``: ``[..., M, outputs]``."""
        *batch, rows, inputs = x.shape
        if rows == 1 and batch == [*indices.shape[:-1], 1]:
            y = self._products.expert_products(
                x.reshape(*batch[:-1], inputs), indices, self.stack, self.get("bias")
            )
            return mx.expand_dims(y, -2)
        shape = mx.broadcast_shapes(tuple(batch), indices.shape)
        x = mx.broadcast_to(x, (*shape, rows, inputs))
        chosen = mx.broadcast_to(indices[..., None], (*shape, rows))
        return self._products.expert_products(x, chosen, self.stack, self.get("bias"))


class NarrowSwitchGLU(nn.Module):  # type: ignore[misc]
    """``SwitchGLU``: gate and up in one product, the activation computed where their sums are."""

    def __init__(
        self,
        gate: NarrowSwitchLinear,
        up: NarrowSwitchLinear,
        down: NarrowSwitchLinear,
        activation: Activation,
        products: NarrowProducts,
    ) -> None:
        super().__init__()
        gate_up = products.interleaved_stacks(gate.stack, up.stack)
        self.gate_up, self.down = gate_up.strips, down.strips
        if "bias" in gate:
            self.gate_up_bias, self.down_bias = interleaved_biases(gate.bias, up.bias), down.bias
        self._forms = gate_up.form, down.stack.form
        self._activation = activation
        self._products = products

    @property
    def width(self) -> int:
        """D: of inputs and results."""
        return self._forms[0].inputs

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """``x [..., D]``, ``indices [..., choices]`` -> ``[..., choices, D]``."""
        return self._mixture(x, indices, None)

    def weighted(self, x: mx.array, indices: mx.array, shares: mx.array) -> mx.array:
        """The results weighted with ``shares [..., choices]`` and added up in their order: ``[..., D]``."""
        return self._mixture(x, indices, shares)

    def _mixture(self, x: mx.array, indices: mx.array, shares: mx.array | None) -> mx.array:
        return self._products.mixture(
            x,
            indices,
            NarrowStack(self._forms[0], self.gate_up),
            NarrowStack(self._forms[1], self.down),
            self._activation,
            shares=shares,
            biases=(self.gate_up_bias, self.down_bias) if "down_bias" in self else None,
        )


def substitute_narrow_experts(model: nn.Module, products: NarrowProducts) -> int:
    """Replace what can stay narrow; returns how many matrices were replaced. Weights move one at a time.

    Raises StartupError when a product over a model's own weights is wrong.
    """
    checked: set[tuple[NarrowForm, bool]] = set()
    count = 0
    for path, module in each_module(model):
        made = _narrow(module, products)
        if made is None:
            continue
        mx.eval(made.parameters())
        form = made.stack.form, "bias" in module
        if form not in checked:
            _check(path, module, made)
            checked.add(form)
        put(model, path, made)
        count += 1
    told: set[str] = set()
    for path, module in each_module(model):
        if type(module) is not SwitchGLU or any(
            type(module[name]) is not NarrowSwitchLinear for name in _PROJECTIONS
        ):
            continue
        fused = _fused(module, products)
        if isinstance(fused, NarrowSwitchGLU):
            mx.eval(fused.parameters())
            put(model, path, fused)
        elif fused not in told:
            told.add(fused)
            log.info("products of %s and experts like it stay apart: %s", path, fused)
    return count


def scratch_bytes(model: nn.Module) -> int:
    """What a mixture keeps between its products, once for all layers that are ones."""
    return SCRATCH_BYTES if any(type(module) is NarrowSwitchGLU for module in model.modules()) else 0


def _narrow(module: Any, products: NarrowProducts) -> NarrowSwitchLinear | None:
    if type(module) is QuantizedSwitchLinear and takes_packing(module.bits, module.group_size, module.mode):
        stack = products.packed_stack(module.weight, module.scales, module.biases, module.bits)
    elif type(module) is SwitchLinear and takes_dtype(module.weight.dtype):
        stack = products.plain_stack(module.weight)
    else:
        return None
    return NarrowSwitchLinear(stack, products, module.get("bias"))


def _check(path: str, module: Any, made: NarrowSwitchLinear) -> None:
    """A few rows through the first, the last and one more expert."""
    experts = module.weight.shape[0]
    indices = mx.array([[0, experts - 1], [experts // 2, 0], [experts - 1, experts // 2]])
    x = mx.random.normal((len(indices), 1, 1, made.stack.form.inputs), key=mx.random.key(0))
    expected = x @ _widened(module, indices).swapaxes(-1, -2)
    if "bias" in module:
        expected = expected + module.bias[indices][:, :, None].astype(mx.float32)
    if not agree(expected, made(x, indices), _TOLERANCE):
        raise StartupError(f"products over narrow weights are wrong in {path}: start with --dequantize")


def _widened(module: Any, index: mx.array) -> mx.array:
    """Matrices of some experts as MLX widens them, float32."""
    if type(module) is SwitchLinear:
        return module.weight[index].astype(mx.float32)  # type: ignore[no-any-return]
    scales, biases = (module[name][index].astype(mx.float32) for name in ("scales", "biases"))
    return mx.dequantize(module.weight[index], scales, biases, group_size=module.group_size, bits=module.bits)


def _activation(module: nn.Module) -> Activation | None:
    """What the native operation knows it as, if it may be one that it has; ``_fused`` compares."""
    if type(module) is SwigluOAI:
        return Activation("clamped", module._alpha, module._limit)
    if type(module) is SwiGLU:
        return Activation("silu")
    return Activation("gelu") if type(module).__name__ == "GeGLU" else None


def _fused(module: Any, products: NarrowProducts) -> NarrowSwitchGLU | str:
    """The ``SwitchGLU`` as one operation, or why that is not what it computes."""
    gate, up, down = (module[name] for name in _PROJECTIONS)
    activation = _activation(module.activation)
    if activation is None:
        return f"its activation {type(module.activation).__name__} is computed by MLX"
    biases = sum("bias" in layer for layer in (gate, up, down))
    sizes = down.stack.form.outputs == gate.stack.form.inputs
    if gate.stack.form != up.stack.form or biases not in (0, 3) or not sizes:
        return "gate, up and down do not fit together"
    made = NarrowSwitchGLU(gate, up, down, activation, products)
    x = 4 * mx.random.normal((3, gate.stack.form.inputs), key=mx.random.key(0))
    experts = len(gate.strips)
    indices = mx.array([[0, experts - 1], [experts // 2, 0], [experts - 1, experts // 2]])
    if not agree(module(x, indices), made(x, indices), _TOLERANCE):
        return "the mixture as one operation differs"
    return made
