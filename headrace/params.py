"""Sampling parameters: what one request asks of the sampler, validated and complete.

Made by the API layer (which turns each dialect's spelling and defaults into this one), sent to the worker
unchanged, read by the scheduler (lengths, end tokens) and by the sampler (everything else).
"""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20


class Grammar(msgspec.Struct, frozen=True):
    """A form that the output must have, from its first token to its end.

    ``text``: JSON, llguidance's ``{"grammars": [...]}``; built in ``headrace.text.grammars``.
    """

    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Resolved parameters of one request; every sequence of the request shares them.

    Attributes:
        max_tokens: output tokens at most, >= 0 (0 only with ``prompt_logprobs``/echo).
        min_tokens: no stop token is sampled before this many output tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of most likely tokens with at least this mass; 1 is off.
        min_p: drop tokens below ``min_p`` times the most likely one's probability; 0 is off.
        repetition_penalty: CTRL-style divisor on tokens seen in prompt or output; 1 is off.
        presence_penalty, frequency_penalty: OpenAI's, over output tokens only; 0 is off.
        logit_bias: token id -> added to the logit (-100 bans, in effect).
        allowed_token_ids: only these may be sampled; empty is off.
        seed: of the counter-based random bits; the gateway draws one when the client sends none.
        stop_token_ids: a sampled token of these ends the sequence (end tokens unless ``ignore_eos``,
            plus what the client named).
        logprobs: None: not asked; k >= 0: the chosen token's logprob and the k most likely ones.
        prompt_logprobs: the same for prompt positions.
        grammar: only tokens that it allows may be sampled; None: any.
        embed: the hidden state at the prompt's last token is wanted instead of output; ``max_tokens`` is 1.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    embed: bool = False

    @property
    def uses_history(self) -> bool:
        """Whether sampling needs the tokens so far (penalties)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def sequence_seed(seed: int, index: int) -> int:
    """Seed of the ``index``-th sequence of a request (0 keeps the request's own): splitmix64's increment."""
    return (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
