"""Module substitution, CUDA: layers whose packed weights feed kernels of ours, with plain ones beside them or not.

A decode step reads the packed weights (``products/packed_rows_source.py``), a quarter or half of the plain ones'
bytes; a prefill reads the plain ones where memory holds both, else it unpacks them. Which way a product goes is
``SmallRowsKernel``'s choice once a layer has one (``use``); before that, it is MLX's (``linear``).

Every layer's form is compared with the module that it replaces; where they differ, that module stays.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from headrace.errors import one_line
from headrace.runner.mlx_lm_adapter import QuantizedSwitchLinear, SwitchLinear
from headrace.runner.products.choice import TOLERANCE, SmallRowsKernel
from headrace.runner.products.packed_weights import PackedWeights, wide
from headrace.runner.products.small_rows import LEAST_UNPACKED, Dense, Product, largest_difference, linear

log = logging.getLogger("headrace.runner")

# Layers that can be held so, and those that can have plain weights beside the packed ones.
KINDS = (nn.Linear, nn.Embedding, SwitchLinear)
WITH_PLAIN = (nn.Linear, SwitchLinear)


class PackedModule(nn.Module):  # type: ignore[misc]
    """Holds a matrix or matrices packed, and plain ones (``weight``) or none."""

    def __init__(
        self, packed: PackedWeights, weight: mx.array | None = None, bias: mx.array | None = None
    ) -> None:
        super().__init__()
        self.words, self.scales, self.biases = packed.words, packed.scales, packed.biases
        if weight is not None:
            self.weight = weight
        if bias is not None:
            self.bias = bias
        self._bits, self._group = packed.bits, packed.group

    @property
    def packed(self) -> PackedWeights:
        return PackedWeights(self.words, self.scales, self.biases, self._bits, self._group)

    @property
    def dense(self) -> Dense:
        return Dense(self.get("weight"), self.get("bias"), self.packed)


class PackedLinear(PackedModule):
    """``x · wᵀ + bias``."""

    def __init__(
        self, packed: PackedWeights, weight: mx.array | None = None, bias: mx.array | None = None
    ) -> None:
        super().__init__(packed, weight, bias)
        self._products: SmallRowsKernel | None = None

    def use(self, products: SmallRowsKernel) -> None:
        """Let ``products`` choose the way from now on."""
        self._products = products

    def __call__(self, x: mx.array) -> mx.array:
        return chosen_product(x, self.dense, self._products)

    def joined(self, others: Sequence[PackedLinear]) -> PackedLinear | None:
        """This layer and the others, which see the same input, as one; None where they do not fit together."""
        layers = [self, *others]
        names = set(self.parameters())
        forms = {(one._bits, one._group, one.packed.shape[1], one.packed.dtype) for one in layers}
        if len(forms) != 1 or any(set(one.parameters()) != names for one in layers):
            return None
        whole = {name: mx.concatenate([one[name] for one in layers], axis=0) for name in names}
        packed = PackedWeights(whole["words"], whole["scales"], whole["biases"], self._bits, self._group)
        return PackedLinear(packed, whole.get("weight"), whole.get("bias"))


class PackedEmbedding(PackedModule):
    """An embedding, and its projection where it is tied to the output."""

    def __init__(self, packed: PackedWeights) -> None:
        super().__init__(packed)
        self._products: SmallRowsKernel | None = None

    def use(self, products: SmallRowsKernel) -> None:
        """Let ``products`` choose the way of projections from now on."""
        self._products = products

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.packed[tokens].unpacked()

    def as_linear(self, x: mx.array) -> mx.array:
        return chosen_product(x, self.dense, self._products)


class PackedSwitchLinear(PackedModule):
    """The matrices of a layer's experts, each row multiplied with those that it chose."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weight = self.get("weight")
        if weight is None and indices.size >= LEAST_UNPACKED:
            weight = self.packed.unpacked()
        if weight is not None:
            y = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices)
        else:
            y = mx.gather_qmm(
                x,
                self.words,
                self.scales,
                self.biases,
                rhs_indices=indices,
                transpose=True,
                group_size=self._group,
                bits=self._bits,
                sorted_indices=sorted_indices,
            )
        return y + mx.expand_dims(self.bias[indices], -2) if "bias" in self else y


