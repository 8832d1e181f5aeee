"""Attention of prompts behind prefixes by a kernel of our own, its source run on the CPU (the shim says what the
instructions do, and lets every other asynchronous copy arrive late), against attention by its definition."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import gpu_prefill_grid
from emulated_cuda import emulated
from prefill_cases import Prompts, build, definition, fault

from headrace.runner.attention import paged_prefill
from headrace.runner.attention.paged_prefill import Form, PagedPrefillKernel

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SAMPLE = (
    Prompts(starts=(37, 0, 130), lengths=(9, 3, 20), tiles=1, splits=1),
    Prompts("float16", starts=(100,), lengths=(33,), tiles=2, splits=1, sinks=True, block_size=32),
    Prompts(ratio=3, kv_heads=2, starts=(300, 2), lengths=(5, 30), tiles=1, splits=4, window=50),
)
GRID = (
    Prompts(widths=(128, 128), starts=(70, 5), lengths=(34, 40), tiles=2, splits=1, block_size=32),
    Prompts("float16", (128, 128), 8, starts=(201,), lengths=(17,), tiles=1, splits=2, sinks=True),
    Prompts(widths=(80, 80), ratio=1, kv_heads=2, starts=(33, 190), lengths=(100, 7), tiles=1, splits=1),
    Prompts("float16", (96, 96), 7, starts=(63, 64), lengths=(2, 19), tiles=2, splits=1, softcap=20.0),
    Prompts(widths=(256, 256), ratio=2, starts=(100,), lengths=(12,), tiles=1, splits=1, softcap=2.0),
    Prompts(widths=(192, 128), ratio=1, starts=(31, 0), lengths=(65, 64), tiles=1, splits=1, window=16),
    Prompts("float16", (64, 128), 5, starts=(15,), lengths=(90,), tiles=2, splits=2, window=1, block_size=4),
    Prompts(ratio=1, starts=(0, 500), lengths=(100, 90), tiles=1, splits=2, window=130, sinks=True),
    Prompts(bits=8, starts=(37, 0, 130), lengths=(9, 3, 20), tiles=2, splits=1, kv_heads=3, ratio=2),
    Prompts("float16", (128, 128), bits=4, starts=(100,), lengths=(33,), tiles=1, splits=2, sinks=True),
    Prompts(widths=(80, 80), bits=8, starts=(200, 7), lengths=(20, 40), tiles=1, splits=1, kv_heads=3, ratio=1),
    Prompts(widths=(128, 128), bits=8, starts=(300,), lengths=(40,), tiles=2, splits=1, window=70),
    Prompts(widths=(192, 128), bits=4, starts=(50,), lengths=(30,), tiles=1, splits=1, kv_heads=1, block_size=4),
    Prompts(ratio=16, starts=(200, 77), lengths=(8, 1), tiles=2, splits=4, sinks=True, softcap=5.0),
)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> PagedPrefillKernel:
    return PagedPrefillKernel(emulated(tmp_path_factory.mktemp("kernels")))


def output(kernel: PagedPrefillKernel, case: Prompts, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What is wrong with a case."""

    def chosen(layer: object, *_: object, has_softcap: bool) -> tuple[Form, int]:
        return Form(case.layer, case.heads, case.tiles, has_softcap), case.splits

    monkeypatch.setattr(paged_prefill, "_chosen", chosen)
    queries, view, sinks = build(case)
    assert kernel.supports(queries, view)
    got = kernel(queries, view, case.scale, case.window, sinks, case.softcap)
    return fault(case, got, definition(case, queries, view, sinks))


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_equals_the_definition(kernel: PagedPrefillKernel, case: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert output(kernel, case, monkeypatch) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", GRID, ids=str)
def test_the_grid_equals_the_definition(
    kernel: PagedPrefillKernel, case: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert output(kernel, case, monkeypatch) is None


# -- on a GPU, and what it is used for ---------------------------------------------------------------------


@pytest.mark.skipif(mx.default_device() != mx.gpu, reason="needs a GPU: MLX computes on the CPU here")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_grid_on_a_gpu() -> None:
    ran = subprocess.run([sys.executable, gpu_prefill_grid.__file__], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_grid_tries_all_values() -> None:
    cases = gpu_prefill_grid.cases()
    for name, options in gpu_prefill_grid.AXES.items():
        if name != "rows":
            assert {getattr(case, name) for case in cases} >= set(options), name
