"""What is set aside for activations is near what a large chunk takes, whatever one reading of the peak says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest

from headrace.checkpoint.model_folder import describe
from headrace.config import EngineConfig
from headrace.runner import activation, build

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's largest chunk is run itself")

CHUNK = 2048
Measure = Callable[[], int]


@pytest.fixture(scope="module")
def measure(scripted_folder: Callable[[str], Path]) -> Measure:
    config = EngineConfig(model=str(scripted_folder("plain")))
    prepared = build._prepare(config, describe(config.model), build.read_device(), lambda stage, fraction: None)

    def measured() -> int:
        return activation.measure_activation_bytes(
            prepared.loaded.model,
            prepared.selector,
            prepared.found,
            prepared.vocab_size,
            prepared.options,
            head_major=True,
            chunk=CHUNK,
            max_rows=1,
            store=prepared.store,
        )

    return measured


@pytest.fixture(scope="module")
def taken(measure: Measure) -> int:
    """What the chunk itself takes, the most of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "_CHUNK_S", 1e9)
        return max(measure() for _ in range(3))


@pytest.mark.parametrize("seconds", [0.0, 0.05, activation._CHUNK_S], ids=["small", "medium", "usual"])
def test_the_line_through_smaller_chunks_meets_the_large_one(
    measure: Measure, taken: int, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(activation, "_CHUNK_S", seconds)
    assert 0.8 * taken < measure() < 1.5 * taken


@pytest.mark.parametrize("reading", range(5))
@pytest.mark.parametrize("seconds", [0.05, 1e9], ids=["line", "itself"])
def test_one_odd_reading_makes_no_small_plan(
    measure: Measure, taken: int, monkeypatch: pytest.MonkeyPatch, reading: int, seconds: float
) -> None:
    """Of the first chunk's, the two smaller ones' and the two larger ones' (or the chunk's own)."""
    usual, calls = activation._peak, count()

    def peak(*words: object) -> int:
        return int(usual(*words) * (0.3 if next(calls) == reading else 1))

    monkeypatch.setattr(activation, "_peak", peak)
    monkeypatch.setattr(activation, "_CHUNK_S", seconds)
    assert 0.8 * taken < measure() < 1.7 * taken
