"""What every route needs, in one frozen object made by the app factory and kept in ``app.state.services``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request

from headrace.api.dashboard.watchers import Watchers
from headrace.api.embeddings.models import TextModels
from headrace.api.fields import shown
from headrace.api.grammar_check import GrammarCheck
from headrace.api.limits import ModelLimits, model_limits
from headrace.api.parsers import Parsers
from headrace.api.responses.running import RunningResponses
from headrace.api.responses.store import ResponseStore
from headrace.config import GenerationDefaults, ServerConfig
from headrace.errors import InternalFault, ModelNotFound
from headrace.gateway.live import Live
from headrace.gateway.pipeline import Pipeline
from headrace.gateway.service import EngineClient, RequestMetrics
from headrace.text.model_text import ModelText


@dataclass(frozen=True, slots=True)
class Services:
    """The server behind the routes."""

    config: ServerConfig
    engine: EngineClient
    text: ModelText
    metrics: RequestMetrics
    pipeline: Pipeline
    defaults: GenerationDefaults
    parsers: Parsers
    responses: ResponseStore
    grammars: GrammarCheck
    text_models: TextModels
    live: Live
    watchers: Watchers = field(default_factory=Watchers)
    running_responses: RunningResponses = field(default_factory=RunningResponses)
    started_at: float = field(default_factory=time.time)

    def model_limits(self) -> ModelLimits:
        """``NotReady`` until a worker has told its limits."""
        return model_limits(self.engine.state(), self.text.tokenizer.vocab_size)

    def pipelines(self) -> list[tuple[str, Pipeline]]:
        """Every pipeline that requests may be in, with its model's name."""
        name, models = self.config.served_model_names[0], self.text_models
        return [
            (name, self.pipeline),
            (name, models.main.pipeline),
            *((side.name, side.model.pipeline) for side in models.sides),
        ]

    @property
    def num_in_flight(self) -> int:
        """Requests that any engine has."""
        return sum(pipeline.num_running for _, pipeline in self.pipelines())

    def served_name(self, name: str | None) -> str:
        """The name an answer carries: the one that was asked for, or the first when none was."""
        names = self.config.served_model_names
        if name is None:
            return names[0]
        if name not in names:
            known = ", ".join(names)
            raise ModelNotFound(f"there is no model {shown(name)} here; served: {known}", param="model")
        return name


def services(request: Request) -> Services:
    found = request.app.state.services
    if not isinstance(found, Services):
        raise InternalFault("the server is not set up")
    return found
