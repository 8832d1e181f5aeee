"""Native attention of the CPU against attention written out in numpy, and a row against itself beside others."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reference_attention import PARAMS, SIZE, Case

from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.step import BlockCopy, ScheduledRow
from headrace.runner.attention.kernel_check import LayerForm
from headrace.runner.attention.native_attention import NativeAttention
from headrace.runner.attention.native_check import NativeChoice, _choose, choose_native
from headrace.runner.cpu.operations import CpuOperations, load_operations
from headrace.runner.kernels import native_extension
from headrace.runner.kv.input_batch import InputBatchBuilder
from headrace.runner.kv.layout import ModelLayout
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.store import CpuPoolStore
from headrace.runner.kv.view import LayerView

OPERATIONS = load_operations() if shutil.which("g++") else None
needs_operations = pytest.mark.skipif(OPERATIONS is None, reason="the native operations cannot be built here")


@pytest.fixture
def operations() -> CpuOperations:
    assert OPERATIONS is not None
    return OPERATIONS


def tables_view(case: Case, rows: list[int] | None = None, *, padded: int = 0) -> LayerView:
    """The case's rows, or some of them, through block tables; ``padded``: rows that mean nothing behind them."""
    layout = KVLayout(SIZE, (LayerGroup("g", 1, 1, case.window),))
    chosen = rows if rows is not None else list(range(len(case.ends)))
    scheduled = [
        ScheduledRow(
            seq_id=row,
            start=case.ends[row] - case.new[row],
            num_tokens=case.new[row],
            token_ids=(0,) * case.new[row],
            block_tables=(tuple(case.tables[row].tolist()),),
            samples=True,
            sample_position=case.ends[row],
            seed=0,
            params=PARAMS,
            num_prompt_tokens=case.ends[row],
        )
        for row in chosen
    ]
    length = max(case.new[row] for row in chosen)
    batch = InputBatchBuilder(layout, slices=False).build(scheduled, length, num_rows=len(chosen) + padded)
    return LayerView(case.pool, 0, batch)


def check(case: Case, operations: CpuOperations, *, sinks: bool = False) -> None:
    attend = NativeAttention(operations)
    view = tables_view(case)
    assert attend.supports(case.queries, view)
    out = attend(case.queries, view, case.scale, case.window, case.sinks if sinks else None)
    assert out.dtype == case.shape.dtype
    outputs = np.array(out.astype(mx.float32))
    bound = {4: 1e-4, 2: 0.03}[case.shape.dtype.size]
    for got, expected, count in zip(outputs, case.expected(sinks=sinks), case.new, strict=True):
        assert np.abs(got[:, :count] - expected).max() < bound
        assert not got[:, count:].any()  # pads


@needs_operations
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1000),
    shape=st.builds(
        LayerShape,
        st.just(0),
        st.sampled_from([1, 2, 3]),
        st.sampled_from([8, 20, 32, 64, 80, 96, 128, 192, 256]),
        st.sampled_from([8, 24, 64, 80, 128, 256]),
        st.sampled_from([mx.float32, mx.float32, mx.float16, mx.bfloat16]),
        st.sampled_from([None, 8, 4]),
    ),
    ends=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    decode=st.booleans(),
    shared=st.sampled_from([1, 3, 4, 7]),
    window=st.sampled_from([None, 1, 7, 30, 64, 100]),
    sinks=st.booleans(),
    scattered=st.booleans(),
)
def test_any_rows(
    seed: int,
    shape: LayerShape,
    ends: list[int],
    decode: bool,
    shared: int,
    window: int | None,
    sinks: bool,
    scattered: bool,
) -> None:
    assert OPERATIONS is not None
    rng = np.random.default_rng(seed)
    new = [1 if decode else int(rng.integers(1, end + 1)) for end in ends]
    heads = shape.kv_heads * shared
    case = Case(shape, ends, new, heads=heads, head_major=True, window=window, scattered=scattered, seed=seed)
    check(case, OPERATIONS, sinks=sinks)


