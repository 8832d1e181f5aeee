"""From an engine configuration to a runner that is ready: load, check, plan, allocate, warm up.

    describe the files ─► load weights ─► probe KV shapes ─► self-check ─► measure ─► plan ─► pools ─► warm up

Everything that can refuse does so before the pools are allocated, with one line that has the numbers.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from headrace.checkpoint.config import positive_int, text_fields
from headrace.checkpoint.model_folder import ModelFiles, describe
from headrace.config import EngineConfig
from headrace.core.context_scratch import ContextCost
from headrace.core.layout import KVLayout
from headrace.core.machine import usable_cores
from headrace.core.memory_plan import (
    DeviceMemory,
    FixedMemory,
    MemoryPlan,
    own_attention_scratch,
    plan_memory,
)
from headrace.core.scheduler_types import SchedulerConfig
from headrace.errors import StartupError
from headrace.runner.attention import native_attention
from headrace.runner.attention.dispatch import AttentionDispatcher, install
from headrace.runner.attention.kernel_check import KernelChoice, choose_model_kernel, model_forms
from headrace.runner.attention.native_check import NativeChoice, choose_native
from headrace.runner.attention.prefill_check import choose_prefill
from headrace.runner.attention.reference import scratch_bytes
from headrace.runner.cpu import operations as cpu_operations
from headrace.runner.cpu import products as cpu_products
from headrace.runner.cpu.operations import CpuOperations, load_operations
from headrace.runner.device import Device, read_device
from headrace.runner.device_arrays import settle_small_parameters
from headrace.runner.forwards.logits_head import HeadSelector, substitute_head
from headrace.runner.forwards.split import ForwardLimit
from headrace.runner.forwards.step_graphs import StepGraphs
from headrace.runner.kernels import recorder as recording
from headrace.runner.kernels import upload
from headrace.runner.kernels.cache import device_cache
from headrace.runner.kernels.native_extension import Extension, build_ahead
from headrace.runner.kernels.recorder import Recorder
from headrace.runner.kv.layout import ModelLayout, read_layout
from headrace.runner.kv.packing import BITS
from headrace.runner.kv.pool import KVPool
from headrace.runner.kv.store import PoolStore, Store
from headrace.runner.loading.loader import DTYPES, LoadedModel, load_model
from headrace.runner.model_runner import ModelRunner, RunnerOptions
from headrace.runner.sampling.check import choose_sampling
from headrace.runner.sampling.grammar_masks import GrammarMasks
from headrace.runner.start.activation import measure_activation_bytes
from headrace.runner.start.cache import StartCache, StartFacts, start_key
from headrace.runner.start.context_cost import measure_context_cost
from headrace.runner.start.self_check import choose_options
from headrace.runner.start.warm_up import warm_up
from headrace.runner.substitutions import narrow_experts
from headrace.runner.substitutions.decode_products import substitute_decode_products
from headrace.runner.substitutions.fused_linear import fuse_projections
from headrace.runner.substitutions.gated_mlp import substitute_gated_mlps
from headrace.runner.substitutions.narrow_linear import NarrowLinear
from headrace.runner.substitutions.native_block import substitute_native_blocks
from headrace.runner.substitutions.native_norm import substitute_norms
from headrace.runner.substitutions.packed_linear import PackedLinear
from headrace.runner.substitutions.rotary import substitute_rotary
from headrace.runner.substitutions.softcapped_attention import substitute_softcapped_attention
from headrace.text import model_text
from headrace.text.grammars.compiler import GrammarCompiler

log = logging.getLogger("headrace.runner")

Progress = Callable[[str, float], None]
# MLX keeps freed buffers for reuse; without a bound they can grow to several times the live memory.
# Of the device's memory, what recorded decode steps may keep.
STEP_GRAPH_SHARE = 1 / 32
BUFFER_CACHE_BYTES = {"cpu": 256 << 20, "metal": 1 << 30, "cuda": 2 << 30}


@dataclass(frozen=True, slots=True)
class ReadyInfo:
    """What the gateway is told about a ready worker."""

    device: str
    max_model_len: int
    vocab_size: int
    attention: str
    plan: dict[str, int | float | str]


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """A runner and what the scheduler over it is made from; ``num_blocks`` per layer group, usable ones."""

    runner: ModelRunner
    scheduler_config: SchedulerConfig
    layout: KVLayout
    num_blocks: tuple[int, ...]
    ready_info: ReadyInfo
    grammars: GrammarCompiler


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A loaded model that passed its self-check."""

    loaded: LoadedModel
    found: ModelLayout
    selector: HeadSelector
    options: RunnerOptions
    vocab_size: int
    head_major: bool
    attention: str
    store: Store | None
    recorder: Recorder | None
    cache: StartCache
    known: StartFacts | None


