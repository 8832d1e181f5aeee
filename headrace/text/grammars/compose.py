"""A whole answer's grammar: a thinking block first where the model thinks, then content, or calls.

    start: [thinking] ( content | calls )        content and arguments are grammars of their own, named in "@name"

A grammar speaks of the answer alone. Where the prompt has opened the thinking block, the answer begins inside it.
Harmony models head every message with its channel, so content there is the message of the final channel.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from headrace.errors import GrammarError
from headrace.params import Grammar
from headrace.text import reasoning as reasoning_parsers
from headrace.text.grammars.call_forms import form_of
from headrace.text.grammars.calls import CallGrammar
from headrace.text.grammars.content import Entry, quoted
from headrace.text.reasoning.events import ToolDefinition
from headrace.text.tokenizer import Tokenizer
from headrace.text.tools import is_harmony

_ANY = "ANY_TEXT: /(?s:.*)/"
_GAP = "GAP: /\\n{0,4}/"
_HARMONY = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")


def parts_of(grammar: Grammar) -> list[Grammar]:
    """The grammars that an answer's refers to. One that nothing satisfies shows it at its own first token."""
    _, *parts = json.loads(grammar.text)["grammars"]
    return [Grammar(json.dumps({"grammars": [part]}, ensure_ascii=False)) for part in parts]


class AnswerGrammar:
    """Builds grammars for one model.

    Args:
        tokenizer: of the model.
        reasoning, tools: names of its parsers, None where it has none.
    """

    def __init__(self, tokenizer: Tokenizer, reasoning: str | None, tools: str | None) -> None:
        self._tokenizer = tokenizer
        self._reasoning = reasoning
        self._tools = tools
        self._is_harmony = any(
            name is not None and test(name)
            for name, test in ((reasoning, reasoning_parsers.is_harmony), (tools, is_harmony))
        )

    def build(
        self,
        content: Entry | None,
        tools: Sequence[ToolDefinition] = (),
        *,
        max_calls: int = 1,
        opened: bool = False,
    ) -> Grammar:
        """The grammar of an answer.

        Args:
            content: what content must be; None: the answer must be calls.
            tools: that may be called; empty: none.
            max_calls: of them in one answer, at most.
            opened: the prompt ends inside a thinking block.

        Raises GrammarError.
        """
        rules: list[str] = []
        entries: list[Entry] = []
        bodies: list[str] = []
        if content is not None:
            entries.append({"name": "content", **content})
            bodies.append(self._content_message())
        if tools:
            calls = self._calls(tools, max_calls)
            rules += calls.rules
            entries += calls.entries
            bodies.append(calls.rule)
        rules = [f"start: {self._thinking(opened)} body", f"body: {' | '.join(bodies)}", *rules]
        lark = "\n".join([*rules, *self._thinking_rules(), _ANY, _GAP, ""])
        try:
            return Grammar(json.dumps({"grammars": [{"lark_grammar": lark}, *entries]}, ensure_ascii=False))
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None

    def _calls(self, tools: Sequence[ToolDefinition], max_calls: int) -> CallGrammar:
        if self._tools is None:
            raise GrammarError(
                "no tool-call format is known for this model; the server's --tool-call-parser can name one"
            )
        form = form_of(self._tools, lambda text: self._tokenizer.token_id(text) is not None)
        if form is None:
            raise GrammarError(f"calls in the format {self._tools} cannot be forced")
        return CallGrammar(form, tools, self._literal, max_calls)

    # -- thinking

    def _content_message(self) -> str:
        if not self._is_harmony:
            return "@content"
        channel, message, _, _, constrain = map(self._literal, _HARMONY)
        return f'{channel} "final" (" " {constrain} "json")? {message} @content'

    def _thinking(self, opened: bool) -> str:
        if self._is_harmony:
            return "analysis{0,8}"
        if self._reasoning is None:
            return ""
        return "thought" if opened else f"({self._literal(self._tags()[0])} thought)?"

    def _thinking_rules(self) -> list[str]:
        if self._is_harmony:
            channel, message, _, start, _ = map(self._literal, _HARMONY)
            head = f'analysis: {channel} "analysis" {message} block {start} "assistant"'
            return [head, self._text_until(_HARMONY[2])]
        if self._reasoning is None:
            return []
        return ["thought: block GAP", self._text_until(self._tags()[1])]

    def _text_until(self, closing: str) -> str:
        """The rule of a block: any text, and what closes it."""
        if self._special(closing):
            return f"block: ANY_TEXT {self._literal(closing)}"
        return f"block[suffix={quoted(closing)}]: /(?s:.*)/"

    def _tags(self) -> tuple[str, str]:
        assert self._reasoning is not None
        return reasoning_parsers.tags_of(self._reasoning)

    # -- literals

    def _special(self, text: str) -> bool:
        token_id = self._tokenizer.token_id(text)
        return token_id is not None and self._tokenizer.is_special(token_id)

    def _literal(self, text: str) -> str:
        """Text in Lark's spelling; special tokens in it stand by their ids, since no text can spell them."""
        parts = self._tokenizer.special.split(text)
        return " ".join(quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts) or '""'