@needs_operations
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("window", [None, 600])
def test_contexts_of_several_spans(operations: CpuOperations, bits: int | None, window: int | None) -> None:
    shape = LayerShape(0, 2, 64, 64, mx.float32, bits)
    for ends, new in (([1500, 511, 512, 513, 3], [1] * 5), ([1500, 700, 1100], [300, 1, 513])):
        for sinks in (False, True):
            check(Case(shape, ends, new, heads=6, head_major=True, window=window), operations, sinks=sinks)


@needs_operations
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("ends", [[70, 3, 1200, 64, 65], [9, 9]])
def test_a_row_does_not_depend_on_others(operations: CpuOperations, bits: int | None, ends: list[int]) -> None:
    """Bit for bit: alone, beside others, beside padding; and the last tokens of a prefill as decode rows."""
    case = Case(LayerShape(0, 2, 64, 96, mx.float32, bits), ends, [1] * len(ends), heads=10, head_major=True)
    attend = NativeAttention(operations)
    together = np.array(attend(case.queries, tables_view(case), case.scale, None))
    padding = mx.zeros((3, *case.queries.shape[1:]))
    padded = attend(mx.concatenate([case.queries, padding]), tables_view(case, padded=3), case.scale, None)
    assert np.array_equal(np.array(padded)[: len(ends)], together)
    for row in range(len(ends)):
        alone = attend(case.queries[row : row + 1], tables_view(case, [row]), case.scale, None)
        assert np.array_equal(np.array(alone)[0], together[row])


@needs_operations
def test_a_token_is_the_same_in_a_prefill_and_alone(operations: CpuOperations) -> None:
    case = Case(LayerShape(0, 1, 64, 64, mx.float32), [700], [120], heads=3, head_major=True)
    attend = NativeAttention(operations)
    whole = np.array(attend(case.queries, tables_view(case), case.scale, None))
    last = case.queries[:, :, -1:]
    case.new = [1]
    assert np.array_equal(np.array(attend(last, tables_view(case), case.scale, None))[:, :, 0], whole[:, :, -1])


