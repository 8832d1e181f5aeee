"""Which parsers read this server's answers: by flag, or by the model's chat template."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.config import ServerConfig
from headrace.gateway.parsed_text import AnswerOptions
from headrace.text import reasoning as reasoning_parsers
from headrace.text import tools as tool_parsers
from headrace.text.model_text import ModelText
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools.answer import needs_special
from headrace.text.tools.detect import choose

PLAIN_CALLS = "hermes"
"""Of the form in which ``headrace.text.plain_calls`` writes calls for templates that know none."""


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names of the parsers in use; None: answers are not split that way."""

    tools: str | None
    reasoning: str | None

    def opening(self, prompt: str) -> str:
        """What the rendered prompt has already written of the answer's first thinking block."""
        return "" if self.reasoning is None else reasoning_parsers.opening_of(self.reasoning, prompt)

    def options(
        self,
        tools: Sequence[dict[str, Any]] | None,
        *,
        opened: str,
        whole_calls: bool,
        parallel: bool,
        hides_reasoning: bool,
    ) -> AnswerOptions | None:
        """For one request; ``tools`` are those that its template shows. None: nothing is to be parsed."""
        tool_parser = self.tools if tools else None
        if tool_parser is None and self.reasoning is None:
            return None
        return AnswerOptions(
            reasoning=self.reasoning,
            tools=tool_parser,
            definitions=tool_parsers.definitions(tools or ()),
            opened=opened,
            whole_calls=whole_calls,
            parallel=parallel,
            hides_reasoning=hides_reasoning,
        )


def choose_parsers(config: ServerConfig, text: ModelText) -> Parsers:
    """The parsers that the flags name, or that the chat template shows. Raises StartupError for unknown names."""
    added = _AddedTokens(text.tokenizer)
    template = text.chat_template
    plain = choose(template.source(), added)
    with_tools = choose(template.source(with_tools=True), added)
    found = with_tools.tools or plain.tools
    if template.is_available and not template.shows_tools:
        found = PLAIN_CALLS
    tools = _named(config.tool_call_parser, found)
    reasoning = _named(config.reasoning_parser, plain.reasoning or with_tools.reasoning)
    needs_special(reasoning, tools)  # refuses names that are not known
    return Parsers(tools, reasoning)


def kept_token_ids(options: AnswerOptions | None, tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens whose text the parsers of ``options`` must see."""
    if options is None:
        return frozenset()
    ids = (tokenizer.token_id(text) for text in needs_special(options.reasoning, options.tools))
    return frozenset(token_id for token_id in ids if token_id is not None and tokenizer.is_special(token_id))


def _named(flag: str, found: str | None) -> str | None:
    return {"auto": found, "none": None}.get(flag, flag)


class _AddedTokens(Container[str]):
    """Texts of the tokens that were added to a vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __contains__(self, text: object) -> bool:
        token_id = self._tokenizer.token_id(text) if isinstance(text, str) else None
        return token_id is not None and self._tokenizer.is_added(token_id)
