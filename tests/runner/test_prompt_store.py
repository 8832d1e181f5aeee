"""The kernel between a prompt's product and its attention, its CUDA form run on the CPU, beside MLX's operations.

Norms, rotation and packing themselves are held against definitions in ``test_store_form.py`` and
``test_packed_store.py``; here: several tokens per row, each at its position and slot.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated_cuda import emulated
from paged_driver import Driver, make_runner
from test_decoder_block import FunctionalRotate, model_with
from tiny_models import VOCAB

from headrace.params import SamplingParams
from headrace.runner.attention import gathered_prefill, rotate_store
from headrace.runner.attention.dispatch import install
from headrace.runner.attention.rotate_store import RotarySpec, RotateAndStore
from headrace.runner.kernels.language import CUDA_NAMES
from headrace.runner.kv.pool import KVPool, LayerShape
from headrace.runner.kv.store import PoolStore
from headrace.runner.kv.view import ForwardBatch, GroupBatch, LayerView, PagedMask
from headrace.runner.model_runner import RunnerOptions
from headrace.runner.products import row_operations
from headrace.runner.products.choice import SmallRowsKernel
from headrace.runner.products.row_operations import RowKernels
from headrace.runner.products.small_rows import plain_product
from headrace.runner.substitutions import block_check
from headrace.runner.substitutions.block_check import PROMPTS, Tokens, compare
from headrace.runner.substitutions.decoder_block import FusedBlock, attention_parts, dense_feed_forward
from headrace.runner.substitutions.fused_linear import fuse_projections

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
HEADS, KV, BLOCK = 4, 2, 32
Starts = tuple[int, ...]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def view_of(layer: LayerShape, store: PoolStore | None, starts: Starts, lengths: Starts, padded: int) -> LayerView:
    """Rows over a pool of ones, their tokens at scattered slots; pads in the null block, all rows' at the same."""
    pool = KVPool([layer], [9], BLOCK, head_major=False, store=store)
    pool.state = [mx.ones_like(array) for array in pool.state]
    mx.eval(pool.state)
    free = iter(np.random.default_rng(0).permutation(np.arange(BLOCK, 9 * BLOCK)).tolist())
    slots = [[next(free) if at < count else at % BLOCK for at in range(padded)] for count in lengths]
    offsets = mx.array(starts, mx.int32)
    ends = offsets + mx.array(lengths, mx.int32)
    group = GroupBatch(None, mx.array(slots, mx.int32).reshape(-1))
    return LayerView(pool, 0, ForwardBatch(offsets, ends, starts, lengths, [group]))


