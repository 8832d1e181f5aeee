"""A tokenized request and its outputs: the plain data that crosses between gateway and worker."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from headrace.params import SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended. ``STOP`` covers end tokens and, in the gateway, stop strings."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class Timeline(msgspec.Struct, frozen=True, array_like=True):
    """What a worker notes of a traced request; times on the machine's monotonic clock, which all processes share.

    Attributes:
        queued_at: it was taken in.
        scheduled_at: it first ran in a step.
        first_token_at: its first token (of any sequence) was read.
        finished_at: this sequence's last token was read.
        prefill_steps: launches before its first token was read.
        steps: steps that gave it tokens.
        preemptions: how often it ran, and then had to wait.
    """

    queued_at: float
    scheduled_at: float
    first_token_at: float
    finished_at: float
    prefill_steps: int
    steps: int
    preemptions: int


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker needs to run one request, and to continue it after another worker died.

    Attributes:
        id: the id the client sees.
        prompt_token_ids: the whole prompt, at least one token.
        params: shared by all ``n`` sequences.
        n: number of sequences; their indices are 0 … n-1.
        priority: smaller runs first (vLLM's convention).
        key: name of the API key, for fairness between keys ("" without keys).
        cache_salt: prefixes are shared only between requests with equal salts.
        emitted: per sequence index, tokens already sent to the client (replay after a worker's death);
            generation goes on behind them.
        done: indices of sequences that already ended and must not be run again.
        traced: each sequence's finish carries a ``Timeline``.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    key: str = ""
    cache_salt: str = ""
    emitted: dict[int, list[int]] = {}
    done: list[int] = []
    traced: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs at one position: the chosen token's own, and the most likely ones, best first.

    ``top`` pairs (token id, logprob). Values are of the model's distribution before temperature and
    truncation, after penalties and logit bias.
    """

    logprob: float
    top: list[tuple[int, float]]


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence after one step (or several, merged).

    An output without tokens and without a finish reason is a sign of life: the request has left the queue
    and a chunk of its prompt was computed (it tells waiting from prefilling, for timeouts and metrics).

    Attributes:
        request_id, index: which sequence.
        token_ids: new tokens in order, the stop token included when one ended the sequence.
        logprobs: one entry per token when the request asked, else empty.
        finish_reason: set once, with the sequence's last tokens.
        cached_tokens: prompt tokens taken from the prefix cache; sent with the first output and signs of life.
        prompt_logprobs: with the first output when asked; entry i is of prompt token i (the first is None).
        error: for ``FinishReason.ERROR``: one line for the client.
        refused: the error is about what the request demands, not a fault of the engine.
        hidden: with the finish when ``params.embed`` asked: the hidden state at the prompt's last token behind the
            model's last norm, little-endian float32. Such a sequence has no tokens.
        timeline: with the finish of a traced request's sequence.
    """

    request_id: str
    index: int = 0
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str = ""
    refused: bool = False
    hidden: bytes = b""
    timeline: Timeline | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the prompt was computed, or its sequence ended before: no sign of life only."""
        return bool(self.token_ids) or self.finish_reason is not None or self.prompt_logprobs is not None
