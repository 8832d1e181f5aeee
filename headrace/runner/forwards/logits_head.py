"""Module substitution: compute logits only at the positions that need them.

mlx-lm models project every position of a forward to the vocabulary. During prefill only each row's last position
matters, and the projection would be a large share of the work. At load the output projection (``lm_head``, or
the embedding's ``as_linear`` where weights are tied) is replaced by the same module behind a selection of
positions. The unmodified module computes the rows that remain, so values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class HeadSelector:
    """Which positions of the next forward get logits; set before each forward by the runner.

    Attributes:
        kept: what the head was given by the last forward that was to keep it, ``[B, 1, D]``.
    """

    def __init__(self) -> None:
        self._positions: mx.array | None = None
        self._keeps = False
        self.kept: mx.array | None = None

    def all_positions(self) -> None:
        self._positions, self._keeps = None, False

    def take(self, positions: mx.array) -> None:
        """Only ``positions [B]`` of each row, whatever they are when it runs."""
        self._positions, self._keeps = positions, False

    def last_of(self, lengths: Sequence[int], padded: int, *, keep: bool = False) -> None:
        """Only the last real position of each row of a forward ``[len(lengths), padded]``."""
        self._keeps, self.kept = keep, None
        if padded == 1:
            self._positions = None
        else:
            self._positions = mx.array([length - 1 for length in lengths])

    def select(self, hidden: mx.array) -> mx.array:
        """``[B, L, D]`` -> ``[B, 1, D]``, or unchanged when all positions are wanted."""
        if self._positions is not None:
            hidden = mx.take_along_axis(hidden, self._positions[:, None, None], axis=1)
        if self._keeps:
            self.kept = hidden
        return hidden


class SelectiveHead(nn.Module):  # type: ignore[misc]
    """An output projection that first selects positions."""

    def __init__(self, inner: nn.Module, selector: HeadSelector) -> None:
        super().__init__()
        self.inner = inner
        self._selector = selector

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.inner(self._selector.select(hidden))  # type: ignore[no-any-return]


class SelectiveEmbedding(nn.Module):  # type: ignore[misc]
    """A tied embedding: looks tokens up as before, projects only selected positions."""

    def __init__(self, inner: nn.Module, selector: HeadSelector) -> None:
        super().__init__()
        self.inner = inner
        self._selector = selector

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.inner(tokens)  # type: ignore[no-any-return]

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self.inner.as_linear(self._selector.select(hidden))  # type: ignore[no-any-return]

    @property
    def weight(self) -> Any:
        return self.inner.weight


def substitute_head(model: nn.Module) -> tuple[HeadSelector, bool]:
    """Put a selective head into ``model``; returns its selector and whether one was found.

    Without one the model computes logits everywhere, and the caller must select rows from them.
    """
    selector = HeadSelector()
    owner = _owner_of(model, "lm_head")
    if owner is not None and isinstance(owner.lm_head, nn.Module):
        owner.lm_head = SelectiveHead(owner.lm_head, selector)
        return selector, True
    owner = _owner_of(model, "embed_tokens")
    if owner is not None and hasattr(owner.embed_tokens, "as_linear"):
        owner.embed_tokens = SelectiveEmbedding(owner.embed_tokens, selector)
        return selector, True
    return selector, False


def _owner_of(model: nn.Module, name: str) -> Any:
    """The module among ``model``, ``model.model``, ``model.language_model`` … that has attribute ``name``."""
    for path in ((), ("model",), ("language_model",), ("language_model", "model"), ("transformer",)):
        owner: Any = model
        for step in path:
            owner = getattr(owner, step, None)
        if isinstance(owner, nn.Module) and name in owner:
            return owner
    return None
