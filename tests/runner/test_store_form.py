"""The Metal forms of the kernels that write pools, compiled as C++ against a shim and run on the CPU.

See ``test_metal_form.py``: sound C++, right indices and barriers; not run on Metal. Expected values come from MLX.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from headrace.runner.attention import rotate_store_source
from headrace.runner.kernels.language import METAL_NAMES
from headrace.runner.kv import store as pool_store
from headrace.runner.kv.packing import VectorPacking

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
TOLERANCE = 3e-4  # float32 angles of some hundred radians
SHIM = Path(__file__).parent / "metal_shim" / "shim.hpp"


def compiled(lines: list[str], folder: Path) -> ctypes.CDLL:
    path, library = folder / "kernel.cpp", folder / "kernel.so"
    path.write_text("\n".join([f'#include "{SHIM}"', "using namespace metal;", *lines]))
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-o", str(library), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return ctypes.CDLL(str(library))


def pointers(*arrays: np.ndarray) -> list[ctypes.c_void_p]:
    return [array.ctypes.data_as(ctypes.c_void_p) for array in arrays]


@pytest.mark.parametrize("count", [2, 4])
def test_stores_rows_and_nothing_else(count: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    widths = [16, 300, 8, 1][:count]
    pools = [rng.normal(size=(12, width)).astype(np.float32) for width in widths]
    rows = [rng.normal(size=(3, width)).astype(np.float32) for width in widths]
    slots, mark, after = np.array([11, 0, 4], np.int32), np.zeros(1, np.int32), np.ones(1, np.int32)
    names = [*(f"p{i}" for i in range(count)), *(f"r{i}" for i in range(count))]
    inputs = ", ".join([*(f"const T* {name}" for name in names), "const int* slots, const int* mark"])
    arguments = ", ".join([*names, "slots", "mark"])
    threads = pool_store.THREADS
    library = compiled(
        [
            METAL_NAMES,
            "using T = float;",
            "constexpr int MARKS = 1;",
            *(f"constexpr int W{i} = {width};" for i, width in enumerate(widths)),
            f"void kernel({inputs}, int* after) {{ {pool_store.store_source(count)} }}",
            f'extern "C" void run({inputs}, int* after) {{',
            f"  shim::launch({{3 * {threads}, 1, 1}}, {threads}, [&] {{ kernel({arguments}, after); }}); }}",
        ],
        tmp_path,
    )
    expected = [pool.copy() for pool in pools]
    for pool, new in zip(expected, rows, strict=True):
        pool[slots] = new
    library.run(*pointers(*pools, *rows, slots, mark, after))
    assert all(np.array_equal(pool, wanted) for pool, wanted in zip(pools, expected, strict=True))
    assert after[0] == 0


CASES = [
    (dim, rotated, pairs, norm)
    for (dim, rotated), pairs, norm in itertools.product(
        [(64, 64), (80, 80), (96, 48), (128, 128)], [False, True], [False, True]
    )
]


@pytest.mark.parametrize(("dim", "rotated", "pairs", "norm"), CASES)
def test_rotates_normalizes_and_stores(dim: int, rotated: int, pairs: bool, norm: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    heads, kv, rows, eps, scale = 6, 2, 3, 1e-5, 0.5
    qkv = rng.normal(size=(rows, (heads + 2 * kv) * dim)).astype(np.float32)
    pools = [np.zeros((20, kv, dim), np.float32) for _ in range(2)]
    slots, offsets = np.array([3, 19, 8], np.int32), np.array([0, 1234, 77], np.int32)
    inv_freq = (10000.0 ** (-np.arange(rotated // 2) * 2 / rotated)).astype(np.float32)
    norms = [rng.normal(size=dim).astype(np.float32) for _ in range(2)]
    queries, after = np.zeros((rows, heads, dim), np.float32), np.ones(1, np.int32)
    constants = {
        "D": dim,
        "THREADS": -(-dim // 32) * 32,
        "H": heads,
        "KV": kv,
        "EACH": 1,
        "ROT": rotated,
        "PAIRS": int(pairs),
        "NORM": int(norm),
        "MARKS": 1,
    }
    inputs = (
        "const T* qkv, const T* k, const T* v, const int* slots, const int* offsets, const float* inv_freq, "
        "const T* q_norm, const T* k_norm, const float* params, const int* mark, T* queries, int* after"
    )
    arguments = ", ".join(part.split()[-1].lstrip("*") for part in inputs.split(","))
    library = compiled(
        [
            METAL_NAMES,
            "using T = float;",
            *(f"constexpr int {name} = {value};" for name, value in constants.items()),
            f"void kernel({inputs}) {{ {rotate_store_source.body('step', packed=False)} }}",
            f'extern "C" void run({inputs}) {{',
            f"  shim::launch({{uint(THREADS), {rows}, H + 2 * KV}}, THREADS, [&] {{ kernel({arguments}); }}); }}",
        ],
        tmp_path,
    )
    params, mark = np.array([scale, eps], np.float32), np.zeros(1, np.int32)
    library.run(*pointers(qkv, *pools, slots, offsets, inv_freq, *norms, params, mark, queries, after))
    q, k, v = expected_heads(qkv, heads, kv, dim, rotated, pairs, scale, offsets, norms if norm else None, eps)
    assert np.abs(queries - q).max() < TOLERANCE
    for pool, wanted in zip(pools, (k, v), strict=True):
        assert np.abs(pool[slots] - wanted).max() < TOLERANCE
        assert np.abs(np.delete(pool, slots, axis=0)).max() == 0
    assert after[0] == 0


@pytest.mark.parametrize("form", ["chunk", "prompt"])
@pytest.mark.parametrize(("dim", "each"), [(64, 5), (80, 2)])
def test_tokens_of_a_prompt(form: rotate_store_source.Form, dim: int, each: int, tmp_path: Path) -> None:
    """Several tokens per row, several heads per block; what is given out beyond them repeats what is there."""
    rng = np.random.default_rng(3)
    heads, kv, rows, length, eps = 6, 2, 2, 3, 1e-5
    qkv = rng.normal(size=(rows * length, (heads + 2 * kv) * dim)).astype(np.float32)
    pools = [np.zeros((20, kv, dim), np.float32) for _ in range(2)]
    slots, offsets = np.array([3, 19, 8, 0, 1, 11], np.int32), np.array([0, 77], np.int32)
    inv_freq = (10000.0 ** (-np.arange(dim // 2) * 2 / dim)).astype(np.float32)
    norms = [rng.normal(size=dim).astype(np.float32) for _ in range(2)]
    shape = (4, 5) if form == "prompt" else (rows, length)
    given = [np.zeros((*shape, count, dim), np.float32) for count in (heads, kv, kv)]
    constants = {"D": dim, "THREADS": -(-dim // 32) * 32, "H": heads, "KV": kv, "EACH": each, "ROT": dim}
    constants |= {"PAIRS": 0, "NORM": 1, "MARKS": 1}
    inputs = (
        "const T* qkv, const T* k, const T* v, const int* slots, const int* offsets, const float* inv_freq, "
        "const T* q_norm, const T* k_norm, const float* params, const int* mark, const int* qkv_shape, "
        "const int* offsets_shape, T* queries, T* keys, T* values, int* after"
    )
    arguments = ", ".join(part.split()[-1].lstrip("*") for part in inputs.split(","))
    library = compiled(
        [
            METAL_NAMES,
            "using T = float;",
            *(f"constexpr int {name} = {value};" for name, value in constants.items()),
            f"void kernel({inputs}) {{ {rotate_store_source.body(form, packed=False)} }}",
            f"constexpr uint3 GRID = {{{shape[1]} * THREADS, {shape[0]}, (H + 2 * KV) / EACH}};",
            f'extern "C" void run({inputs}) {{ shim::launch(GRID, THREADS, [&] {{ kernel({arguments}); }}); }}',
        ],
        tmp_path,
    )
    params, mark, after = np.array([0.5, eps], np.float32), np.zeros(1, np.int32), np.ones(1, np.int32)
    shapes = np.array(qkv.shape, np.int32), np.array(offsets.shape, np.int32)
    library.run(*pointers(qkv, *pools, slots, offsets, inv_freq, *norms, params, mark, *shapes, *given, after))
    positions = (offsets[:, None] + np.arange(length, dtype=np.int32)).reshape(-1)
    wanted = expected_heads(qkv, heads, kv, dim, dim, False, 0.5, positions, norms, eps)
    for pool, vectors in zip(pools, wanted[1:], strict=True):
        assert np.abs(pool[slots] - vectors).max() < TOLERANCE
        assert np.abs(np.delete(pool, slots, axis=0)).max() == 0
    assert after[0] == 0
    exact = [vectors.reshape(rows, length, -1, dim) for vectors in wanted]
    if form == "chunk":
        queries = given[0].reshape(rows, heads, length, dim).swapaxes(1, 2)
        assert np.abs(queries - exact[0]).max() < TOLERANCE
        return
    for got, vectors in zip(given, exact, strict=True):
        assert np.abs(got[:rows, :length] - vectors).max() < TOLERANCE
        assert np.array_equal(got[:rows, length:], np.repeat(got[:rows, length - 1 : length], 2, axis=1))
        assert np.array_equal(got[rows:], np.repeat(got[:1], 2, axis=0))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("dim", "group"), [(128, 64), (96, 32), (80, 32)])
def test_packs_and_stores(dim: int, group: int, bits: int, tmp_path: Path) -> None:
    """Values, which are packed as they come; ``test_packed_store.py`` holds the CUDA form against more."""
    rng = np.random.default_rng(2)
    heads, kv, rows, groups = 2, 3, 2, -(-dim // group)
    qkv = rng.normal(size=(rows, (heads + 2 * kv) * dim)).astype(np.float32)
    codes = [np.zeros((20, kv, groups * group * bits // 32), np.uint32) for _ in range(2)]
    affine = [np.zeros((20, kv, groups), np.float16) for _ in range(4)]
    slots, offsets = np.array([3, 19], np.int32), np.array([0, 77], np.int32)
    queries, after = np.zeros((rows, heads, dim), np.float32), np.ones(1, np.int32)
    constants = {"D": dim, "THREADS": groups * group, "H": heads, "KV": kv, "ROT": dim, "PAIRS": 0, "NORM": 0}
    constants |= {"EACH": 1, "MARKS": 1, "BITS": bits, "GROUP": group}
    inputs = (
        "const T* qkv, const uint* k, const S* ks, const S* kb, const uint* v, const S* vs, const S* vb, "
        "const int* slots, const int* offsets, const float* inv_freq, const T* q_norm, const T* k_norm, "
        "const float* params, const int* mark, T* queries, int* after"
    )
    arguments = ", ".join(part.split()[-1].lstrip("*") for part in inputs.split(","))
    library = compiled(
        [
            METAL_NAMES,
            "using T = float; using S = half;",
            *(f"constexpr int {name} = {value};" for name, value in constants.items()),
            f"void kernel({inputs}) {{ {rotate_store_source.body('step', packed=True)} }}",
            f'extern "C" void run({inputs}) {{',
            f"  shim::launch({{uint(THREADS), {rows}, H + 2 * KV}}, THREADS, [&] {{ kernel({arguments}); }}); }}",
        ],
        tmp_path,
    )
    blank, params = np.zeros(dim, np.float32), np.array([1, 0], np.float32)
    arrays = [codes[0], affine[0], affine[1], codes[1], affine[2], affine[3]]
    mark = np.zeros(1, np.int32)
    library.run(*pointers(qkv, *arrays, slots, offsets, blank, blank, blank, params, mark, queries, after))
    packing = VectorPacking(dim, bits, group)
    values = mx.array(qkv.reshape(rows, -1, dim)[:, heads + kv :])
    wanted = packing.pack(values)
    for array, part in zip((codes[1], affine[2], affine[3]), wanted, strict=True):
        assert np.array_equal(array[slots], np.array(part))
        assert not np.delete(array, slots, axis=0).any()


def expected_heads(
    qkv: np.ndarray,
    heads: int,
    kv: int,
    dim: int,
    rotated: int,
    pairs: bool,
    scale: float,
    offsets: np.ndarray,
    norms: list[np.ndarray] | None,
    eps: float,
) -> list[np.ndarray]:
    """By MLX's own norm and rotation: queries ``[B, H, D]``, keys and values ``[B, KV, D]``."""
    parts = mx.split(mx.array(qkv).reshape(len(qkv), -1, 1, dim), [heads, heads + kv], axis=1)
    if norms is not None:
        parts = [*(mx.fast.rms_norm(x, mx.array(w), eps) for x, w in zip(parts, norms, strict=False)), parts[2]]
    turned = [
        mx.fast.rope(x, rotated, traditional=pairs, base=10000.0, scale=scale, offset=mx.array(offsets, mx.int32))
        for x in parts[:2]
    ]
    return [np.array(x[:, :, 0]) for x in (*turned, parts[2])]
