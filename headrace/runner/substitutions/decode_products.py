"""All substitutions that make decode steps and prompts faster on CUDA, in order; what came of them in one line."""

from __future__ import annotations

import logging

import mlx.nn as nn

from headrace.runner.attention.rotate_store import RotateAndStore
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.kv.store import PoolStore
from headrace.runner.products.choice import SmallRowsKernel
from headrace.runner.products.row_operations import RowKernels
from headrace.runner.substitutions.block_check import BlockTools, substitute_decoder_blocks
from headrace.runner.substitutions.decoder_block import FusedBlock
from headrace.runner.substitutions.moe_decode import ExpertsChoice
from headrace.runner.substitutions.packed_linear import substitute_packed
from headrace.runner.substitutions.small_row_linear import substitute_small_row_linears

log = logging.getLogger("headrace.runner")


def substitute_decode_products(
    model: nn.Module, store: PoolStore | None, recorder: Recorder | None = None, *, bits: int | None = None
) -> str:
    """Fuse decoder blocks, then give the linear layers outside of them the few-rows product.

    Needs the projections fused (``fuse_projections``) and the attention bound (``install``). ``recorder``: where
    decode steps will be recorded and replayed. ``bits``: of packed pools.
    """
    products = SmallRowsKernel(recorder=recorder, beside=RowKernels.for_device())
    experts = ExpertsChoice(recorder=recorder)
    rotate = RotateAndStore.for_device()
    note = "decode blocks: fused 0; pools are not written in place here"
    if store is not None and rotate is not None:
        tools = BlockTools(products, rotate, store, experts, bits=bits, recorder=recorder)
        _, note = substitute_decoder_blocks(model, tools)
    blocks = [f"{path}." for path, module in model.named_modules() if isinstance(module, FusedBlock)]
    substitute_packed(model, products, blocks)
    substitute_small_row_linears(model, products)
    for line in products.details():
        log.debug("few-rows products, tiles/wide/warps/deep/resident (us of the kernel : of MLX): %s", line)
    return "; ".join(part for part in (note, products.note(), experts.note()) if part)