def build_runner(config: EngineConfig, progress: Progress) -> BuiltRunner:
    """Build everything; ``progress(stage, fraction)`` is called along the way.

    Raises:
        StartupError: files, configuration or memory do not allow a start.
    """
    files = describe(config.model)
    device = read_device()
    mx.set_cache_limit(BUFFER_CACHE_BYTES[device.kind])
    build_ahead(_extensions(device))
    kernels = device_cache() if device.kind == "cuda" else None
    prepared = _prepare(config, files, device, progress)
    progress("measuring", 0.0)
    plan, options = _plan(config, files, device, prepared)
    for line in (*prepared.loaded.notes, prepared.attention, *plan.notes):
        log.info(line)
    progress("allocating the KV pool", 0.0)
    pool = KVPool(
        prepared.found.layers,
        [count + 1 for count in plan.num_blocks],
        prepared.found.layout.block_size,
        head_major=prepared.head_major,
        store=prepared.store,
    )
    mx.eval(pool.state)
    grammars = GrammarCompiler(lambda: model_text.load(config.model))
    runner = ModelRunner(
        prepared.loaded.model,
        prepared.selector,
        pool,
        prepared.found.layout,
        prepared.vocab_size,
        options,
        GrammarMasks(grammars, prepared.vocab_size),
        None if prepared.recorder is None else StepGraphs(prepared.recorder, plan.fixed.step_graphs),
        choose_sampling(prepared.vocab_size, DTYPES.get(prepared.loaded.dtype, mx.float32)),
    )
    token_s = warm_up(runner, plan, prepared.found.layout, config, progress)
    if kernels is not None:
        log.info(kernels.note())
    return BuiltRunner(
        runner,
        _scheduler_config(config, plan, token_s),
        prepared.found.layout,
        plan.num_blocks,
        ReadyInfo(
            device=f"{device.kind}: {device.name}",
            max_model_len=plan.max_model_len,
            vocab_size=prepared.vocab_size,
            attention=prepared.attention,
            plan=plan.numbers(),
        ),
        grammars,
    )


def _extensions(device: Device) -> list[Extension]:
    """What will be loaded on the way."""
    return {
        "cpu": [cpu_products.extension(), cpu_operations.extension()] if sys.platform == "linux" else [],
        "cuda": [recording.EXTENSION, upload.EXTENSION],
    }.get(device.kind, [])


def _load(config: EngineConfig, files: ModelFiles, device: Device, progress: Progress) -> LoadedModel:
    budget = int(device.working_set_bytes * config.memory_utilization)
    narrow = cpu_products.choose() if device.kind == "cpu" else cpu_products.nothing("")
    if narrow.note:
        log.info(narrow.note)
    return load_model(
        files,
        device=device.kind,
        dtype=config.dtype,
        keep_quantized=config.keep_quantized,
        memory_budget_bytes=budget,
        progress=lambda fraction: progress("loading", fraction),
        narrow=narrow.kinds,
        products=narrow.products,
    )


