"""native/sgemm.cpp against NumPy: every layout, every edge, two callers at once, and rows that do not mix."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.core.machine import cpu_features
from headrace.runner.cpu import blas_probe
from headrace.runner.cpu.blas_candidates import candidates, compile_kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has a fast BLAS of its own")

Matrix = NDArray[np.float32]
Sgemm = Callable[..., None]
ROW_MAJOR, COLUMN_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 102, 111, 112


# compiler option -> feature that the processor must list: widths of 16, 8 and 4 floats, fused links or not
INSTRUCTIONS = {"-march=skylake-avx512": "avx512vl", "-march=haswell": "avx2", "-march=x86-64": "sse2"}


RUNNABLE = [option for option, feature in INSTRUCTIONS.items() if feature in cpu_features().split()]


@pytest.fixture(scope="module", params=["built", *RUNNABLE])
def sgemm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sgemm:
    """The kernel with three threads, in front of a BLAS of this machine; nothing is taken over."""
    choice = next(one for one in candidates([]) if one.kernel)
    kernel = choice.kernel
    if request.param != "built":
        target = tmp_path_factory.mktemp("kernel") / "libsgemm.so"
        compile_kernel(target, request.param)
        kernel = str(target)
    library = blas_probe.load(choice.path, 3, ctypes.RTLD_LOCAL, kernel)
    return declared(library)


def declared(library: ctypes.CDLL) -> Sgemm:
    integer, real, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    shape = (integer, integer, integer, integer, integer, integer)
    library.cblas_sgemm.argtypes = [*shape, real, pointer, integer, pointer, integer, real, pointer, integer]
    library.cblas_sgemm.restype = None
    return library.cblas_sgemm  # type: ignore[no-any-return]


def integers(source: np.random.Generator, *shape: int) -> Matrix:
    """Small integers: their products and sums are exact in float32, in any order."""
    return source.integers(-4, 5, shape).astype(np.float32)


def linear(sgemm: Sgemm, x: Matrix, w: Matrix) -> Matrix:
    """x wᵀ, as a linear layer calls it."""
    (rows, inputs), outputs = x.shape, w.shape[0]
    y = np.full((rows, outputs), np.nan, np.float32)
    shape = (ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, rows, outputs, inputs)
    sgemm(*shape, 1.0, x.ctypes.data, inputs, w.ctypes.data, inputs, 0.0, y.ctypes.data, outputs)
    return y


@settings(deadline=None, max_examples=100)
@given(
    order=st.sampled_from([ROW_MAJOR, COLUMN_MAJOR]),
    trans_a=st.booleans(),
    trans_b=st.booleans(),
    m=st.integers(1, 70),
    n=st.integers(1, 300),
    k=st.integers(1, 90),
    pad=st.integers(0, 3),
    alpha=st.sampled_from([1.0, -2.0, 0.5]),
    beta=st.sampled_from([0.0, 1.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_every_layout(
    sgemm: Sgemm,
    order: int,
    trans_a: bool,
    trans_b: bool,
    m: int,
    n: int,
    k: int,
    pad: int,
    alpha: float,
    beta: float,
    seed: int,
) -> None:
    source = np.random.default_rng(seed)
    a, b, c = integers(source, m, k), integers(source, k, n), integers(source, m, n)
    want = alpha * (a @ b) + beta * c

    def stored(matrix: Matrix, transposed: bool) -> Matrix:
        """The matrix in memory as the call describes it, with unused space behind each line."""
        lines = matrix.T if transposed != (order == COLUMN_MAJOR) else matrix
        return np.ascontiguousarray(np.pad(lines, ((0, 0), (0, pad)), constant_values=np.nan))

    a_, b_, c_ = stored(a, trans_a), stored(b, trans_b), stored(c, False)
    before = c_.copy()
    code_a, code_b = (TRANSPOSE if trans else NO_TRANSPOSE for trans in (trans_a, trans_b))
    lines = [(one.ctypes.data, one.shape[1]) for one in (a_, b_, c_)]
    sgemm(order, code_a, code_b, m, n, k, alpha, *lines[0], *lines[1], beta, *lines[2])
    inner = c_[:, : c_.shape[1] - pad]
    np.testing.assert_array_equal(inner.T if order == COLUMN_MAJOR else inner, want)
    np.testing.assert_array_equal(c_[:, c_.shape[1] - pad :], before[:, c_.shape[1] - pad :])


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 31, 32, 33, 64, 65, 100, 129, 300])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1536, 576), (777, 1001), (4096, 64), (32, 4096), (1, 300), (50, 5001)]
)
def test_sizes_that_are_shared_out(sgemm: Sgemm, rows: int, outputs: int, inputs: int) -> None:
    source = np.random.default_rng(rows)
    x, w = integers(source, rows, inputs), integers(source, outputs, inputs)
    np.testing.assert_array_equal(linear(sgemm, x, w), x @ w.T)


@pytest.mark.parametrize(("outputs", "inputs"), [(640, 576), (333, 1003), (2048, 64), (40, 4500)])
def test_a_row_does_not_depend_on_its_neighbours(sgemm: Sgemm, outputs: int, inputs: int) -> None:
    """Bit for bit, for every number of rows: of a decode step and of a prefill."""
    source = np.random.default_rng(7)
    x = source.standard_normal((200, inputs), np.float32)
    w = source.standard_normal((outputs, inputs), np.float32)
    alone = np.concatenate([linear(sgemm, row[None], w) for row in x])
    for rows in (2, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 65, 85, 128, 129, 200):
        np.testing.assert_array_equal(linear(sgemm, x[:rows].copy(), w), alone[:rows])
    np.testing.assert_allclose(alone, x.astype(np.float64) @ w.T.astype(np.float64), atol=1e-3)


def test_rows_that_the_kernel_leaves_to_the_library() -> None:
    choice = next(one for one in candidates([]) if one.kernel)
    library = blas_probe.load(choice.path, 2, ctypes.RTLD_LOCAL, choice.kernel, kernel_rows=4)
    try:
        for rows in (3, 4, 5, 90):
            x, w = integers(np.random.default_rng(1), rows, 576), integers(np.random.default_rng(2), 640, 576)
            np.testing.assert_array_equal(linear(declared(library), x, w), x @ w.T)
    finally:
        library.headrace_sgemm_rows(blas_probe.ALL_ROWS)


def test_zero_inputs(sgemm: Sgemm) -> None:
    """k = 0 leaves beta · c."""
    y = np.ones((2, 3), np.float32)
    shape = (ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE, 2, 3, 0)
    sgemm(*shape, 1.0, y.ctypes.data, 1, y.ctypes.data, 1, 0.0, y.ctypes.data, 3)
    np.testing.assert_array_equal(y, 0)


def test_two_callers_at_once(sgemm: Sgemm) -> None:
    source = np.random.default_rng(3)
    wrong: list[int] = []

    def call(rows: int) -> None:
        x, w = integers(source, rows, 512), integers(source, 1024, 512)
        want = x @ w.T
        for _ in range(200):
            if not np.array_equal(linear(sgemm, x, w), want):
                wrong.append(rows)

    threads = [threading.Thread(target=call, args=(rows,)) for rows in (1, 4, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
