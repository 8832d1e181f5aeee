"""The decode kernel's Metal and CUDA forms, compiled as C++ against shims of those names and run on the CPU.

It shows that the source is sound C++, that indices, reductions and barriers are right, and that nothing outside of
a row's own positions is read; it has not run on Metal.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from kernel_cases import AXES, Case, definition, fault, pairwise
from kernel_forms import FORMS, compiled, run

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

GRID = tuple(pairwise(AXES))
CHUNK = 12  # cases of the grid that one library holds
SAMPLE = (
    Case("float32", (64, 64), 4, lengths=(1, 15, 16, 200)),
    Case("bfloat16", (128, 128), 4, bits=8, lengths=(1, 130)),
    Case("bfloat16", (128, 128), 4, bits=4, splits=3, lengths=(300, 2)),
    Case("float16", (80, 80), 2, bits=8, window=16, lengths=(33, 1, 129)),
    Case("float32", (256, 256), 8, kv_heads=1, splits=3, lengths=(70, 3)),
    Case("float16", (96, 96), 3, bits=4, sinks=True, lengths=(31, 64)),
    Case("bfloat16", (576, 512), 16, kv_heads=1, lengths=(40,)),
    Case("float32", (192, 128), 5, bits=8, softcap=2.0, splits=3, lengths=(150,)),
    Case("bfloat16", (64, 64), 7, window=100, sinks=True, splits=7, lengths=(300, 1)),
    Case("float32", (192, 192), 16, kv_heads=1, bits=4, softcap=2.0, lengths=(65,)),
)


@pytest.fixture(scope="module", params=FORMS)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled(SAMPLE, request.param, tmp_path_factory.mktemp("forms"))


@pytest.mark.parametrize("index", range(len(SAMPLE)), ids=lambda index: str(SAMPLE[index]))
def test_equals_the_definition(sample: ctypes.CDLL, index: int) -> None:
    check(sample, index, SAMPLE[index])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("form", "first"),
    # The forms have one body and take turns; the sample above runs both.
    [(tuple(FORMS)[turn % len(FORMS)], first) for turn, first in enumerate(range(0, len(GRID), CHUNK))],
)
def test_the_grid_equals_the_definition(form: str, first: int, tmp_path: Path) -> None:
    chunk = GRID[first : first + CHUNK]
    library = compiled(chunk, form, tmp_path)
    faults = []
    for index, case in enumerate(chunk):
        got, built = run(library, index, case)
        if (what := fault(case, got, definition(case, *built))) is not None:
            faults.append(f"{case}: {what}")
    assert not faults, "\n".join(faults)


def check(library: ctypes.CDLL, index: int, case: Case) -> None:
    got, built = run(library, index, case)
    assert fault(case, got, definition(case, *built)) is None