def _prepare(config: EngineConfig, files: ModelFiles, device: Device, progress: Progress) -> _Prepared:
    loaded = _load(config, files, device, progress)
    model: nn.Module = loaded.model
    block_size = config.block_size or device.block_size
    head_major = device.kind == "cpu"
    operations = load_operations() if head_major else None
    if head_major and loaded.dtype == "float32":
        substitute_gated_mlps(model, operations)
        substitute_rotary(model, operations)
        if operations is not None:
            substitute_norms(model, operations)
    fuse_projections(model, (NarrowLinear,) if head_major else (nn.Linear, nn.QuantizedLinear, PackedLinear))
    found = read_layout(model, block_size, config.kv_cache_dtype)
    install()
    softcap = substitute_softcapped_attention(model)
    choice, bound = _bind_attention(files, found, softcap, head_major, operations)
    gpu_store = None if head_major else PoolStore.checked()
    store: Store | None = choice.store if isinstance(choice, NativeChoice) else gpu_store
    if operations is not None and store is not None:
        log.info(substitute_native_blocks(model, operations, store))
    compiled = config.compile if config.compile is not None else not head_major
    recorder = Recorder.for_device() if compiled and gpu_store is not None else None
    if device.kind == "cuda":
        settle_small_parameters(model)
        bits = BITS.get(config.kv_cache_dtype)
        log.info(substitute_decode_products(model, gpu_store, recorder, bits=bits))
    selector, _ = substitute_head(model)
    vocab_size = _vocab_size(model, selector)
    progress("checking", 0.0)
    wanted = _wanted_options(device, compiled=compiled, has_kernel=choice.kernel is not None)
    cache = StartCache(start_key(files, config, device, wanted, loaded.weights_bytes, bound))
    known = cache.read()
    if known is None:
        options = choose_options(
            model, selector, found, vocab_size, head_major=head_major, wanted=wanted, store=store
        )
    else:
        options = known.options(wanted)
        if wanted.decode_kernel and not options.decode_kernel:
            install(None)
    attention = choice.note
    if head_major and (options.materialize or not options.decode_kernel):
        store = None  # steps that hold much wait for each other
    if options.materialize:
        attention = "reference attention: the model computes its own"
    elif wanted.decode_kernel and not options.decode_kernel:
        attention = "reference attention: the kernel reads packed KV wrongly here"
    if recorder is not None:
        attention += "; decode steps are recorded and replayed"
    return _Prepared(
        loaded, found, selector, options, vocab_size, head_major, attention, store, recorder, cache, known
    )


def _wanted_options(device: Device, *, compiled: bool, has_kernel: bool) -> RunnerOptions:
    """Raises StartupError: a step cannot be compiled here."""
    if compiled and device.kind == "cpu" and not has_kernel:
        raise StartupError(
            "a compiled decode step needs native attention, which this machine has not: drop compile"
        )
    return RunnerOptions(
        compile=compiled,
        trace_prompts=compiled and device.kind == "cuda",
        max_prefill_rows=8,
        decode_kernel=has_kernel,
    )


def _bind_attention(
    files: ModelFiles, found: ModelLayout, softcap: float, head_major: bool, operations: CpuOperations | None
) -> tuple[KernelChoice | NativeChoice, list[str]]:
    """Bind the device's own attention where it is right and faster on the model's layers; also its classes."""
    heads = positive_int(text_fields(files.config), "num_attention_heads") or 1
    if head_major:
        native = choose_native(operations, found, heads, softcap)
        return native, _classes(install(native.kernel))
    decode = choose_model_kernel(found, heads, softcap)
    prefill = choose_prefill(model_forms(found, heads, softcap), found.layout.block_size)
    bound = install(decode.kernel, prefill.kernel)
    notes = "; ".join(note for note in (decode.note, prefill.note) if note)
    return replace(decode, note=notes), _classes(bound)


def _classes(bound: AttentionDispatcher) -> list[str]:
    return [type(kernel).__name__ for kernel in bound.kernels]