def chosen_product(x: mx.array, dense: Dense, products: SmallRowsKernel | None) -> mx.array:
    """``x [..., K] @ weight.T + bias`` the way that ``products`` chooses."""
    if products is None or x.dtype != dense.dtype:
        return linear(x, dense)
    flat = x.reshape(-1, x.shape[-1])
    return products(flat, Product(dense)).reshape(*x.shape[:-1], dense.shape[0])


# -- putting them into a model -----------------------------------------------------------------------------


def kinds_of(model: nn.Module, kinds: tuple[type, ...] = KINDS) -> dict[str, int]:
    """Weights of the plain layers of ``kinds``, by path."""
    return {path: module.weight.size for path, module in model.named_modules() if type(module) in kinds}


def hold_packed(model: nn.Module, paths: Collection[str], both: Collection[str]) -> int:
    """Replace the packed modules at ``paths``; those in ``both`` get plain weights too. How many were replaced.

    Weights are unpacked one layer at a time.
    """
    right: dict[tuple[Any, ...], bool] = {}
    count = 0
    modules = dict(model.named_modules())
    for path in paths:
        module = modules[path]
        packed = PackedWeights.of(module)
        if packed is None:
            continue
        weight = packed.unpacked() if path in both else None
        form = type(module), packed.shape, packed.bits, packed.group, "bias" in module, weight is not None
        if weight is not None:
            mx.eval(weight)
        made: Any
        if isinstance(module, nn.QuantizedEmbedding):
            made = PackedEmbedding(packed)
        elif isinstance(module, QuantizedSwitchLinear):
            made = PackedSwitchLinear(packed, weight, module.get("bias"))
        else:
            made = PackedLinear(packed, weight, module.get("bias"))
        if form not in right:
            fault = _fault(module, made, packed)
            right[form] = fault is None
            if fault is not None:
                log.warning("%s and layers like it stay as they are: over packed weights, %s", path, fault)
        if right[form]:
            model.update_modules(nn.utils.tree_unflatten([(path, made)]))
            count += 1
    return count


def _fault(module: Any, made: Any, packed: PackedWeights) -> str | None:
    """How ``made`` is off what the weights say for a few rows; None: by rounding, or twice the module's error."""
    *outer, outputs, inner = packed.shape
    x = mx.random.normal((3, inner), key=mx.random.key(0)).astype(packed.dtype)
    places = [0, (outer[0] if outer else outputs) - 1, (outer[0] if outer else outputs) // 2]
    values = wide(packed[mx.array(places)] if outer or isinstance(made, PackedEmbedding) else packed)
    given: tuple[mx.array, ...] = (x,)
    expected = x.astype(mx.float32) @ values.swapaxes(-1, -2)
    if isinstance(made, PackedSwitchLinear):
        expected = x.astype(mx.float32)[:, None, None] @ values[:, None].swapaxes(-1, -2)
        given = x[:, None, None], mx.array(places)[:, None]
    elif isinstance(made, PackedEmbedding):
        expected, given = values, (mx.array(places),)
    if "bias" in module:
        bias = module.bias.astype(mx.float32)
        expected = expected + (bias[mx.array(places)][:, None, None] if outer else bias)
    try:
        worst = largest_difference(made(*given), expected)
        if worst <= TOLERANCE or worst <= 2 * largest_difference(module(*given), expected):
            return None
        return f"products differ by {worst:.2g}"
    except RuntimeError as error:  # not there on this device
        return one_line(error)


def substitute_packed(model: nn.Module, products: SmallRowsKernel, inside: Collection[str]) -> int:
    """Let ``products`` choose the ways of all packed layers, each shape measured once; how many there are.

    ``inside``: prefixes of paths of layers that decode steps do not call, as fused blocks have their own products;
    those are measured, for short prefills, where there are no plain weights.
    """
    count = 0
    for path, module in model.named_modules():
        if not isinstance(module, PackedLinear | PackedEmbedding):
            continue
        if module.dense.weight is None or not path.startswith(tuple(inside)):
            products.measure([(module.dense, None)])
        module.use(products)
        count += 1
    return count
