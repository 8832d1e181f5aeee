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

CHUNK = 512
NOTHING = "nothing"


@pytest.fixture(scope="module")
def measure(scripted_folder: Callable[[str], Path]) -> Callable[[], int]:
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
def taken(measure: Callable[[], int]) -> int:
    """What a chunk of that size really takes, the most of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activation, "_CPU_CHUNKS", (32, CHUNK))
        return max(measure() for _ in range(3))


@pytest.mark.parametrize("reading", [NOTHING, 0, 1, 2, 3])
@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_one_odd_reading_makes_no_small_plan(
    measure: Callable[[], int], taken: int, monkeypatch: pytest.MonkeyPatch, reading: int | str, factor: float
) -> None:
    usual, calls = activation._peak, count()

    def peak(*words: object) -> int:
        return int(usual(*words) * (factor if next(calls) == reading else 1))

    monkeypatch.setattr(activation, "_peak", peak)
    odd = reading != NOTHING and (factor > 1) == (reading in (1, 3))
    assert 0.8 * taken < measure() < (5 if odd else 1.3) * taken
