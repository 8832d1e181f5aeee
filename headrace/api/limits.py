"""What a running model takes, as its worker told."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import NotReady
from headrace.gateway.service import EngineState

RETRY_STARTING_S = 5.0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Of the model that runs: prompt + output tokens, and the token ids that a request may name."""

    max_model_len: int
    vocab_size: int


def model_limits(state: EngineState, vocab_size: int) -> ModelLimits:
    """``NotReady`` until a worker has told its limits; ``vocab_size`` is the tokenizer's."""
    if state.ready is None:
        if state.status == "failed":
            raise NotReady(f"the engine has failed: {state.message}", retry_after_s=60.0)
        raise NotReady("the model is still loading", retry_after_s=RETRY_STARTING_S)
    return ModelLimits(state.ready.max_model_len, min(state.ready.vocab_size, vocab_size))
