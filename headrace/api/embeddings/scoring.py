"""How rerank scores documents: by embeddings, or by a model that answers yes or no.

Embeddings: the cosine of the query's and the document's unit vectors, in [-1, 1].

Yes or no (Qwen3-Reranker): the model reads query and document in the form it was trained on, and the score is
p(yes) / (p(yes) + p(no)) of its next token. Both logits get the same bias, so that the two are the most likely
tokens and their logprobs come back; the bias leaves their ratio as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from headrace.api.embeddings.model import Asked, TextModel, hidden_states, windows
from headrace.api.embeddings.vectors import cosine, unit_vector
from headrace.errors import InvalidRequest, NotReady
from headrace.gateway.events import ScoredToken, TextDelta, Usage
from headrace.gateway.pipeline import Prompt
from headrace.gateway.sequence_text import TextOptions
from headrace.params import SamplingParams

_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BIAS = 100.0


class Scorer(Protocol):
    """Scores documents against a query."""

    model: TextModel

    async def scores(
        self, query: str, documents: Sequence[str], instruction: str | None, asked: Asked
    ) -> tuple[list[float], int]:
        """One score per document, higher is better, and the number of tokens that were read."""
        ...


class EmbeddingScorer:
    """See the module."""

    def __init__(self, model: TextModel) -> None:
        self.model = model

    async def scores(
        self, query: str, documents: Sequence[str], instruction: str | None, asked: Asked
    ) -> tuple[list[float], int]:
        if instruction is not None:
            raise InvalidRequest(
                "instruction needs a rerank model; this server compares embeddings", param="instruction"
            )
        facts = self.model.facts

        def inputs() -> list[list[int]]:
            return [
                self.model.encode(facts.query_prompt + query, "query", "query"),
                *(
                    self.model.encode(facts.document_prompt + text, f"documents[{i}]", "documents")
                    for i, text in enumerate(documents)
                ),
            ]

        states, used = await hidden_states(self.model, await asked.arrival.call(inputs), asked)
        first, *others = [unit_vector(state) for state in states]
        return [cosine(first, other) for other in others], used


class YesNoScorer:
    """See the module. Raises ``ValueError`` (one line) when the model's tokenizer has no such answers."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        tokenizer = model.text.tokenizer
        answers = [tokenizer.token_id(word) for word in ("yes", "no")]
        if None in answers or any(tokenizer.token_id(mark) is None for mark in ("<|im_start|>", "<|im_end|>")):
            raise ValueError("it is neither an embedding model nor one that answers yes or no (Qwen3-Reranker)")
        self._yes, self._no = (token_id for token_id in answers if token_id is not None)
        self._opening = tokenizer.encode(
            f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n", parse_special=True, add_bos=False
        )
        self._closing = tokenizer.encode(
            "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", parse_special=True, add_bos=False
        )

    async def scores(
        self, query: str, documents: Sequence[str], instruction: str | None, asked: Asked
    ) -> tuple[list[float], int]:
        prompts = await asked.arrival.call(lambda: self._prompts(query, documents, instruction or _INSTRUCTION))
        params = self._params()
        found: dict[int, float] = {}
        used = 0
        options = TextOptions(skip_special=False)
        async for first, batch in windows(self.model, [Prompt(ids, params) for ids in prompts], asked, options):
            for event in batch:
                if isinstance(event, TextDelta) and event.logprobs:
                    found[first + event.index] = self._score(event.logprobs[0])
                elif isinstance(event, Usage):
                    used += event.prompt_tokens
        if len(found) < len(documents):  # the server ends
            raise NotReady(f"{len(documents) - len(found)} documents were not scored; try again")
        return [found[index] for index in range(len(documents))], used

    def _params(self) -> SamplingParams:
        bias = {self._yes: _BIAS, self._no: _BIAS}
        return SamplingParams(max_tokens=1, temperature=0.0, logit_bias=bias, logprobs=2)

    def _prompts(self, query: str, documents: Sequence[str], instruction: str) -> list[list[int]]:
        tokenizer = self.model.text.tokenizer
        prompts = []
        for index, document in enumerate(documents):
            text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            body = tokenizer.encode(text, parse_special=False, add_bos=False, param="documents")
            where = f"documents[{index}] with the query"
            prompts.append(self.model.fitted([*self._opening, *body], where, "documents", self._closing))
        return prompts

    def _score(self, token: ScoredToken) -> float:
        top = {other.token_id: other.logprob for other in token.top if other.logprob is not None}
        yes, no = (math.exp(top[answer]) if answer in top else 0.0 for answer in (self._yes, self._no))
        return yes / (yes + no) if yes + no else 0.0
