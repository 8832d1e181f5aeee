"""How each call format is written, seen from the writer's side; ``headrace.text.tools.formats`` reads the same.

A call is ``before NAME middle ARGUMENTS after``; several stand ``between`` each other; ``begin`` and ``end`` are
around them all. The forms follow the models' published templates to the line break: a model that is led through
a form it was not trained on answers worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

MAX_CALLS = 16  # of one answer: a small model may never stop by itself


class Arguments(Enum):
    OBJECT = "a JSON object"
    KEYWORDS = "key=JSON, key=JSON"
    TAGS = "one tag per key"


@dataclass(frozen=True, slots=True)
class CallForm:
    """One format.

    Attributes:
        quotes_name: the name is a JSON string.
        arguments: how they are written.
        key, value, closing: for tags: around a key and its value. ``{key}`` and ``{is_text}`` ("true", "false")
            are filled in.
        max_calls: in one answer.
    """

    before: str
    middle: str
    after: str
    begin: str = ""
    between: str = ""
    end: str = ""
    quotes_name: bool = False
    arguments: Arguments = Arguments.OBJECT
    opening: str = ""
    closing: str = ""
    max_calls: int = MAX_CALLS


def _objects(begin: str, between: str, end: str, key: str = "arguments") -> CallForm:
    """JSON objects with a name and arguments."""
    return CallForm('{"name": ', f', "{key}": ', "}", begin, between, end, quotes_name=True)


def _wrapped(opening: str, closing: str) -> CallForm:
    return CallForm(f'{opening}\n{{"name": ', ', "arguments": ', f"}}\n{closing}", between="\n", quotes_name=True)


def _dsml(container: str) -> CallForm:
    return CallForm(
        '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n",
        begin=f"<｜DSML｜{container}>\n", end=f"</｜DSML｜{container}>",
        arguments=Arguments.TAGS,
        opening='<｜DSML｜parameter name="{key}" string="{is_text}">', closing="</｜DSML｜parameter>\n",
    )  # fmt: skip


_HERMES = _wrapped("<tool_call>", "</tool_call>")
_LLAMA = _objects("", "; ", "", "parameters")
_PYTHONIC = CallForm("", "(", ")", "[", ", ", "]", arguments=Arguments.KEYWORDS)
_QWEN_XML = CallForm(
    "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", between="\n",
    arguments=Arguments.TAGS, opening="<parameter={key}>\n", closing="\n</parameter>\n",
)  # fmt: skip
_GLM = CallForm(
    "<tool_call>", "\n", "</tool_call>", between="\n",
    arguments=Arguments.TAGS, opening="<arg_key>{key}</arg_key>\n<arg_value>", closing="</arg_value>\n",
)  # fmt: skip
_MINIMAX = CallForm(
    '<invoke name="', '">\n', "</invoke>\n", begin="<minimax:tool_call>\n", end="</minimax:tool_call>",
    arguments=Arguments.TAGS, opening='<parameter name="{key}">', closing="</parameter>\n",
)  # fmt: skip
_MISTRAL_OLD = _objects("[TOOL_CALLS][", ", ", "]")
_MISTRAL = CallForm("[TOOL_CALLS]", "[ARGS]", "")
_DEEPSEEK = CallForm(
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>", between="\n", end="<｜tool▁calls▁end｜>",
)  # fmt: skip
_DEEPSEEK_31 = CallForm(
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>",
)  # fmt: skip
_KIMI = CallForm(
    "<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>",
    begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>", max_calls=1,  # calls are numbered
)  # fmt: skip
_GRANITE = _objects("<|tool_call|>[", ", ", "]")
_HARMONY = CallForm("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", max_calls=1)

_FORMS: dict[str, CallForm] = {
    **dict.fromkeys(("hermes", "nous", "qwen", "qwen3"), _HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "qwen3_5", "step3p5"), _QWEN_XML),
    **dict.fromkeys(("llama", "llama3", "llama3_json", "llama4_json"), _LLAMA),
    **dict.fromkeys(("llama4", "llama4_pythonic", "pythonic"), _PYTHONIC),
    **dict.fromkeys(("deepseek", "deepseek_v3", "deepseek_r1"), _DEEPSEEK),
    "deepseek_v31": _DEEPSEEK_31,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    **dict.fromkeys(("glm4", "glm45", "glm47", "poolside_v1"), _GLM),
    **dict.fromkeys(("kimi", "kimi_k2"), _KIMI),
    "minimax_m2": _MINIMAX,
    "minimax": _objects("<tool_calls>\n", "\n", "\n</tool_calls>"),
    "nemotron": _objects("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "functionary": CallForm("", "\n", "", between=">>>"),
    "xlam": _objects("[", ", ", "]"),
    **dict.fromkeys(("harmony", "gpt_oss", "openai"), _HARMONY),
}


def form_of(name: str, has_token: Callable[[str], bool]) -> CallForm | None:
    """The form of the tool-call parser ``name`` for a vocabulary; None: none is known.

    Where a name stands for two generations of a form, the one whose marks are tokens is taken.
    """
    plain = name.lower().replace("-", "_").replace(".", "_")
    if plain == "mistral":
        return _MISTRAL if has_token("[ARGS]") else _MISTRAL_OLD
    if plain == "granite":
        return _GRANITE if has_token("<|tool_call|>") else _HERMES
    return _FORMS.get(plain)
