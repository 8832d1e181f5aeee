"""Reference attention against attention written out in numpy: layouts, dtypes, packed KV, windows, sinks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.step import ScheduledRow
from headrace.params import SamplingParams
from headrace.runner.attention import gather, slices
from headrace.runner.attention.reference import materialize, materialized_mask, paged_attention, scratch_bytes
from headrace.runner.kv.input_batch import InputBatchBuilder
from headrace.runner.kv.packing import Packed
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.view import ForwardBatch, GroupBatch, LayerView

SIZE = 4
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class Case:
    """Rows with random KV in a pool, and queries of their last positions."""

    def __init__(
        self,
        shape: LayerShape,
        ends: list[int],
        new: list[int],
        *,
        heads: int,
        head_major: bool,
        window: int | None = None,
        scattered: bool = True,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.shape, self.ends, self.new, self.window = shape, ends, new, window
        counts = [-(-end // SIZE) for end in ends]
        blocks = 1 + sum(counts)
        self.pool = KVPool([shape], [blocks], SIZE, head_major=head_major)
        ids = rng.permutation(np.arange(1, blocks)) if scattered else np.arange(1, blocks)
        # The null block and the slots behind a row's end are NaN, as a failed row leaves them.
        slots = blocks * SIZE
        keys = mx.array(rng.normal(size=(1, shape.kv_heads, slots, shape.key_dim))).astype(shape.dtype)
        values = mx.array(rng.normal(size=(1, shape.kv_heads, slots, shape.value_dim))).astype(shape.dtype)
        self.tables = np.split(ids, np.cumsum(counts)[:-1])
        owned = np.zeros((1, 1, slots, 1), bool)
        for end, table in zip(ends, self.tables, strict=True):
            owned[:, :, (table[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:end]] = True
        keys, values = (mx.where(mx.array(owned), x, mx.nan).astype(shape.dtype) for x in (keys, values))
        self.pool.write(0, mx.arange(slots), keys, values)
        length = max(new)
        layout = KVLayout(SIZE, (LayerGroup("g", 1, 1, window),))
        rows = [
            ScheduledRow(
                seq_id=index,
                start=end - count,
                num_tokens=count,
                token_ids=(0,) * count,
                block_tables=(tuple(table.tolist()),),
                samples=True,
                sample_position=end,
                seed=0,
                params=PARAMS,
                num_prompt_tokens=end,
            )
            for index, (end, count, table) in enumerate(zip(ends, new, self.tables, strict=True))
        ]
        limits = slices.bundle_limits(self.pool) if head_major else None
        self.batch = InputBatchBuilder(layout, slices=head_major, bundles=limits).build(rows, length)
        self.view = LayerView(self.pool, 0, self.batch)
        self.scale = shape.key_dim**-0.5
        self.queries = mx.array(rng.normal(size=(len(ends), heads, length, shape.key_dim))).astype(shape.dtype)
        self.sinks = mx.array(rng.normal(size=heads)).astype(shape.dtype)

    def held(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values ``[kv_heads, slots, dim]`` as the pool holds them, unpacked."""
        found = []
        for array, affine, packing in (
            (self.pool.keys[0], self.pool.key_affine[0], self.shape.key_packing),
            (self.pool.values[0], self.pool.value_affine[0], self.shape.value_packing),
        ):
            x = array if packing is None else packing.unpack(Packed(array, *affine), mx.float32)
            x = x.astype(mx.float32)
            found.append(np.array(x if self.pool.head_major else x.swapaxes(0, 1)).astype(np.float64))
        return found[0], found[1]

    def expected(self, *, sinks: bool = False) -> list[np.ndarray]:
        """Per row ``[heads, new, value_dim]``, in float64."""
        keys, values = self.held()
        queries = np.array(self.queries.astype(mx.float32)).astype(np.float64)
        logits = np.array(self.sinks.astype(mx.float32)).astype(np.float64)
        rows = []
        for row, (end, count, table) in enumerate(zip(self.ends, self.new, self.tables, strict=True)):
            slots = (table[:, None] * SIZE + np.arange(SIZE)).reshape(-1)[:end]
            shared = queries.shape[1] // keys.shape[0]
            k, v = (np.repeat(x[:, slots], shared, axis=0) for x in (keys, values))
            scores = queries[row, :, :count] @ k.swapaxes(1, 2) * self.scale
            position = np.arange(end - count, end)[:, None]
            hidden = np.arange(end)[None] > position
            if self.window is not None:
                hidden |= np.arange(end)[None] <= position - self.window
            weights = np.exp(np.where(hidden, -np.inf, scores))
            total = weights.sum(-1, keepdims=True) + (np.exp(logits)[:, None, None] if sinks else 0)
            rows.append(weights @ v / total)
        return rows

    def check(self, *, sinks: bool = False, tolerance: float | None = None) -> None:
        out = paged_attention(self.queries, self.view, self.scale, self.window, self.sinks if sinks else None)
        assert out.dtype == self.shape.dtype
        bound = tolerance or {4: 1e-4, 2: 0.03}[self.shape.dtype.size]
        outputs = np.array(out.astype(mx.float32))
        for got, expected, count in zip(outputs, self.expected(sinks=sinks), self.new, strict=True):
            assert np.abs(got[:, :count] - expected).max() < bound


