"""Where the device's memory goes, decided before the first request.

    budget = min(working set · utilization, free now − headroom)
    KV pool = budget − weights − activation peak − scratch − buffer cache

The pool is divided so that all layer groups run out together: a full-attention group gets F blocks, a sliding
group as many as sequences of ``REFERENCE_TOKENS`` need next to those F, never more than ``max_num_seqs`` windows
and the chunks under way. F is the largest number that fits. Pure arithmetic: every number is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.config import EngineConfig
from headrace.core.context_scratch import ContextCost, ContextScratch, plan_context_scratch
from headrace.core.layout import KVLayout
from headrace.errors import StartupError

REFERENCE_TOKENS = 2048  # length of the sequences that sliding pools are sized for
MIN_SEQUENCE_TOKENS = 256  # a pool that cannot hold one sequence this long is refused
CHUNKS_UNDER_WAY = 6  # chunks whose blocks a sliding group may hold beside the windows
# On the CPU the pool is filled with zeros at start and attention over long contexts is slow: ask for more.
CPU_POOL_BYTES = 4 << 30
LOWERED = "model length lowered"
CONTEXTS = (2048, 8192, 32768)  # for people: how many sequences fit


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device, bytes, as if this process had allocated nothing yet.

    Attributes:
        kind: "metal", "cuda" or "cpu"; all but "cuda" share memory with the rest of the machine.
        total: physical.
        working_set: what one process should use at most.
        free: what is free now; if weights are loaded already, add them.
    """

    kind: str
    total: int
    working_set: int
    free: int