def spec_of(dim: int, dtype: mx.Dtype) -> RotarySpec:
    """Widths stand for forms: 64 rotates half of its elements, 80 and 128 are normalized, 96 is traditional."""
    rotated = 32 if dim == 64 else dim
    norms = [mx.random.normal((dim,), key=mx.random.key(seed)).astype(dtype) for seed in (1, 2)]
    q_norm, k_norm = norms if dim in (80, 128) else (None, None)
    frequencies = 1000.0 ** (-mx.arange(rotated // 2) * 2 / rotated)
    return RotarySpec(HEADS, KV, dim, frequencies, rotated, dim == 96, 0.5, q_norm, k_norm, 1e-5)


def widely(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def own_tokens(array: mx.array, lengths: Starts) -> list[np.ndarray]:
    """Of ``[B, heads, L, D]`` what is not padding, row by row."""
    return [widely(array[row, :, :count]) for row, count in enumerate(lengths)]


CASES = [
    *((dim, mx.bfloat16, starts) for dim in (40, 64, 80, 96, 128, 288) for starts in ((0, 0, 0), (0, 700, 31))),
    (128, mx.float16, (5, 0, 9)),
    (64, mx.float32, (0, 0, 0)),
]
LENGTHS, PADDED = (8, 3, 5), 8


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize(("dim", "dtype", "starts"), CASES, ids=str)
def test_tokens_are_rotated_and_stored(
    dim: int, dtype: mx.Dtype, starts: Starts, bits: int | None, compiled: Path
) -> None:
    """Queries, and what a reader finds in the pool; prompts with nothing before them also get keys and values."""
    make = emulated(compiled)
    store, spec = PoolStore(make, CUDA_NAMES), spec_of(dim, dtype)
    layer = LayerShape(0, KV, dim, dim, dtype, bits)
    views = [view_of(layer, one, starts, LENGTHS, PADDED) for one in (store, None)]
    qkv = mx.random.normal((3 * PADDED, (HEADS + 2 * KV) * dim), key=mx.random.key(dim)).astype(dtype)
    got, wanted = RotateAndStore(make, CUDA_NAMES)(qkv, views[0], spec), FunctionalRotate()(qkv, views[1], spec)
    bound = {4: 3e-4, 2: 2.0**-6}[dtype.size] * max(1.0, float(np.abs(widely(wanted)).max()))
    assert got.shape == wanted.shape == (3, HEADS, PADDED, dim) and got.dtype == dtype
    for one, other in zip(own_tokens(got, LENGTHS), own_tokens(wanted, LENGTHS), strict=True):
        assert np.abs(one - other).max() < bound
    is_new = bits is None and not any(starts)
    assert (views[0].new is not None) == is_new
    if is_new:
        assert views[0].new is not None and views[1].new is not None
        for given, usual in zip(views[0].new, views[1].new, strict=True):
            for one, other in zip(own_tokens(given, LENGTHS), own_tokens(usual, LENGTHS), strict=True):
                assert np.abs(one - other).max() < bound
    pools = [[stored(view, name) for name in ("key", "value")] for view in views]
    slots = np.array(views[0].group.slots)
    written = set(slots[slots >= BLOCK].tolist())
    others = [slot for slot in range(BLOCK, 9 * BLOCK) if slot not in written]
    for own, usual in zip(*pools, strict=True):
        step = 0.0 if bits is None else 8.0 / (2**bits - 1)
        assert np.abs(own[sorted(written)] - usual[sorted(written)]).max() < bound + 2 * step
        assert np.array_equal(own[others], usual[others])
    assert not np.array(views[0].pool.marks[0]).any()


def stored(view: LayerView, which: str) -> np.ndarray:
    """``[slots, KV, D]`` of the pool as it is read."""
    pool, layer = view.pool, view.pool.layers[0]
    keys = which == "key"
    packing, array = layer.key_packing, (pool.keys if keys else pool.values)[0]
    if packing is None:
        return widely(array)
    scales, biases = (pool.key_affine if keys else pool.value_affine)[0]
    codes = mx.dequantize(array, scales, biases, group_size=packing.group_size, bits=packing.bits)
    return widely(codes[..., : layer.key_dim])


@pytest.mark.parametrize("bits", [None, 4])
def test_tokens_of_a_prompt_are_those_of_steps(bits: int | None, compiled: Path) -> None:
    """Bit for bit: a position has the same keys, values and queries, however it is computed."""
    make = emulated(compiled)
    store, rotate, spec = PoolStore(make, CUDA_NAMES), RotateAndStore(make, CUDA_NAMES), spec_of(80, mx.bfloat16)
    layer = LayerShape(0, KV, 80, 80, mx.bfloat16, bits)
    qkv = mx.random.normal((8, (HEADS + 2 * KV) * 80)).astype(mx.bfloat16)
    for starts in ((0,), (1000,)):
        whole = view_of(layer, store, starts, (8,), 8)
        queries = rotate(qkv, whole, spec)
        single = LayerView(view_of(layer, store, starts, (8,), 8).pool, 0, whole.batch)
        for at in range(8):
            group = GroupBatch(None, whole.group.slots[at : at + 1])
            offset = mx.array([starts[0] + at], mx.int32)
            single.batch = ForwardBatch(offset, offset + 1, [starts[0] + at], [1], [group])
            assert bool(mx.array_equal(rotate(qkv[at : at + 1], single, spec), queries[:, :, at : at + 1]))
        assert all(bool(mx.array_equal(a, b)) for a, b in zip(whole.pool.state, single.pool.state, strict=True))


def test_planned_shapes_repeat_what_is_there(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows and positions than the forward has: finite, and nothing of them is stored."""
    monkeypatch.setattr(rotate_store, "planned_shape", lambda *form: (4, 16))
    make = emulated(compiled)
    store, spec = PoolStore(make, CUDA_NAMES), spec_of(64, mx.bfloat16)
    layer = LayerShape(0, KV, 64, 64, mx.bfloat16)
    views = [view_of(layer, one, (0, 0, 0), (8, 8, 8), 8) for one in (store, None)]
    qkv = mx.random.normal((24, (HEADS + 2 * KV) * 64)).astype(mx.bfloat16)
    got = RotateAndStore(make, CUDA_NAMES)(qkv, views[0], spec)
    wanted = FunctionalRotate()(qkv, views[1], spec)
    assert views[0].new is not None and views[1].new is not None
    for given, usual in ((got, wanted), *zip(views[0].new, views[1].new, strict=True)):
        assert given.shape == (4, usual.shape[1], 16, 64)
        whole, exact = widely(given), widely(usual)
        assert np.abs(whole[:3, :, :8] - exact).max() < 0.03
        assert np.array_equal(whole[:3, :, 8:], np.repeat(whole[:3, :, 7:8], 8, axis=2))
        assert np.array_equal(whole[3], whole[0])
    for own, usual in zip(views[0].pool.state, views[1].pool.state, strict=True):
        assert np.abs(widely(own) - widely(usual)).max() < 0.03


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_prompts_of_a_block_of_kernels_are_the_unmodified_blocks(
    name: str, bits: int | None, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = emulated(compiled)
    monkeypatch.setattr(row_operations, "cuda_kernel", make)
    install(None)
    model = model_with(name, head_dim=32) if name != "qwen2" else model_with(name)
    if bits is not None and name == "qwen2":
        pytest.skip("its heads are too narrow to be packed")
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    module = model.model.layers[0]
    attention, feed_forward = attention_parts(module), dense_feed_forward(module)
    assert attention is not None and feed_forward is not None
    products = SmallRowsKernel(plain_product, beside=RowKernels())
    block = FusedBlock(module, attention, feed_forward, products, RotateAndStore(make, CUDA_NAMES))
    store = PoolStore(make, CUDA_NAMES)
    assert compare(block, store, tokens=PROMPTS[0], bits=bits) == "the pools are not ones that blocks write to"
    block.prompts = True
    assert [compare(block, store, tokens=tokens, bits=bits) for tokens in PROMPTS] == [None, None]


VIEWS = {"Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unflatten"}


def one_operation(shapes: list[tuple[int, ...]], dtypes: list[mx.Dtype], inputs: list[mx.array]) -> list[mx.array]:
    """Stands for a kernel in a graph: a single operation of ``inputs``, whatever its results."""
    outputs = [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    mx.eval(outputs)
    return mx.depends(outputs, inputs)  # type: ignore[no-any-return]


def counted_kernel(**_made: Any) -> Any:
    def run(*, inputs: Any, output_shapes: Any, output_dtypes: Any, **_launch: Any) -> list[mx.array]:
        return one_operation(output_shapes, output_dtypes, inputs)

    return run


def like(x: mx.array, *others: Any, **named: Any) -> mx.array:
    """Stands for MLX's norm, rotation or attention, which are graphs of their own on a CPU."""
    arrays = [value for value in (*others, *named.values()) if isinstance(value, mx.array)]
    return one_operation([x.shape], [x.dtype], [x, *arrays])[0]


def operations(out: mx.array, folder: Path) -> tuple[Counter[str], Counter[str]]:
    """What a graph computes, and what it only looks at in another shape."""
    path = folder / "graph.dot"
    mx.export_to_dot(str(path), out)
    found = Counter(re.findall(r'label ?= ?"(\w+)", shape ?= ?rectangle', path.read_text()))
    views = Counter({name: count for name, count in found.items() if name in VIEWS})
    return found - views, views


@pytest.mark.parametrize(("lengths", "padding"), [((96, 96), 0), ((85, 50), 3)])
@pytest.mark.parametrize(("name", "norms"), [("llama", 0), ("qwen3", 2)])
def test_a_layer_of_a_prompt_is_nine_operations(
    name: str,
    norms: int,
    lengths: tuple[int, int],
    padding: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norm, product, rotation and store, attention, product, norm, product, gate, product; one more that only
    orders attention behind the write. The unmodified block also has two rotations, head norms, two additions, and
    what pads a prompt to a length that attention is planned for; views that are copied are not counted."""
    install(None)
    model = model_with(name, head_dim=32)
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    monkeypatch.setattr(row_operations, "cuda_kernel", counted_kernel)
    monkeypatch.setattr(gathered_prefill, "shape_grid", lambda context: 256)
    monkeypatch.setattr(gathered_prefill, "is_fused", lambda dtype, *dims: True)
    for operation in ("rms_norm", "rope", "scaled_dot_product_attention"):
        monkeypatch.setattr(mx.fast, operation, like)
    module = model.model.layers[0]
    attention, feed_forward = attention_parts(module), dense_feed_forward(module)
    assert attention is not None and feed_forward is not None
    products = SmallRowsKernel(plain_product, beside=RowKernels())
    block = FusedBlock(module, attention, feed_forward, products, RotateAndStore(counted_kernel, CUDA_NAMES))
    block.prompts = True
    store, tokens = PoolStore(counted_kernel, CUDA_NAMES), Tokens((0, 0), lengths, 128 if not padding else 96)
    found = []
    for by in (block, block.inner):
        x, view = block_check._input(block, tokens), block_check._view(block, store, tokens, None)
        mx.eval(x, view.pool.marks, view.group.slots, model.parameters())
        found.append(operations(by(x, PagedMask(None), cache=view), tmp_path))
    assert [sum(computed.values()) for computed, _ in found] == [9 + 1, 13 + 1 + norms + padding]
    assert sum(found[0][1].values()) < sum(found[1][1].values())


@pytest.mark.parametrize("samples", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_a_chunk_that_is_not_the_last_ends_with_the_write(
    samples: bool, traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its last layer norm, product and write are computed, nothing behind them."""
    model = model_with("llama")
    model.set_dtype(mx.bfloat16)
    fuse_projections(model)
    monkeypatch.setattr(mx.fast, "rms_norm", like)
    rotate = RotateAndStore(counted_kernel, CUDA_NAMES)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        attention, feed_forward = attention_parts(layer), dense_feed_forward(layer)
        assert attention is not None and feed_forward is not None
        block = FusedBlock(layer, attention, feed_forward, SmallRowsKernel(plain_product), rotate)
        block.prompts, layers[index] = True, block
    runner, layout = make_runner(
        model,
        vocab_size=VOCAB,
        head_major=False,
        options=RunnerOptions(compile=traced, trace_prompts=traced),
        store=PoolStore(counted_kernel, CUDA_NAMES),
    )
    row = Driver(runner, layout, 400).add(list(range(1, 300)), SamplingParams(max_tokens=1, temperature=0.0))
    chunk = msgspec.structs.replace(Driver(runner, layout, 400).row(row, 200), samples=samples)
    for _ in range(3 if traced else 1):
        mx.eval(runner._pool.changes)
        runner.prefill_logits([chunk])
    computed, _ = operations(runner._forwards[-1][0], tmp_path)
    products = computed["Matmul"] + computed["AddMM"] - 2 * computed["Softmax"]
    assert computed["Softmax"] == len(layers) - (not samples)
    assert products == 4 * len(layers) + 1 if samples else products == 4 * len(layers) - 3