SHAPES = st.builds(
    LayerShape,
    st.just(0),
    st.sampled_from([1, 2]),
    st.sampled_from([32, 64, 80, 128]),
    st.sampled_from([64, 96]),
    st.sampled_from([mx.float32, mx.float16, mx.bfloat16]),
    st.sampled_from([None, 8, 4]),
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    shape=SHAPES,
    ends=st.lists(st.integers(1, 70), min_size=1, max_size=7),
    decode=st.booleans(),
    shared=st.sampled_from([1, 3]),
    head_major=st.booleans(),
    window=st.sampled_from([None, 1, 7, 30]),
    sinks=st.booleans(),
    scattered=st.booleans(),
)
def test_any_rows(
    seed: int,
    shape: LayerShape,
    ends: list[int],
    decode: bool,
    shared: int,
    head_major: bool,
    window: int | None,
    sinks: bool,
    scattered: bool,
) -> None:
    rng = np.random.default_rng(seed)
    new = [1 if decode else int(rng.integers(1, end + 1)) for end in ends]
    heads = shape.kv_heads * shared
    case = Case(
        shape, ends, new, heads=heads, head_major=head_major, window=window, scattered=scattered, seed=seed
    )
    case.check(sinks=sinks)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("new", [[1, 1, 1], [90, 1, 300], [17, 33, 64]])
def test_many_small_tiles(
    monkeypatch: pytest.MonkeyPatch, bits: int | None, head_major: bool, window: int | None, new: list[int]
) -> None:
    monkeypatch.setattr(slices, "READ_BYTES", 1)
    monkeypatch.setattr(slices, "KEY_TILE", 64)
    monkeypatch.setattr(slices, "SCORE_BYTES", 16 * 1024)
    monkeypatch.setattr(gather, "GATHER_BYTES", 32 * 1024)
    monkeypatch.setattr(gather, "SCORE_BYTES", 16 * 1024)
    shape = LayerShape(0, 2, 64, 64, mx.float32, bits)
    for sinks in (False, True):
        Case(shape, [200, 37, 300], new if new[0] != 90 else [90, 37, 300], heads=4, head_major=head_major,
             window=window).check(sinks=sinks)  # fmt: skip


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("scattered", [True, False])
def test_one_query_over_many_positions(bits: int | None, scattered: bool) -> None:
    """Above and below the number of scores from which on the compiled exponential is used."""
    shape = LayerShape(0, 2, 64, 64, mx.float32, bits)
    for end in (2047, 2048, 2049, 3000):
        case = Case(shape, [end], [1], heads=4, head_major=True, scattered=scattered)
        case.check()
        case.queries = case.queries * 300
        assert np.isfinite(np.array(paged_attention(case.queries, case.view, case.scale, None))).all()