@dataclass(frozen=True, slots=True)
class FixedMemory:
    """What is not KV, bytes.

    Attributes:
        weights: exact, from the file headers.
        activations: peak of the largest prefill chunk and the largest decode batch, measured or estimated.
        scratch: of attention over gathered context, where an implementation needs it; of a model that computes
            attention itself what its forwards may hold (``ContextScratch.nbytes``).
        buffer_cache: freed buffers that the allocator may keep.
        step_graphs: arrays that recorded decode steps may keep (CUDA).
    """

    weights: int
    activations: int = 0
    scratch: int = 0
    buffer_cache: int = 0
    step_graphs: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.scratch + self.buffer_cache + self.step_graphs


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The plan in force.

    Attributes:
        device: what the budget is a part of.
        headroom_bytes: of the device's memory, what is left to everybody else.
        budget_bytes: what this process may use.
        fixed: what of it is not KV.
        num_blocks: usable blocks per layer group (one null block each comes on top).
        pool_bytes: all pools, null blocks included.
        max_model_len: prompt and output tokens of a sequence, at most.
        prefix_cache_blocks: per group, cap on blocks that only the prefix cache holds.
        notes: what people should know: lengths that were lowered, what limits.
    """

    layout: KVLayout
    device: DeviceMemory
    headroom_bytes: int
    budget_bytes: int
    fixed: FixedMemory
    num_blocks: tuple[int, ...]
    pool_bytes: int
    max_model_len: int
    max_num_seqs: int
    prefix_cache_blocks: tuple[int, ...]
    notes: tuple[str, ...]

    @property
    def lowered(self) -> str:
        """The note that says that the model length was lowered; "": it was not."""
        return next((note for note in self.notes if note.startswith(LOWERED)), "")

    def sequences_at(self, context: int) -> int:
        """How many sequences of ``context`` tokens fit at once; 0 beyond ``max_model_len``."""
        if context > self.max_model_len:
            return 0
        fits = [
            blocks // _blocks_per_sequence(self.layout, g, context) for g, blocks in enumerate(self.num_blocks)
        ]
        return min(self.max_num_seqs, *fits)

    def rows(self) -> list[tuple[str, int]]:
        """The table: names and bytes, the parts adding up to the budget."""
        fixed = self.fixed
        rows = [
            ("weights", fixed.weights),
            ("activations", fixed.activations),
            ("attention scratch", fixed.scratch),
            ("buffer cache", fixed.buffer_cache),
        ]
        if fixed.step_graphs:
            rows.append(("recorded steps", fixed.step_graphs))
        for g, group in enumerate(self.layout.groups):
            rows.append((f"KV pool {group.name}", (self.num_blocks[g] + 1) * self.layout.block_bytes(g)))
        rows.append(("unused", self.budget_bytes - fixed.total - self.pool_bytes))
        return [*rows, ("budget", self.budget_bytes)]

    def numbers(self) -> dict[str, int | float | str]:
        """The same and the counts, by name, for status pages and logs."""
        numbers: dict[str, int | float | str] = {
            f"{name.replace(' ', '_')}_bytes": size for name, size in self.rows()
        }
        numbers["pool_bytes"] = self.pool_bytes
        numbers["planned_bytes"] = self.fixed.total + self.pool_bytes
        numbers["headroom_bytes"] = self.headroom_bytes
        numbers["device_total_bytes"] = self.device.total
        numbers["device_free_at_start_bytes"] = self.device.free
        numbers["kv_bytes_per_token"] = self.layout.bytes_per_token
        numbers["max_model_len"] = self.max_model_len
        for group, blocks in zip(self.layout.groups, self.num_blocks, strict=True):
            numbers[f"blocks_{group.name}"] = blocks
        for context in CONTEXTS:
            numbers[f"sequences_at_{context}"] = self.sequences_at(context)
        if self.lowered:
            numbers["model_len_lowered"] = self.lowered
        if self.notes:
            numbers["notes"] = "; ".join(self.notes)
        return numbers


def plan_memory(
    layout: KVLayout,
    device: DeviceMemory,
    fixed: FixedMemory,
    config: EngineConfig,
    model_max_len: int,
    own_attention: ContextScratch | None = None,
) -> MemoryPlan:
    """Decide the pools and the model length.

    Args:
        layout: of the model's KV.
        device: where it will lie.
        fixed: what else will lie there.
        config: sizes that were asked for, shares, ``max_num_seqs``, ``prefill_step_size``.
        model_max_len: context length the model was trained for; ``config.max_model_len`` lowers or raises it.
        own_attention: what ``fixed.scratch`` is for, of a model that computes attention itself.

    Raises:
        StartupError: the pool asked for does not fit, or not even a short sequence does.
    """
    budget = _budget(device, config)
    room = budget - fixed.total
    wanted_len = config.max_model_len or model_max_len
    notes: list[str] = []
    if wanted_len > model_max_len:
        notes.append(f"model length {wanted_len}: beyond the {model_max_len} tokens that the model was made for")
    wanted_len = _length_in_scratch(own_attention, wanted_len, notes)
    if config.max_cache_blocks is None and config.kv_memory_bytes is None:
        if device.kind == "cpu" and room > CPU_POOL_BYTES:
            room = CPU_POOL_BYTES
            notes.append(f"KV pool limited to {_mib(room)} on the CPU; --kv-memory-mb raises it")
        num_blocks = _largest(layout, config, room, wanted_len)
    else:
        num_blocks = _asked(layout, device, fixed, config, wanted_len, room)
    pool_bytes = _pool_bytes(layout, num_blocks)
    held = _max_sequence_tokens(layout, num_blocks)
    least = min(wanted_len, layout.block_size if config.max_cache_blocks else MIN_SEQUENCE_TOKENS)
    if held < least:
        offered = room if config.kv_memory_bytes is None else config.kv_memory_bytes
        raise StartupError(_too_small(layout, offered, budget, fixed, least, device))
    if held < wanted_len:
        notes.append(_lowered(layout, config, wanted_len, held, pool_bytes))
    max_num_seqs = config.max_num_seqs if config.continuous_batching else 1
    max_len = min(wanted_len, held)
    if own_attention is not None:
        notes.append(own_attention.note(max_num_seqs, max_len))
    return MemoryPlan(
        layout=layout,
        device=device,
        headroom_bytes=_headroom(device, config),
        budget_bytes=budget,
        fixed=fixed,
        num_blocks=num_blocks,
        pool_bytes=pool_bytes,
        max_model_len=max_len,
        max_num_seqs=max_num_seqs,
        prefix_cache_blocks=_prefix_cache_blocks(config, num_blocks, pool_bytes),
        notes=tuple(notes),
    )


def own_attention_scratch(
    cost: ContextCost, device: DeviceMemory, fixed: FixedMemory, config: EngineConfig, model_max_len: int
) -> ContextScratch:
    """What to set aside for a model that computes attention itself; ``fixed``: weights and buffer cache."""
    return plan_context_scratch(
        cost,
        device.kind,
        config.max_num_seqs if config.continuous_batching else 1,
        config.max_model_len or model_max_len,
        _budget(device, config) - fixed.weights - fixed.buffer_cache,
    )


def _length_in_scratch(own: ContextScratch | None, wanted_len: int, notes: list[str]) -> int:
    """``wanted_len``, or what one row's scratch is enough for, which is noted."""
    if own is None or own.max_len >= wanted_len:
        return wanted_len
    per_token = own.cost.of(1, 1, 1)
    if own.max_len < MIN_SEQUENCE_TOKENS:
        raise StartupError(
            f"not enough memory: this model computes attention itself, {per_token:,} bytes a token of a sequence, "
            f"and {_mib(own.nbytes)} are left for that: {own.max_len} tokens, at least {MIN_SEQUENCE_TOKENS} are "
            "needed; a smaller model, or a lower --memory-headroom, would fit"
        )
    notes.append(
        f"{LOWERED} from {wanted_len} to {own.max_len} tokens: this model computes attention itself, "
        f"{per_token:,} bytes a token of a sequence within {_mib(own.nbytes)}; a lower --memory-headroom raises it"
    )
    return own.max_len


