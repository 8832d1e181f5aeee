"""What is set aside for activations is near what a large chunk takes, whatever one reading of the peak says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest
from support.activations import activations_of

from headrace.config import EngineConfig
from headrace.runner.start import activation

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's largest chunk is run itself")

CHUNK = 2048
Measure = Callable[[], int]


@pytest.fixture(scope="module")
def measure(scripted_folder: Callable[[str], Path]) -> Measure:
    return activations_of(EngineConfig(model=str(scripted_folder("plain"))), CHUNK)


@pytest.fixture(scope="module")
def taken(measure: Measure) -> int:
    """What the chunk itself takes, the most of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "_CHUNK_S", 1e9)
        return max(measure() for _ in range(3))


def test_the_plan_is_what_the_chunk_takes(measure: Measure, taken: int) -> None:
    assert 0.8 * taken < measure() < 1.5 * taken


@pytest.mark.parametrize("factor", [0.3, 3.0])
@pytest.mark.parametrize("reading", range(7))
@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["line", "itself"])
def test_one_odd_reading_makes_no_small_plan(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, reading: int, seconds: float, factor: float
) -> None:
    """Of the first chunk, the smaller and the larger ones (or the chunk itself), on an even device."""
    calls = count()

    def true_peak(chunk: int) -> int:
        return 400_000 + 35_000 * chunk

    def peak(runner: object, pool: object, layout: object, chunk: int) -> int:
        return int(true_peak(chunk) * (factor if next(calls) == reading else 1))

    monkeypatch.setattr(activation, "_peak", peak)
    monkeypatch.setattr(activation, "_CHUNK_S", seconds)
    assert 0.99 * true_peak(CHUNK) < measure() < 4.6 * true_peak(CHUNK)
    assert next(calls) == (4 if seconds else 7)
