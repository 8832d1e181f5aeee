"""Choosing parsers by the marks in a model's chat template (and its added tokens).

A template shows past calls and thinking in the very form in which the model writes them, so the marks in its text
name the format. The rules are tried from the most particular mark to the most common one; the first that fits
wins. The table is repeated in docs/parsers.md.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of parsers; None: the model shows no sign of that ability."""

    tools: str | None
    reasoning: str | None


@dataclass(frozen=True, slots=True)
class _Rule:
    """All of ``marks`` in the template; or, with ``by_token``, that token in the vocabulary."""

    name: str
    marks: tuple[str, ...]
    by_token: str = ""


_TOOLS = (
    _Rule("harmony", ("<|channel|>", "<|message|>"), by_token="<|channel|>"),
    _Rule("gemma4", ("<|tool_call>", "call:"), by_token="<|tool_call>"),
    _Rule("deepseek_v4", ("｜DSML｜",), by_token="｜DSML｜"),
    _Rule("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    _Rule("kimi_k2", ("<|tool_calls_section_begin|>",), by_token="<|tool_calls_section_begin|>"),
    _Rule("minimax_m2", ("<minimax:tool_call>",)),
    _Rule("minimax", ("<tool_calls>",)),
    _Rule("poolside_v1", ("<arg_key>", "laguna")),
    _Rule("glm4", ("<arg_key>",), by_token="<arg_key>"),
    _Rule("qwen3_coder", ("<function=", "<parameter=")),
    _Rule("nemotron", ("<TOOLCALL>",)),
    _Rule("mistral", ("[TOOL_CALLS]",), by_token="[TOOL_CALLS]"),
    _Rule("functionary", (">>>", "recipient")),
    _Rule("functionary", ("<|reserved_special_token_249|>",)),
    _Rule("functionary", ("<function", "</function>", "start_tag")),
    _Rule("xlam", ("xLAM", '"arguments"')),
    _Rule("granite", ("<|start_of_role|>", "tool_call")),
    _Rule("hermes", ("<tool_call>",)),
    _Rule("llama4", ("<|header_start|>", "tools")),
    _Rule("pythonic", ("[func_name1(params_name1=params_value1",)),
    _Rule("llama3", ("<|start_header_id|>", "ipython", "tools")),
)
_REASONING = (
    _Rule("harmony", ("<|channel|>", "<|message|>"), by_token="<|channel|>"),
    _Rule("gemma4", ("<|channel>",), by_token="<|channel>"),
    _Rule("mistral", ("[THINK]",), by_token="[THINK]"),
    _Rule("think", ("<think>",), by_token="<think>"),
    _Rule("think", ("</think>",), by_token="</think>"),
)


def choose(chat_template: str, added_tokens: Container[str] = ()) -> Choice:
    """Parsers for a model.

    Args:
        chat_template: source text of the template.
        added_tokens: texts of the tokens that the tokenizer adds to its plain vocabulary, special or not.
    """
    return Choice(_first(_TOOLS, chat_template, added_tokens), _first(_REASONING, chat_template, added_tokens))


def _first(rules: tuple[_Rule, ...], template: str, added_tokens: Container[str]) -> str | None:
    for rule in rules:
        if all(mark in template for mark in rule.marks):
            return rule.name
    return next((rule.name for rule in rules if rule.by_token and rule.by_token in added_tokens), None)