def test_large_scores_and_equal_keys() -> None:
    """Exponentials relative to the largest score: nothing overflows, nothing becomes NaN."""
    for head_major in (True, False):
        case = Case(LayerShape(0, 1, 64, 64, mx.float32), [90], [90], heads=2, head_major=head_major)
        case.queries = case.queries * 300
        out = paged_attention(case.queries, case.view, case.scale, None)
        assert np.isfinite(np.array(out)).all()


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, 8])
def test_a_compiled_forward_knows_lengths_on_the_device_only(
    monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    shape = LayerShape(0, 2, 64, 64, mx.float32, bits)
    for limit in (gather.GATHER_BYTES, 1024):
        monkeypatch.setattr(gather, "GATHER_BYTES", limit)
        case = Case(shape, [60, 3, 33], [1, 1, 1], heads=4, head_major=False)

        def run(queries: mx.array, tables: mx.array, bases: mx.array, offsets: mx.array, case: Case) -> mx.array:
            group = GroupBatch(None, mx.zeros(3, mx.int32), tables=tables, bases=bases)
            batch = ForwardBatch(offsets, offsets + 1, (), (), [group])
            return paged_attention(queries, LayerView(case.pool, 0, batch), case.scale, None)

        group = case.batch.groups[0]
        compiled = mx.compile(lambda q, t, b, o, case=case: run(q, t, b, o, case))
        out = np.array(compiled(case.queries, group.tables, group.bases, case.batch.offsets))
        for got, expected in zip(out, case.expected(), strict=True):
            assert np.abs(got - expected).max() < 1e-4


@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize("bits", [None, 4])
def test_materialized_rows(head_major: bool, bits: int | None) -> None:
    shape = LayerShape(0, 2, 80, 64, mx.float32, bits)
    case = Case(shape, [30, 9], [5, 9], heads=2, head_major=head_major, window=12)
    keys, values = materialize(case.view)
    mask = materialized_mask(case.view, 9, 12)
    scores = mx.where(mask, case.queries @ keys.swapaxes(-1, -2) * case.scale, -mx.inf)
    out = np.array(mx.softmax(scores, axis=-1) @ values)
    for got, expected, count in zip(out, case.expected(), case.new, strict=True):
        assert np.abs(got[:, :count] - expected).max() < 1e-4


def peak(case: Case) -> int:
    mx.eval(case.queries, case.pool.state)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(paged_attention(case.queries, case.view, case.scale, case.window))
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("count", [1, 300])
def test_scratch_of_slices_is_bounded(bits: int | None, count: int) -> None:
    """One forward over 9,000 positions: scores would be 43 MB, the unpacked context of a row 18 MB."""
    shape = LayerShape(0, 4, 64, 64, mx.float32, bits)
    ends = [9000] if count > 1 else [9000, 9000, 9000, 9000]
    case = Case(shape, ends, [count] * len(ends), heads=4, head_major=True, scattered=False)
    own = 6 * case.queries.nbytes  # scaled queries and the running sums are activations
    assert peak(case) < scratch_bytes(head_major=True) + own


def test_gather_holds_no_more_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long row next to short ones costs what it is, not the length of all."""
    monkeypatch.setattr(gather, "GATHER_BYTES", 4 << 20)
    monkeypatch.setattr(gather, "SCORE_BYTES", 1 << 20)
    shape = LayerShape(0, 4, 64, 64, mx.float32)
    case = Case(shape, [8000, *[5] * 15], [1] * 16, heads=4, head_major=False)
    assert peak(case) < 2 * (4 << 20) + 3 * (1 << 20)
