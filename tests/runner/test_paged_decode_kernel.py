"""The decode kernel on a GPU: the grid of gpu_kernel_grid.py, and the check at load."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import gpu_kernel_grid as grid

from headrace.runner.attention.kernel_check import choose_kernel
from headrace.runner.attention.paged_decode import CUDA_FLOATS, METAL_FLOATS, Form, PagedDecodeKernel, refusal
from headrace.runner.attention.random_pools import random_case
from headrace.runner.kv.pool import LayerShape

on_a_gpu = pytest.mark.skipif(mx.default_device() != mx.gpu, reason="needs a GPU: MLX computes on the CPU here")
LLAMA = LayerShape(0, 8, 128, 128, mx.bfloat16)


@on_a_gpu
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_grid() -> None:
    ran = subprocess.run([sys.executable, grid.__file__], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@on_a_gpu
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_the_check_at_load_takes_the_kernel(bits: int | None) -> None:
    choice = choose_kernel(replace(LLAMA, bits=bits), 32, None, 32)
    assert choice.kernel is not None, choice.note


def test_the_grid_needs_few_compilations() -> None:
    chosen = grid.forms()
    assert len({(case.widths, case.bits) for case in chosen}) == 27
    assert grid.compilations(chosen) <= 45


def test_what_the_kernel_takes() -> None:
    queries, view = random_case(LLAMA, 32, [3, 40], 32, None)
    assert PagedDecodeKernel.supports(queries, view)
    assert not PagedDecodeKernel.supports(mx.concatenate([queries, queries], axis=2), view)  # two queries a row
    assert not PagedDecodeKernel.supports(queries.astype(mx.float32), view)
    for layer in (LLAMA, replace(LLAMA, key_dim=576, value_dim=512), replace(LLAMA, key_dim=80, bits=4)):
        assert refusal(layer) is None
    assert refusal(replace(LLAMA, key_dim=1032)) == (
        "key vectors of 1032 elements: the kernel takes multiples of 8 up to 1024"
    )
    assert "value vectors of 36" in str(refusal(replace(LLAMA, value_dim=36)))


def test_a_context_is_split_alike_packed_or_not() -> None:
    forms = [
        Form.of(replace(LLAMA, bits=bits), 32, 32, CUDA_FLOATS, has_sinks=False, has_softcap=False)
        for bits in (None, 8, 4)
    ]
    for rows, context, expected in ((1, 32, 1), (1, 2048, 8), (8, 8192, 8), (32, 8192, 2), (128, 8192, 1)):
        assert {form.splits(rows, context) for form in forms} == {expected}


@pytest.mark.parametrize("floats", [CUDA_FLOATS, METAL_FLOATS])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize(
    "widths", [(8, 8), (80, 80), (128, 128), (192, 128), (256, 256), (576, 512), (1024, 1024)]
)
def test_a_form_covers_all_queries_within_its_registers(widths: tuple[int, int], ratio: int, floats: int) -> None:
    layer = replace(LLAMA, key_dim=widths[0], value_dim=widths[1])
    form = Form.of(layer, 8 * ratio, 32, floats, has_sinks=False, has_softcap=False)
    assert ratio % form.queries_per_block == 0
    pieces = [-(-width // (8 * form.lanes)) for width in widths]
    assert 32 % form.lanes == 0
    assert form.queries_per_block == 1 or form.queries_per_block * sum(pieces) * 8 <= floats
