"""Which parsers a chat template's marks choose."""

from __future__ import annotations

import pytest

from headrace.text import reasoning, tools
from headrace.text.tools import detect
from headrace.text.tools.detect import Choice, choose

HERMES = 'return a json object within <tool_call></tool_call>: <tool_call>\n{"name": …}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "added", "choice"),
    [
        ("{{ messages }}", [], Choice(None, None)),
        (HERMES, [], Choice("hermes", None)),
        (HERMES + "content.split('</think>')", [], Choice("hermes", "think")),
        ("<tool_call>\n<function=f>\n<parameter=p>", ["<think>"], Choice("qwen3_coder", "think")),
        ("<tool_call>{name}<arg_key>", [], Choice("glm4", None)),
        ("laguna_glm_thinking <tool_call>{name}<arg_key> <think>", [], Choice("poolside_v1", "think")),
        ("<|channel|>analysis<|message|>", [], Choice("harmony", "harmony")),
        ("<|tool_call>call: <|channel>thought", [], Choice("gemma4", "gemma4")),
        ("[TOOL_CALLS] [THINK]", [], Choice("mistral", "mistral")),
        ("<|im_middle|>", ["<|tool_calls_section_begin|>"], Choice("kimi_k2", None)),
        ("<｜tool▁calls▁begin｜> <think>", [], Choice("deepseek_v3", "think")),
        ("<minimax:tool_call> <think>", [], Choice("minimax_m2", "think")),
        ("<TOOLCALL> <think>", [], Choice("nemotron", "think")),
        ("<|start_of_role|> <tool_call>", [], Choice("granite", None)),
        ("<|start_header_id|>ipython {% if tools %}", [], Choice("llama3", None)),
        ("<|header_start|> {% if tools %}", [], Choice("llama4", None)),
        (">>>${recipient}", [], Choice("functionary", None)),
    ],
)
def test_choice(template: str, added: list[str], choice: Choice) -> None:
    assert choose(template, added) == choice


def test_every_choice_exists() -> None:
    assert {rule.name for rule in detect._TOOLS} <= set(tools.names())
    assert {rule.name for rule in detect._REASONING} <= set(reasoning.names())
