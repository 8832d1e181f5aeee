"""A model's memory without its weights: exact weights and KV shapes, estimated activations.

The module is built with lazy parameters and probed with one lazy token, as at start; nothing is evaluated. Only
the activation peak, which a start measures, is a formula here, in values of the dtype that the model computes in
for each token of the largest prefill chunk. It was fitted to peaks measured on the CPU:

- Dense layers: eight rows of the hidden size, five of the intermediate size and two of the attention's width.
- Experts over narrow weights (CPU): MLX makes arrays of about four layers before the first of them is computed.
  Each has five rows of the hidden size (attention's sum, its norm, the mixture, its sum, and one to spare, as how
  far MLX runs ahead differs), three of a value for each expert (logits, shares, their order) and six of one for
  each choice; shared experts add three rows of their width in all. Beside these are two rows of the hidden size,
  and attention's queries, result, keys and values. What the mixture keeps between its products is a line of its
  own.
- Experts of MLX's own operations: for each choice five rows of the hidden size and six of the experts' width, with
  eleven of the hidden size and of a value for each expert beside the same as above. Not measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from headrace.checkpoint.config import text_fields
from headrace.checkpoint.model_folder import ModelFiles
from headrace.config import EngineConfig
from headrace.core.context_scratch import ContextScratch
from headrace.core.layout import KVLayout
from headrace.core.memory_plan import DeviceMemory, FixedMemory, own_attention_scratch
from headrace.runner.attention.reference import scratch_bytes
from headrace.runner.build import BUFFER_CACHE_BYTES, step_graph_bytes, trained_len
from headrace.runner.cpu import products as cpu_products
from headrace.runner.device import DeviceKind
from headrace.runner.kv.layout import read_layout
from headrace.runner.loading.loader import DTYPES, Plan, narrow_text, outline_model
from headrace.runner.mlx_lm_adapter import QuantizedSwitchLinear, SwitchLinear
from headrace.runner.start.activation import sampler_bytes
from headrace.runner.start.context_cost import computes_own_attention, estimate_context_cost
from headrace.runner.substitutions import narrow_experts
from headrace.runner.substitutions.softcapped_attention import substitute_softcapped_attention

_FILE_DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
# Experts that a token chooses, as configurations call it, and where they do not say.
_CHOICES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
_USUAL_CHOICES = 8
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
    chunk = min(config.prefill_step_size, wished)
    activations = chunk * _token_values(fields, model, plan) * dtype.size
    activations += sampler_bytes(int(fields["vocab_size"]), config.max_num_seqs)
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


def _token_values(fields: dict[str, Any], model: nn.Module, plan: Plan) -> int:
    """Values alive for each token of a prefill chunk."""
    hidden = _most(fields.get("hidden_size"))
    inner = _most(fields.get("intermediate_size")) or 4 * hidden
    heads, dim = _most(fields.get("num_attention_heads")), _most(fields.get("head_dim"))
    attention = heads * dim or hidden
    dense = 8 * hidden + 5 * inner + 2 * attention
    experts = _experts(fields, model)
    if experts is None:
        return dense
    pairs = (_most(fields.get("num_key_value_heads")) or heads) * attention // max(heads, 1)
    beside = 2 * hidden + 2 * attention + 2 * pairs + 3 * experts.shared
    if plan.experts == "narrow":
        values = 4 * (5 * hidden + 3 * experts.count + 6 * experts.choices) + beside
    else:
        values = experts.choices * (5 * hidden + 6 * experts.inner) + 11 * (hidden + experts.count) + beside
    return max(values, dense) if experts.beside_dense else values


@dataclass(frozen=True, slots=True)
class _Experts:
    """How many, how many a token chooses, their width, that of shared ones, and whether some layers have none."""

    count: int
    choices: int
    inner: int
    shared: int
    beside_dense: bool


def _experts(fields: dict[str, Any], model: nn.Module) -> _Experts | None:
    """None: there are none."""
    layers = [
        module for _, module in model.named_modules() if type(module) in (SwitchLinear, QuantizedSwitchLinear)
    ]
    if not layers:
        return None
    gates = {
        path: int(module.weight.shape[0])
        for path, module in model.named_modules()
        if path.endswith(".gate_proj") and type(module) in (nn.Linear, nn.QuantizedLinear)
    }
    shared = [size for path, size in gates.items() if "shared" in path]
    count, inputs = layers[0].num_experts, max(_most(fields.get("hidden_size")), 1)
    chosen = max(_most(fields.get(name)) for name in _CHOICES)
    return _Experts(
        count,
        min(chosen or _USUAL_CHOICES, count),
        max((layer.output_dims for layer in layers if layer.input_dims == inputs), default=inputs),
        max(shared, default=0),
        len(gates) > len(shared),
    )


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