def _asked(
    layout: KVLayout, device: DeviceMemory, fixed: FixedMemory, config: EngineConfig, wanted_len: int, room: int
) -> tuple[int, ...]:
    """Blocks of the pool that was asked for, in blocks or in bytes; a replacement takes less when it must."""
    budget = room + fixed.total
    if config.max_cache_blocks is not None:
        num_blocks = _blocks(layout, config, config.max_cache_blocks)
        if config.replaces and _pool_bytes(layout, num_blocks) > room:
            num_blocks = _largest(layout, config, room, wanted_len)
        _refuse_above(_pool_bytes(layout, num_blocks), room, budget, fixed, "--max-cache-blocks", device)
        return num_blocks
    assert config.kv_memory_bytes is not None
    size = min(config.kv_memory_bytes, room) if config.replaces else config.kv_memory_bytes
    _refuse_above(size, room, budget, fixed, "--kv-memory-mb", device)
    return _largest(layout, config, size, wanted_len)


def _lowered(layout: KVLayout, config: EngineConfig, wanted_len: int, held: int, pool_bytes: int) -> str:
    """That the model length was lowered, by what, and how to have more of it."""
    needed = _mib(wanted_len * layout.bytes_per_token)
    flag = "--kv-memory-mb" if config.max_cache_blocks is None else "--max-cache-blocks"
    ways = [f"a larger {flag}"]
    if config.max_cache_blocks is None and config.kv_memory_bytes is None:
        ways.append("a lower --memory-headroom")
    if config.kv_cache_dtype == "auto":
        ways.append("--kv-cache-dtype int8")
    return (
        f"{LOWERED} from {wanted_len} to {held} tokens: the KV pool of {_mib(pool_bytes)} holds no "
        f"more, {wanted_len} take {needed}; {', '.join(ways)} raises it, --max-model-len {held} asks for no more"
    )


def _budget(device: DeviceMemory, config: EngineConfig) -> int:
    room = device.free - _headroom(device, config)
    return max(0, min(int(device.working_set * config.memory_utilization), room))


def _headroom(device: DeviceMemory, config: EngineConfig) -> int:
    """A CUDA device's memory is nobody else's: only the share of the working set leaves room there."""
    share = config.memory_headroom / 2 if config.replaces else config.memory_headroom
    return 0 if device.kind == "cuda" else int(device.total * share)


