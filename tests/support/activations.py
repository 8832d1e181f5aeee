"""What a start measures of a model's activations, without the rest of the start."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config import EngineConfig


def activations_of(config: EngineConfig, chunk: int) -> Callable[[], int]:
    """Measures bytes of a chunk of ``chunk`` tokens beside one sampled row; the model is prepared once (CPU)."""
    from headrace.checkpoint.model_folder import describe
    from headrace.runner import build
    from headrace.runner.start import activation

    prepared = build._prepare(config, describe(config.model), build.read_device(), lambda stage, fraction: None)
    return lambda: activation.measure_activation_bytes(
        prepared.loaded.model,
        prepared.selector,
        prepared.found,
        prepared.vocab_size,
        prepared.options,
        head_major=True,
        chunk=chunk,
        max_rows=1,
        store=prepared.store,
    )
