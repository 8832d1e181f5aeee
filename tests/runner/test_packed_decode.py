"""Attention by tensor cores over 16-bit and packed pools, its source run on the CPU (the shim multiplies fragments
by definition), against attention by its definition over what the pool holds."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from emulated_cuda import emulated
from kernel_cases import Case, build, definition, fault

from headrace.runner.attention import paged_decode, paged_decode_source
from headrace.runner.attention.paged_decode import PagedDecodeKernel, takes_tiles

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SAMPLE = (
    Case("bfloat16", (64, 64), 4, bits=8, lengths=(1, 15, 16, 17, 130)),
    Case("float16", (128, 128), 8, kv_heads=1, bits=4, splits=3, lengths=(300, 2, 49)),
    Case("bfloat16", (128, 128), 8, kv_heads=1, lengths=(1, 15, 16, 17, 300)),
    Case("float16", (64, 64), 4, splits=3, lengths=(300, 2, 49)),
    Case("bfloat16", (80, 96), 3, window=20, sinks=True, lengths=(65, 7), block_size=32),
)
GRID = (
    Case("bfloat16", (64, 64), 4, bits=4, splits=7, lengths=(33, 1, 130)),
    Case("bfloat16", (64, 64), 1, bits=8, window=16, lengths=(33, 1, 129), block_size=32),
    Case("float16", (64, 64), 7, bits=8, sinks=True, splits=3, lengths=(200, 64)),
    Case("float16", (64, 128), 2, bits=4, softcap=2.0, lengths=(65, 31), block_size=32),
    Case("bfloat16", (128, 64), 3, bits=8, window=100, splits=2, lengths=(300, 15)),
    Case("bfloat16", (128, 128), 16, kv_heads=1, bits=4, sinks=True, lengths=(31, 32, 64, 1)),
    Case("bfloat16", (128, 128), 4, bits=8, softcap=2.0, sinks=True, window=1, lengths=(70, 3), block_size=48),
    Case("float16", (128, 128), 5, bits=8, lengths=(16, 200)),
    Case("bfloat16", (64, 64), 1, window=16, lengths=(33, 1, 129), block_size=32),
    Case("bfloat16", (64, 64), 7, sinks=True, splits=3, lengths=(200, 64)),
    Case("float16", (64, 128), 2, softcap=2.0, lengths=(65, 31), block_size=32),
    Case("float16", (128, 64), 3, window=100, splits=2, lengths=(300, 15)),
    Case("bfloat16", (128, 128), 16, kv_heads=1, sinks=True, lengths=(31, 32, 64, 1)),
    Case("float16", (128, 128), 4, softcap=2.0, sinks=True, window=1, lengths=(70, 3), block_size=48),
    Case("bfloat16", (128, 128), 5, splits=7, lengths=(16, 700)),
    Case("float16", (128, 128), 6, kv_heads=2, lengths=(16, 700)),
    Case("bfloat16", (96, 96), 4, window=100, lengths=(16, 200)),
    Case("bfloat16", (192, 128), 8, kv_heads=1, splits=2, lengths=(130, 9)),
    Case("float16", (256, 256), 2, softcap=50.0, window=64, lengths=(130, 9)),
    Case("bfloat16", (40, 72), 12, kv_heads=1, sinks=True, splits=3, lengths=(130, 9)),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> PagedDecodeKernel:
    make = emulated(tmp_path_factory.mktemp("kernels"))
    floats = paged_decode.CUDA_FLOATS
    return PagedDecodeKernel(make, paged_decode_source.CUDA_PRELUDE, floats, tiles=True)


def launch(monkeypatch: pytest.MonkeyPatch, splits: int, warps: int = 4) -> None:
    """As many splits as asked for, empty ones too."""
    monkeypatch.setattr(paged_decode.Form, "splits", lambda *_: splits)
    monkeypatch.setattr(paged_decode.Form, "warps", lambda *_: warps)


def output(kernel: PagedDecodeKernel, case: Case, scaled: tuple[float, ...] = ()) -> str | None:
    """What is wrong with a case; ``scaled``: values of token i are this times larger."""
    assert takes_tiles(case.layer, case.block_size)
    queries, view, sinks = build(case)
    pool = view.pool
    if scaled:
        by = mx.array([scaled[i % len(scaled)] for i in range(pool.keys[0].shape[0])])[:, None, None]
        pool.value_affine[0] = tuple((x * by).astype(x.dtype) for x in pool.value_affine[0])
    got = kernel(queries, view, case.scale, case.window, sinks, case.softcap)
    out = np.array(got.astype(mx.float32), np.float64)[:, :, 0]
    return fault(case, out, definition(case, queries, view, sinks))


@pytest.mark.parametrize("warps", [4, 16])
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_equals_the_definition(
    kernel: PagedDecodeKernel, case: Case, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, case.splits, warps)
    assert output(kernel, case) is None


@pytest.mark.slow
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_grid_equals_the_definition(
    kernel: PagedDecodeKernel, case: Case, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, case.splits, warps)
    assert output(kernel, case) is None


@pytest.mark.parametrize("scaled", [(1e-3,), (1e-3, 1.0, 1e-2, 3.0), (1e-6, 1.0)], ids=str)
def test_values_of_any_size(
    kernel: PagedDecodeKernel, scaled: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that half precision could not hold, and scales that grow by far along the way."""
    launch(monkeypatch, 1)
    assert output(kernel, SAMPLE[0], scaled) is None


def test_widths_that_tiles_do_not_fit() -> None:
    packed = SAMPLE[0].layer
    plain = replace(packed, bits=None)
    for layer in (packed, plain):
        assert takes_tiles(layer, 32)
        assert not takes_tiles(layer, 8)
        assert not takes_tiles(replace(layer, dtype=mx.float32), 32)
        assert not takes_tiles(replace(layer, value_dim=512), 32)
    for widths in ({"key_dim": 96}, {"value_dim": 256}, {"key_dim": 192, "value_dim": 128}):
        assert takes_tiles(replace(plain, **widths), 32)
        assert not takes_tiles(replace(packed, **widths), 32)