def _vocab_size(model: nn.Module, selector: HeadSelector) -> int:
    """Width of the logits; nothing is computed."""
    selector.all_positions()
    return int(model(mx.zeros((1, 1), mx.int32)).shape[-1])


def _plan(
    config: EngineConfig, files: ModelFiles, device: Device, prepared: _Prepared
) -> tuple[MemoryPlan, RunnerOptions]:
    """The memory plan, and the options of a runner that keeps it."""
    trained = trained_len(files)
    wished = config.max_model_len or trained
    memory = DeviceMemory(device.kind, device.total_bytes, device.working_set_bytes, device.free_bytes)
    fixed = FixedMemory(
        weights=prepared.loaded.weights_bytes,
        scratch=_scratch_bytes(prepared),
        buffer_cache=BUFFER_CACHE_BYTES[device.kind],
        step_graphs=step_graph_bytes(device.kind, device.working_set_bytes),
    )
    options, own, cost = prepared.options, None, _context_cost(prepared)
    if cost is not None:
        own = own_attention_scratch(cost, memory, fixed, config, trained)
        fixed = replace(fixed, scratch=own.nbytes + narrow_experts.scratch_bytes(prepared.loaded.model))
        options = replace(options, limit=ForwardLimit(cost, own.nbytes, prepared.head_major))
    fixed = replace(
        fixed,
        activations=_activation_bytes(config, prepared, options, cost, min(config.prefill_step_size, wished)),
    )
    return plan_memory(prepared.found.layout, memory, fixed, config, trained, own), options


def step_graph_bytes(kind: str, working_set: int) -> int:
    """What recorded decode steps (``forwards/step_graphs.py``) may keep on a device of ``kind``."""
    return int(working_set * STEP_GRAPH_SHARE) if kind == "cuda" else 0


def _scratch_bytes(prepared: _Prepared) -> int:
    """Of attention, beside its result, and of experts."""
    experts = narrow_experts.scratch_bytes(prepared.loaded.model)
    if prepared.head_major and prepared.options.decode_kernel and not prepared.options.materialize:
        return native_attention.scratch_bytes(usable_cores()) + experts
    return scratch_bytes(head_major=prepared.head_major) + experts


def _context_cost(prepared: _Prepared) -> ContextCost | None:
    """Of a model that computes attention itself; None: it does not. Measured at its first start, then known."""
    if not prepared.options.materialize:
        return None
    if prepared.known is not None:
        return prepared.known.context_cost
    return measure_context_cost(
        prepared.loaded.model,
        prepared.selector,
        prepared.found,
        prepared.vocab_size,
        prepared.options,
        head_major=prepared.head_major,
    )


def _activation_bytes(
    config: EngineConfig, prepared: _Prepared, options: RunnerOptions, cost: ContextCost | None, chunk: int
) -> int:
    """Measured at the first start of a model, then known."""
    if prepared.known is not None:
        return prepared.known.activation_bytes
    measured = measure_activation_bytes(
        prepared.loaded.model,
        prepared.selector,
        prepared.found,
        prepared.vocab_size,
        options,
        head_major=prepared.head_major,
        chunk=chunk,
        max_rows=config.max_num_seqs,
    )
    prepared.cache.write(StartFacts.of(options, measured, cost))
    return measured


def trained_len(files: ModelFiles) -> int:
    """The context length the model was trained for, as its configuration states it."""
    fields = text_fields(files.config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"):
        if isinstance(fields.get(name), int) and fields[name] > 0:
            return int(fields[name])
    return 8192


def _scheduler_config(config: EngineConfig, plan: MemoryPlan, token_s: float | None) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len,
        prefill_step_size=config.prefill_step_size,
        max_prefill_rows=8,
        max_decode_stall_ms=config.max_decode_stall_ms,
        max_queue=config.max_queue,
        enable_prefix_cache=config.enable_prefix_cache,
        prefix_cache_max_blocks=plan.prefix_cache_blocks,
        continuous_batching=config.continuous_batching,
        prefill_token_s=token_s,
    )