def _blocks_per_sequence(layout: KVLayout, group: int, context: int) -> int:
    """Blocks that a decoding sequence of ``context`` tokens holds in a group."""
    size, window = layout.block_size, layout.groups[group].window
    blocks = -(-context // size)
    return blocks if window is None else min(blocks, -(-(window - 1) // size) + 1)


def _blocks(layout: KVLayout, config: EngineConfig, full: int) -> tuple[int, ...]:
    """Blocks of every group when full-attention groups have ``full``."""
    chunk = -(-config.prefill_step_size // layout.block_size)
    reference = -(-REFERENCE_TOKENS // layout.block_size)
    has_full = any(group.window is None for group in layout.groups)
    counts = []
    for g, group in enumerate(layout.groups):
        if group.window is None:
            counts.append(full)
            continue
        window = _blocks_per_sequence(layout, g, group.window + layout.block_size)
        proportional = -(-full * min(window, reference) // reference)
        least = window + 2 * chunk
        most = config.max_num_seqs * window + CHUNKS_UNDER_WAY * chunk
        counts.append(min(full, most, max(least, proportional)) if has_full else min(full, most))
    return tuple(counts)


def _pool_bytes(layout: KVLayout, num_blocks: tuple[int, ...]) -> int:
    return sum((blocks + 1) * layout.block_bytes(g) for g, blocks in enumerate(num_blocks))


def _largest(layout: KVLayout, config: EngineConfig, room: int, max_model_len: int) -> tuple[int, ...]:
    """The largest pools within ``room`` bytes, by bisection; at most twice what full-length sequences need."""
    most = 2 * config.max_num_seqs * -(-max_model_len // layout.block_size)
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if _pool_bytes(layout, _blocks(layout, config, middle)) <= room:
            low = middle
        else:
            high = middle - 1
    return _blocks(layout, config, low)


def _max_sequence_tokens(layout: KVLayout, num_blocks: tuple[int, ...]) -> int:
    """Tokens that one sequence alone can hold (as ``KVCacheManager.max_tokens``, very large without a bound)."""
    limits = [1 << 40]
    for g, (group, blocks) in enumerate(zip(layout.groups, num_blocks, strict=True)):
        if group.window is None or blocks < _blocks_per_sequence(layout, g, 1 << 40):
            limits.append(blocks * layout.block_size)
    return min(limits)


def _prefix_cache_blocks(config: EngineConfig, num_blocks: tuple[int, ...], pool_bytes: int) -> tuple[int, ...]:
    if not config.enable_prefix_cache:
        return (0,) * len(num_blocks)
    share = config.prefix_cache_share
    if config.prefix_cache_bytes is not None:
        share = min(1.0, config.prefix_cache_bytes / pool_bytes)
    return tuple(int(blocks * share) for blocks in num_blocks)


def _refuse_above(
    wanted: int, room: int, budget: int, fixed: FixedMemory, flag: str, device: DeviceMemory
) -> None:
    if wanted > room:
        raise StartupError(
            f"{flag} asks for a KV pool of {_mib(wanted)}, {_mib(max(0, room))} are left: "
            f"{_numbers(budget, fixed, device)}; lower it, or --memory-headroom"
        )


def _too_small(
    layout: KVLayout, room: int, budget: int, fixed: FixedMemory, least: int, device: DeviceMemory
) -> str:
    needed = least * layout.bytes_per_token
    return (
        f"not enough memory: {_mib(max(0, room))} are left for the KV pool, one sequence of {least} tokens needs "
        f"{_mib(needed)}: {_numbers(budget, fixed, device)}; "
        "a smaller or more quantized model, or a lower --memory-headroom, would fit"
    )


def _numbers(budget: int, fixed: FixedMemory, device: DeviceMemory) -> str:
    return (
        f"budget {_mib(budget)} (working set {_mib(device.working_set)}, free {_mib(device.free)}), "
        f"weights {_mib(fixed.weights)}, activations {_mib(fixed.activations + fixed.scratch)}, "
        f"buffer cache {_mib(fixed.buffer_cache)}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
