"""Module substitution, CUDA with 16-bit weights: linear layers that use the small-rows kernel where it is faster.

The unmodified product computes everything else: prefill, larger batches, shapes the kernel does not take. Which
shapes win is measured at load on the weights themselves (``SmallRowsKernel.measure``). Fused decoder blocks have
their own products; their inner modules are left alone.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from headrace.runner.products.choice import SmallRowsKernel
from headrace.runner.products.small_rows import Dense, Product, takes
from headrace.runner.substitutions.decoder_block import FusedBlock


class SmallRowLinear(nn.Module):  # type: ignore[misc]
    """A linear layer without bias over the weights of ``inner``."""

    def __init__(self, weight: mx.array, kernel: SmallRowsKernel) -> None:
        super().__init__()
        self.weight = weight
        self._kernel = kernel

    def __call__(self, x: mx.array) -> mx.array:
        return small_row_product(x, self.weight, self._kernel)


def small_row_product(x: mx.array, weight: mx.array, kernel: SmallRowsKernel) -> mx.array:
    """``x [..., K] @ weight.T`` by the kernel when there are few rows."""
    rows = x.size // x.shape[-1]
    dense = Dense(weight)
    if kernel.chosen(rows, dense) and x.dtype == dense.dtype:
        is_prompt = x.ndim == 3 and x.shape[1] > 1
        products = kernel.in_prompts if is_prompt else kernel
        return products(x.reshape(rows, x.shape[-1]), Product(dense)).reshape(*x.shape[:-1], weight.shape[0])
    return x @ weight.T


class SmallRowEmbedding(nn.Module):  # type: ignore[misc]
    """A tied embedding whose projection uses the kernel."""

    def __init__(self, weight: mx.array, kernel: SmallRowsKernel) -> None:
        super().__init__()
        self.weight = weight
        self._kernel = kernel

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.weight[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        return small_row_product(x, self.weight, self._kernel)


def substitute_small_row_linears(model: nn.Module, kernel: SmallRowsKernel) -> int:
    """Replace linear layers without bias and tied embeddings, each shape measured once; how many were replaced."""
    replaced = []
    modules = model.named_modules()
    blocks = tuple(f"{path}." for path, module in modules if isinstance(module, FusedBlock))
    for path, module in modules:
        if path.startswith(blocks):
            continue
        if type(module) is nn.Linear and "bias" not in module:
            made: nn.Module = SmallRowLinear(module.weight, kernel)
        elif type(module) is nn.Embedding:
            made = SmallRowEmbedding(module.weight, kernel)
        else:
            continue
        dense = Dense(module.weight)
        if takes(8, module.weight.dtype, dense):
            kernel.measure([(dense, None)])
            replaced.append((path, made))
    model.update_modules(nn.utils.tree_unflatten(replaced))
    return len(replaced)
