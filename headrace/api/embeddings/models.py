"""Which model answers ``/v1/embeddings`` and ``/v1/rerank``, by the name that a request gives.

Without flags the main model does both. ``--embedding-model`` answers to its own name and where no name is given;
the main model still answers to its names. ``--rerank-model`` does so for rerank; without it documents are compared
by the embeddings of the model named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.api.embeddings.model import MAX_WINDOW, TextModel
from headrace.api.embeddings.scoring import EmbeddingScorer, Scorer, YesNoScorer
from headrace.api.fields import shown
from headrace.checkpoint.pooling import PoolingFacts, read_pooling
from headrace.config import EngineConfig, ServerConfig, SideModel
from headrace.errors import InvalidRequest, ModelNotFound, StartupError
from headrace.gateway.pipeline import Pipeline
from headrace.gateway.prompt_run import PipelineLimits
from headrace.gateway.service import EngineClient, RequestMetrics
from headrace.text import model_text
from headrace.text.model_text import ModelText


@dataclass(frozen=True, slots=True)
class Side:
    """A model beside the main one, in a worker of its own."""

    role: Literal["embedding", "reranker"]
    name: str
    model: TextModel


@dataclass(frozen=True, slots=True)
class TextModels:
    """The models by their roles; ``side`` ones have a name of their own."""

    main_names: tuple[str, ...]
    main: TextModel
    side_embedding: tuple[str, TextModel] | None = None
    side_reranker: tuple[str, Scorer] | None = None

    def embedding(self, name: str | None) -> tuple[str, TextModel]:
        """Name and model for ``name``. ModelNotFound, InvalidRequest when that one makes no embeddings."""
        if self.side_embedding is not None and name in (None, self.side_embedding[0]):
            return self.side_embedding
        if name is not None and name not in self.main_names:
            raise ModelNotFound(
                f"there is no embedding model {shown(name)} here; served: {', '.join(self.names)}", param="model"
            )
        if self.main.facts.obstacle:
            raise InvalidRequest(
                f"this model makes no embeddings: {self.main.facts.obstacle}; start the server with"
                " --embedding-model",
                param="model",
            )
        return name or self.main_names[0], self.main

    def scorer(self, name: str | None) -> tuple[str, Scorer]:
        if self.side_reranker is not None and name in (None, self.side_reranker[0]):
            return self.side_reranker
        found, model = self.embedding(name)
        return found, EmbeddingScorer(model)

    @property
    def sides(self) -> list[Side]:
        """The models beside the main one."""
        found: list[Side] = []
        if self.side_embedding is not None:
            found.append(Side("embedding", *self.side_embedding))
        if self.side_reranker is not None:
            name, scorer = self.side_reranker
            found.append(Side("reranker", name, scorer.model))
        return found

    @property
    def names(self) -> list[str]:
        """Every name that a request may give, the main model's first."""
        return list(dict.fromkeys((*self.main_names, *(side.name for side in self.sides))))


@dataclass(frozen=True, slots=True)
class _Maker:
    config: ServerConfig
    metrics: RequestMetrics
    limits: PipelineLimits

    def model(self, engine: EngineClient, text: ModelText, facts: PoolingFacts, max_queue: int) -> TextModel:
        isolate = self.config.prefix_isolation == "key"
        bounds = (self.config.embedding_max_length, self.config.max_prompt_tokens)
        return TextModel(
            engine=engine,
            text=text,
            pipeline=Pipeline(engine, text.tokenizer, self.metrics, self.limits, isolate_keys=isolate),
            facts=facts,
            max_length=min((bound for bound in bounds if bound is not None), default=None),
            truncates=self.config.embedding_truncates,
            window=max(1, min(MAX_WINDOW, max_queue)),
        )

    def side(self, flag: str, side: SideModel, engine: EngineClient) -> TextModel:
        facts = read_pooling(Path(side.engine.model))
        if facts.obstacle:
            raise StartupError(f"{flag} {side.name}: {facts.obstacle}")
        return self.model(engine, model_text.load(side.engine.model), facts, side.engine.max_queue)


def make_text_models(
    config: ServerConfig,
    engine: EngineClient,
    text: ModelText,
    metrics: RequestMetrics,
    limits: PipelineLimits,
    sides: Mapping[str, EngineClient],
) -> TextModels:
    """``sides``: engines of ``config.embedding`` and ``config.reranker`` by these names. Raises StartupError."""
    maker = _Maker(config, metrics, limits)
    main = maker.model(engine, text, _main_facts(config.engine), config.engine.max_queue)
    embedding = reranker = None
    if config.embedding is not None:
        model = maker.side("--embedding-model", config.embedding, sides["embedding"])
        embedding = (config.embedding.name, model)
    if config.reranker is not None:
        model = maker.side("--rerank-model", config.reranker, sides["reranker"])
        reranker = (config.reranker.name, _scorer(config.reranker, model))
    return TextModels(config.served_model_names, main, embedding, reranker)


def _scorer(side: SideModel, model: TextModel) -> Scorer:
    if model.facts.is_declared:
        return EmbeddingScorer(model)
    try:
        return YesNoScorer(model)
    except ValueError as error:
        raise StartupError(f"--rerank-model {side.name}: {error}") from None


def _main_facts(engine: EngineConfig) -> PoolingFacts:
    path = Path(engine.model)
    return read_pooling(path) if path.exists() else PoolingFacts()
