"""A model's memory without its weights: exact weights and KV shapes, estimated activations.

The module is built with lazy parameters and probed with one lazy token, as at start; nothing is evaluated. Only
the activation peak, which a start measures, is a formula here: for each token of the largest prefill chunk about
eight rows of the hidden size, five of the intermediate size and two of the attention's width, in the dtype that
the model computes in. It was fitted to peaks measured on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx

from headrace.checkpoint.config import text_fields
from headrace.checkpoint.model_folder import ModelFiles
from headrace.config import EngineConfig
from headrace.core.context_scratch import ContextScratch
from headrace.core.layout import KVLayout
from headrace.core.memory_plan import DeviceMemory, FixedMemory, own_attention_scratch
from headrace.runner import cpu_products
from headrace.runner.activation import sampler_bytes
from headrace.runner.attention.reference import scratch_bytes
from headrace.runner.build import BUFFER_CACHE_BYTES, step_graph_bytes, trained_len
from headrace.runner.context_cost import computes_own_attention, estimate_context_cost
from headrace.runner.device import DeviceKind
from headrace.runner.kv_layout import read_layout
from headrace.runner.loader import DTYPES, Plan, narrow_text, outline_model
from headrace.runner.substitutions import narrow_experts
from headrace.runner.substitutions.softcapped_attention import substitute_softcapped_attention

_FILE_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
BLOCK_SIZES: dict[DeviceKind, int] = {"cpu": 16, "metal": 32, "cuda": 32}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a start of the model would find.

    Attributes:
        layout: of its KV.
        fixed: weights exact, activations estimated.
        trained_len: context length the model was made for.
        form: how the weights are held, for people.
        own_attention: of a model that computes attention itself, what ``fixed.scratch`` is for.
    """

    layout: KVLayout
    fixed: FixedMemory
    trained_len: int
    form: str
    own_attention: ContextScratch | None = None


def estimate(files: ModelFiles, config: EngineConfig, device: DeviceMemory) -> Estimate:
    """Raises StartupError: the files do not make a model, or its weights do not fit the working set."""
    kind = cast("DeviceKind", device.kind)
    model, plan = outline_model(
        files,
        device=kind,
        dtype=config.dtype,
        keep_quantized=config.keep_quantized,
        memory_budget_bytes=int(device.working_set * config.memory_utilization),
        narrow=cpu_products.choose().kinds if kind == "cpu" else (),
    )
    dtype = _compute_dtype(files, plan)
    model.set_dtype(dtype)
    found = read_layout(model, config.block_size or BLOCK_SIZES[kind], config.kv_cache_dtype)
    longest = trained_len(files)
    wished = config.max_model_len or longest
    fields = text_fields(files.config)
    activations = _chunk_bytes(fields, min(config.prefill_step_size, wished), dtype) + sampler_bytes(
        int(fields["vocab_size"]), config.max_num_seqs
    )
    experts = narrow_experts.SCRATCH_BYTES if plan.experts == "narrow" else 0
    fixed = FixedMemory(
        weights=plan.nbytes,
        activations=activations,
        scratch=scratch_bytes(head_major=kind == "cpu") + experts,
        buffer_cache=BUFFER_CACHE_BYTES[kind],
        step_graphs=step_graph_bytes(kind, device.working_set),
    )
    own = None
    substitute_softcapped_attention(model, check=False)
    if computes_own_attention(model, found):
        cost = estimate_context_cost(found, _most(fields.get("num_attention_heads")) or 1)
        own = own_attention_scratch(cost, device, fixed, config, longest)
        fixed = replace(fixed, scratch=own.nbytes + experts)
    return Estimate(found.layout, fixed, longest, _form(plan, dtype), own)


def _compute_dtype(files: ModelFiles, plan: Plan) -> mx.Dtype:
    """The dtype of activations, and so of KV: the form's, else the most common plain one in the files."""
    if plan.form.dtype is not None:
        return plan.form.dtype
    plain = [_FILE_DTYPES[name] for name in files.dtypes if name in _FILE_DTYPES]
    if files.kind == "gguf":  # as the GGUF loader: 16-bit, bfloat16 unless the file is float16
        return mx.float16 if files.dtypes[0] == "F16" else mx.bfloat16
    return plain[0] if plain else mx.bfloat16


def _chunk_bytes(fields: dict[str, Any], chunk: int, dtype: mx.Dtype) -> int:
    hidden = _most(fields.get("hidden_size"))
    inner = _most(fields.get("intermediate_size")) or 4 * hidden
    attention = _most(fields.get("num_attention_heads")) * (_most(fields.get("head_dim")) or 0) or hidden
    return chunk * (8 * hidden + 5 * inner + 2 * attention) * dtype.size


def _most(value: object) -> int:
    """A size, or the largest where a model states one per layer; 0 where it states none."""
    sizes = value if isinstance(value, list) else [value]
    return max((size for size in sizes if isinstance(size, int)), default=0)


def _form(plan: Plan, dtype: mx.Dtype) -> str:
    name = next((name for name, known in DTYPES.items() if known == dtype), str(dtype))
    if plan.form.narrow:
        return f"{narrow_text(plan)}, computed in {name}"
    if not plan.packings:
        return name
    bits = sorted({packing.bits for packing in plan.packings.values()})
    beside = f", and {name}" if plan.beside else ""
    return f"packed, {'/'.join(map(str, bits))} bits{beside}"
