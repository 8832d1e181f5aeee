"""At start on the CPU: is native attention right here, and is it faster than the reference?

Every distinct form that the model's layers will use runs over random pools, decode rows and a prefill of ragged
rows through shuffled block tables, and is compared with the reference over the same pool. It is used when all
outputs match and decode takes no longer than the reference over all layers; so is, then, writing in place
(``kv/store.py``), which lets steps be started before earlier ones have been read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.step import ScheduledRow
from headrace.errors import one_line
from headrace.params import SamplingParams
from headrace.runner.attention.kernel_check import LayerForm
from headrace.runner.attention.native_attention import NativeAttention
from headrace.runner.attention.reference import paged_attention
from headrace.runner.attention.slices import bundle_limits
from headrace.runner.cpu.operations import CpuOperations
from headrace.runner.kv.input_batch import InputBatchBuilder
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.store import CpuPoolStore, Store
from headrace.runner.kv.view import LayerView

log = logging.getLogger("headrace.runner")

# Largest difference of an output of unit scale, by bytes of the dtype.
TOLERANCE = {4: 1e-4, 2: 3e-2}
_TIMED = [1, 70, 100, 200, 33, 350, 70, 1]
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class NativeChoice:
    """Attention and writes to use, or None for MLX's own; ``note`` says which and why."""

    kernel: NativeAttention | None
    store: Store | None
    note: str


def choose_native(
    operations: CpuOperations | None, found: ModelLayout, heads: int, softcap: float = 0.0
) -> NativeChoice:
    """Check and time native attention on the layers of a model; those without KV of their own are left out."""
    if operations is None:
        return NativeChoice(None, None, "reference attention: slices of head-major pools")
    windows = [group.window for group in found.layout.groups]
    forms = Counter(
        LayerForm(replace(layer, group=0), max(heads, layer.kv_heads), windows[layer.group], softcap)
        for layer in found.layers
        if layer.key_dim > 1
    )
    return _choose(NativeAttention(operations), operations, forms, found.layout.block_size)


def _choose(
    attention: NativeAttention, operations: CpuOperations, forms: Mapping[LayerForm, int], block_size: int
) -> NativeChoice:
    """``forms``: how many layers have each."""
    try:
        own = reference = 0.0
        for form, count in forms.items():
            fault = _fault(attention, form, block_size)
            if fault is not None:
                return NativeChoice(None, None, f"reference attention: {fault}")
            times = _times(attention, form, block_size)
            own, reference = own + count * times[0], reference + count * times[1]
    except (RuntimeError, ValueError, TypeError) as error:
        what = one_line(error)
        return NativeChoice(None, None, f"reference attention: native attention failed: {what}")
    layers = sum(forms.values())
    described = "; ".join(str(form) for form in forms)
    log.info("a layer's attention takes %.0f us, the reference %.0f", own / layers * 1e6, reference / layers * 1e6)
    if own > reference:
        return NativeChoice(None, None, f"reference attention: native attention is slower here ({described})")
    return NativeChoice(attention, CpuPoolStore.checked(operations), f"native paged attention ({described})")


def _fault(attention: NativeAttention, form: LayerForm, block_size: int) -> str | None:
    """Why native attention cannot serve ``form``."""
    layer = form.layer
    if form.heads % layer.kv_heads:
        return f"{form.heads} query heads cannot share {layer.kv_heads} KV heads evenly"
    ends = [1, block_size, block_size + 1, 5 * block_size - 3, 700, 33, 1]
    for new in ([1] * len(ends), [1, 3, block_size, 2 * block_size, 40, 33, 1]):
        case = Case.random(form, ends, new, block_size)
        for sinks in (None, mx.random.normal((form.heads,), layer.dtype, key=mx.random.key(3))):
            got, expected = case.run(attention, sinks), case.run(paged_attention, sinks)
            for row, count in enumerate(new):
                cut = mx.abs(got[row, :, :count].astype(mx.float32) - expected[row, :, :count].astype(mx.float32))
                worst = float(np.array(mx.max(cut)))
                if not worst <= TOLERANCE.get(layer.dtype.size, 3e-2):
                    return f"native attention's outputs differ by {worst:.3g} here ({form})"
    return None


def _times(attention: NativeAttention, form: LayerForm, block_size: int) -> tuple[float, float]:
    """Seconds of a decode of some rows, natively and by the reference, in turns; the best of some."""
    case = Case.random(form, _TIMED, [1] * len(_TIMED), block_size)
    best = [float("inf"), float("inf")]
    ways: tuple[Callable[..., mx.array], ...] = (attention, paged_attention)
    for _ in range(5):
        for place, attend in enumerate(ways):
            start = time.perf_counter()
            mx.eval([case.run(attend, None) for _ in range(3)])
            best[place] = min(best[place], (time.perf_counter() - start) / 3)
    return best[0], best[1]


@dataclass(frozen=True, slots=True)
class Case:
    """Queries ``[B, heads, L, key_dim]`` and one pool, seen by runs of slots and through block tables."""

    form: LayerForm
    queries: mx.array
    runs: LayerView
    tables: LayerView

    def run(self, attend: Callable[..., mx.array], sinks: mx.array | None) -> mx.array:
        view = self.tables if isinstance(attend, NativeAttention) else self.runs
        scale = self.form.layer.key_dim**-0.5
        return attend(self.queries, view, scale, self.form.window, sinks, self.form.softcap)

    @staticmethod
    def random(
        form: LayerForm, ends: Sequence[int], new: Sequence[int], block_size: int, store: Store | None = None
    ) -> Case:
        """Rows of ``ends`` positions, the last ``new`` of them this forward's, over a random pool."""
        rng = np.random.default_rng(0)
        counts = [-(-end // block_size) for end in ends]
        blocks = sum(counts) + 1
        layer: LayerShape = replace(form.layer, group=0)
        pool = KVPool([layer], [blocks], block_size, head_major=True, store=store)
        keys = mx.random.split(mx.random.key(0), 3)
        slots = blocks * block_size
        pool.write(
            0,
            mx.arange(slots, dtype=mx.int32),
            mx.random.normal((1, layer.kv_heads, slots, layer.key_dim), layer.dtype, key=keys[0]),
            mx.random.normal((1, layer.kv_heads, slots, layer.value_dim), layer.dtype, key=keys[1]),
        )
        mx.eval(pool.state)
        ids = iter(rng.permutation(np.arange(1, blocks)).tolist())
        rows = [
            _row(index, end, count, tuple(next(ids) for _ in range(blocks_of_row)))
            for index, (end, count, blocks_of_row) in enumerate(zip(ends, new, counts, strict=True))
        ]
        layout = KVLayout(block_size, (LayerGroup("checked", 1, layer.bytes_per_token, form.window),))
        length = max(new)
        by_runs = InputBatchBuilder(layout, slices=True, bundles=bundle_limits(pool)).build(rows, length)
        by_tables = InputBatchBuilder(layout, slices=False).build(rows, length)
        queries = mx.random.normal((len(ends), form.heads, length, layer.key_dim), layer.dtype, key=keys[2])
        return Case(form, queries, LayerView(pool, 0, by_runs), LayerView(pool, 0, by_tables))


def _row(index: int, end: int, count: int, table: tuple[int, ...]) -> ScheduledRow:
    return ScheduledRow(
        seq_id=index,
        start=end - count,
        num_tokens=count,
        token_ids=(0,) * count,
        block_tables=(table,),
        samples=True,
        sample_position=end,
        seed=0,
        params=_PARAMS,
        num_prompt_tokens=end,
    )
