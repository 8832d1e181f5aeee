"""Where device time goes: kernels, gaps and calls out of a profiler's trace."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "kernel_table.py"


@pytest.fixture(scope="module")
def kernel_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_table", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_table"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def event(name: str, ts: float, dur: float, cat: str = "kernel", ph: str = "X") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "ph": ph, "args": {"stream": 7}}


# Two steps: a product of 10, a gap of 0.5, attention of 20, a gap of 5, a product of 10; 100 between the steps.
STEP = [
    ("void gemm<float, 64>(Args)", 0.0, 10.0),
    ("attend", 10.5, 20.0),
    ("void gemm<float, 64>(Args)", 35.5, 10.0),
]
TRACE = {
    "traceEvents": [
        {"name": "process_name", "ph": "M", "args": {}},
        *(event(name, 1000 + 145.5 * step + ts, dur) for step in (1, 0) for name, ts, dur in STEP),
        event("cudaGraphLaunch", 990, 30, "cuda_runtime"),
        event("cudaGraphLaunch", 1100, 50, "cuda_runtime"),
        event("aten::zeros", 900, 500, "cpu_op"),
        event("gpu_span", 1000, 500, "gpu_user_annotation"),
    ]
}


def test_kernels_of_a_step(kernel_table: ModuleType) -> None:
    found = kernel_table.spans(TRACE, kernel_table.DEVICE)
    assert [span.start_us for span in found] == sorted(span.start_us for span in found) and len(found) == 6
    product, attention = sorted(kernel_table.lines(found, 2), key=lambda line: line.name, reverse=True)
    assert (product.name, product.per_step, product.mean_us, product.step_us) == ("gemm<float, 64>", 2, 10, 20)
    assert (attention.name, attention.per_step, attention.mean_us, attention.share) == ("attend", 1, 20, 0.5)


def test_gaps_and_busy_time(kernel_table: ModuleType) -> None:
    device = kernel_table.device(kernel_table.spans(TRACE, kernel_table.DEVICE), 2)
    assert device.span_us == pytest.approx((145.5 + 45.5) / 2)
    assert device.busy_us == pytest.approx(40)
    assert device.small_gaps_us == pytest.approx(0.5)
    between, inside = device.gaps
    assert between.name == "gemm<float, 64> → gemm<float, 64>" and between.step_us == pytest.approx(50)
    assert inside.name == "attend → gemm<float, 64>" and inside.step_us == pytest.approx(5)
    assert device.span_us == pytest.approx(
        device.busy_us + device.small_gaps_us + between.step_us + inside.step_us
    )


def test_kernels_that_overlap_are_busy_once(kernel_table: ModuleType) -> None:
    spans = [kernel_table.Span(*words) for words in (("long", 0, 100), ("short", 10, 20), ("late", 90, 130))]
    device = kernel_table.device(spans, 1)
    assert (device.span_us, device.busy_us, device.small_gaps_us, list(device.gaps)) == (130, 130, 0, [])
    assert kernel_table.device([], 1).busy_us == 0


def test_a_kernel_that_began_early_counts_from_the_end_of_the_one_before(kernel_table: ModuleType) -> None:
    words = [("product", 0, 10), ("norm", 2, 12), ("attend", 4, 20), ("inside", 5, 9), ("late", 25, 30)]
    spans = [kernel_table.Span(*one) for one in words]
    added = {span.name: span.us for span in kernel_table.added(spans)}
    assert added == {"inside": 4, "product": 1, "norm": 2, "attend": 8, "late": 5}
    assert kernel_table.added([]) == []


def test_calls_of_the_host(kernel_table: ModuleType) -> None:
    (line,) = kernel_table.lines(kernel_table.spans(TRACE, kernel_table.HOST), 2)
    assert (line.name, line.per_step, line.mean_us, line.share) == ("cudaGraphLaunch", 1, 40, 1)


def test_names_are_short(kernel_table: ModuleType) -> None:
    short = kernel_table.short_name
    name = "void mlx::core::cu::(anonymous namespace)::binary_g<mlx::core::cu::Add, int>(int const*, int)"
    assert short(name) == "binary_g<Add, int>"
    assert short("custom_kernel_paged_decode_0123456789abcdef0123_bf16") == "custom_kernel_paged_decode_bf16"
    assert len(short("x" * 500)) == kernel_table.NAME_WIDTH


def test_a_table_sums_up_the_rest(kernel_table: ModuleType) -> None:
    spans = [kernel_table.Span(f"k{index}", 0, index + 1) for index in range(5)]
    table = kernel_table.table(kernel_table.lines(spans, 1), 2, "kernel")
    assert table.splitlines()[2].startswith("| k4 | 1.0 | 5.0 | 5.0 | 33.3%")
    assert table.splitlines()[-1] == "| 3 others | 3.0 | – | 6.0 | 40.0% |"
    assert kernel_table.table([], 2, "kernel").count("\n") == 1