@needs_operations
def test_capped_scores(operations: CpuOperations) -> None:
    case = Case(LayerShape(0, 2, 32, 64, mx.float32), [40, 90], [1, 5], heads=4, head_major=True)
    case.queries = case.queries * 8
    keys, values = case.held()
    out = np.array(NativeAttention(operations)(case.queries, tables_view(case), case.scale, None, None, 5.0))
    for row, (end, count, table) in enumerate(zip(case.ends, case.new, case.tables, strict=True)):
        slots = (table[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:end]
        k, v = (np.repeat(x[:, slots], 2, axis=0) for x in (keys, values))
        queries = np.array(case.queries).astype(np.float64)[row, :, :count]
        scores = 5.0 * np.tanh(queries @ k.swapaxes(1, 2) * case.scale / 5.0)
        weights = np.exp(np.where(np.arange(end) > np.arange(end - count, end)[:, None], -np.inf, scores))
        assert np.abs(out[row, :, :count] - weights @ v / weights.sum(-1, keepdims=True)).max() < 1e-4


@needs_operations
def test_large_scores_stay_finite_and_nan_stays_nan(operations: CpuOperations) -> None:
    case = Case(LayerShape(0, 1, 64, 64, mx.float32), [90], [90], heads=2, head_major=True)
    attend, view = NativeAttention(operations), tables_view(case)
    assert np.isfinite(np.array(attend(case.queries * 300, view, case.scale, None))).all()
    assert np.isnan(np.array(attend(case.queries * mx.nan, view, case.scale, None))).all()


@needs_operations
def test_inside_a_compiled_function(operations: CpuOperations) -> None:
    case = Case(LayerShape(0, 2, 64, 64, mx.float32), [60, 3], [1, 1], heads=4, head_major=True)
    attend, view = NativeAttention(operations), tables_view(case)
    compiled = mx.compile(lambda queries: 2 * attend(queries * 1, view, case.scale, None))
    assert np.array_equal(
        np.array(compiled(case.queries)), 2 * np.array(attend(case.queries, view, case.scale, None))
    )


# -- writes in place ---------------------------------------------------------------------------------------


@needs_operations
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_writes_in_place_are_the_functional_ones(operations: CpuOperations, bits: int | None) -> None:
    layer = LayerShape(0, 2, 80, 64, mx.float32, bits)
    store = CpuPoolStore.checked(operations)
    assert store is not None
    pools = [KVPool([layer], [6], SIZE, head_major=True, store=one) for one in (None, store)]
    before = list(pools[1].state)
    keys, values = mx.random.normal((2, 2, 3, 80)), mx.random.normal((2, 2, 3, 64))
    slots = mx.array([4, 5, 6, 20, 1, 9], mx.int32)
    for pool in pools:
        pool.write(0, slots, keys, values)
        pool.copy_blocks([BlockCopy(0, 1, 3), BlockCopy(0, 3, 2)])
        pool.write(0, slots[:3], values[:1, :, :, :1] + mx.zeros((1, 2, 3, 80)), keys[1:, :, :, :64])
        mx.eval(pool.changes)
    for wanted, got, old in zip(pools[0].state, pools[1].state, before, strict=True):
        assert got is old
        assert np.array_equal(np.array(wanted), np.array(got))


@needs_operations
def test_attention_sees_the_write_of_its_own_step(operations: CpuOperations) -> None:
    """Queued, not evaluated one by one: each read comes after the write before it."""
    layer = LayerShape(0, 1, 64, 64, mx.float32)
    pool = KVPool([layer], [40], SIZE, head_major=True, store=CpuPoolStore(operations))
    attend, outputs = NativeAttention(operations), []
    layout = KVLayout(SIZE, (LayerGroup("g", 1, 1, None),))
    for position in range(100):
        row = ScheduledRow(
            seq_id=0,
            start=position,
            num_tokens=1,
            token_ids=(0,),
            block_tables=(tuple(range(1, position // SIZE + 2)),),
            samples=True,
            sample_position=position + 1,
            seed=0,
            params=PARAMS,
            num_prompt_tokens=1,
        )
        batch = InputBatchBuilder(layout, slices=False).build([row], 1)
        ones = mx.ones((1, 1, 1, 64))
        pool.write(0, batch.groups[0].slots, 0 * ones, position * ones)
        outputs.append(attend(ones, LayerView(pool, 0, batch), 1.0, None)[0, 0, 0, 0])
        mx.async_eval(outputs[-1])
    assert np.allclose(np.array(mx.stack(outputs)), np.arange(100) / 2)


# -- the choice at start -----------------------------------------------------------------------------------


def layout_of(layer: LayerShape, window: int | None = None) -> ModelLayout:
    return ModelLayout((layer,), KVLayout(16, (LayerGroup("g", 1, layer.bytes_per_token, window),)))


def chosen(operations: CpuOperations | None, layer: LayerShape, window: int | None = None) -> NativeChoice:
    return choose_native(operations, layout_of(layer, window), 6)


@needs_operations
@pytest.mark.parametrize("bits", [None, 8])
def test_the_choice_names_what_runs(operations: CpuOperations, bits: int | None) -> None:
    choice = chosen(operations, LayerShape(0, 2, 64, 64, mx.float32, bits), 50)
    assert choice.kernel is not None or "slower" in choice.note  # a busy machine may make it look so
    assert "6 heads over 2 of 64" in choice.note


def test_without_operations_the_reference_runs() -> None:
    choice = chosen(None, LayerShape(0, 2, 64, 64, mx.float32))
    assert choice.kernel is None and choice.store is None and choice.note.startswith("reference attention")


@needs_operations
def test_wrong_outputs_are_not_used(operations: CpuOperations) -> None:
    class Wrong(NativeAttention):
        def __call__(self, *args: object, **kwargs: object) -> mx.array:
            return super().__call__(*args, **kwargs) * 1.01  # type: ignore[arg-type]

    form = LayerForm(LayerShape(0, 2, 64, 64, mx.float32), 6, None)
    choice = _choose(Wrong(operations), operations, {form: 1}, 16)
    assert choice.kernel is None and "differ by" in choice.note


def test_a_machine_that_cannot_build(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise native_extension.ExtensionError("g++ is missing")

    monkeypatch.setattr(native_extension, "load", missing)
    assert load_operations() is None
    assert "g++ is missing" in caplog.text
