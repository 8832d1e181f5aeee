"""Well-formed answers of every call format, with what they mean."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.text.reasoning.events import ToolDefinition

TOOLS = (
    ToolDefinition(
        "add",
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "s": {"type": "string"},
                "deep": {"type": "object"},
                "on": {"type": ["boolean", "null"]},
            },
        },
    ),
    ToolDefinition("mul", {"type": "object", "properties": {}}),
)


@dataclass(frozen=True)
class Sample:
    """``calls`` pairs name and arguments (as values)."""

    name: str
    text: str
    calls: list[tuple[str, dict[str, object]]]
    content: str = ""
    reasoning: str = field(default="")


ADD = ("add", {"a": 1, "s": 'é\n"}] x'})
MUL: tuple[str, dict[str, object]] = ("mul", {})
BOTH = [ADD, MUL]
_JSON = r'{"a": 1, "s": "é\n\"}] x"}'
_VALUE = 'é\n"}] x'
_ADD = '{"name": "add", "arguments": ' + _JSON + "}"
_MUL = '{"name": "mul", "arguments": {}}'
_LLAMA_ADD = '{"name": "add", "parameters": ' + _JSON + "}"
_QWEN = (
    f"<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n{_VALUE}\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=mul>\n</function>\n</tool_call>"
)
_D = "｜DSML｜"
_KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    f"{_JSON}<|tool_call_end|><|tool_call_begin|>functions.mul:1<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>"
)

SAMPLES = [
    Sample("hermes", f"Sure. <tool_call>\n{_ADD}\n</tool_call>\n<tool_call>\n{_MUL}\n</tool_call>", BOTH,
           "Sure. "),
    Sample("qwen3", f"\n\n<tool_call>\n{_ADD}\n</tool_call>", [ADD]),
    Sample("nous", f"<tool_call>{_MUL}</tool_call> then <tool_call>{_MUL}</tool_call>\n", [MUL, MUL], " then "),
    Sample("qwen3_coder", f"Ok.\n{_QWEN}", BOTH, "Ok.\n"),
    Sample("step3p5", _QWEN, BOTH),
    Sample("qwen3.5", _QWEN.removeprefix("<tool_call>\n"), BOTH),
    Sample("llama3", f"{_LLAMA_ADD}; {_MUL}", BOTH),
    Sample("llama", f"Well <|python_tag|>{_LLAMA_ADD}", [ADD], "Well "),
    Sample("llama3", f"<function=add>{_JSON}</function>", [ADD]),
    Sample("llama4", f"[add(a=1, s={_VALUE!r}), mul()]", BOTH),
    Sample("llama4", f"Hm <|python_start|>[add(a=1, s={_VALUE!r})]<|python_end|>", [ADD], "Hm "),
    Sample("llama4", _LLAMA_ADD, [ADD]),
    Sample("pythonic", f'[add(a=1, s="""{_VALUE}"""), mul()]', BOTH),
    Sample("mistral", f"[TOOL_CALLS] [{_ADD}, {_MUL}]", BOTH),
    Sample("mistral", "Hm[TOOL_CALLS]add[ARGS]" + _JSON + "[TOOL_CALLS]mul[CALL_ID]abcdefghi[ARGS]{}", BOTH, "Hm"),
    Sample("mistral", "[TOOL_CALLS]add" + _JSON, [ADD]),
    Sample(
        "deepseek_v3",
        "Hm<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n" + _JSON
        + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>mul\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
        "Hm",
    ),
    Sample(
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>" + _JSON
        + "<｜tool▁call▁end｜><｜tool▁call▁begin｜>mul<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
    ),
    Sample(
        "deepseek_v4",
        f'Hm\n\n<{_D}tool_calls>\n<{_D}invoke name="add">\n'
        f'<{_D}parameter name="a" string="false">1</{_D}parameter>\n'
        f'<{_D}parameter name="s" string="true">{_VALUE}</{_D}parameter>\n</{_D}invoke>\n<{_D}invoke name="mul">\n'
        f"</{_D}invoke>\n</{_D}tool_calls>",
        BOTH,
        "Hm\n\n",
    ),
    Sample(
        "glm4",
        f"Hm\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
        f"<arg_value>{_VALUE}</arg_value>\n</tool_call>\n<tool_call>mul\n</tool_call>",
        BOTH,
        "Hm\n",
    ),
    Sample(
        "glm47",
        f"<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>s</arg_key>"
        f"<arg_value>{_VALUE}</arg_value></tool_call><tool_call>mul</tool_call>",
        BOTH,
    ),
    Sample("granite", f"<|tool_call|>[{_ADD}, {_MUL}]", BOTH),
    Sample("granite", f"Hm\n<tool_call>\n{_ADD}\n</tool_call>", [ADD], "Hm\n"),
    Sample(
        "gemma4",
        f'Hm<|tool_call>call:add{{a:1,s:<|"|>{_VALUE}<|"|>,deep:{{k:[1.5,<|"|>x<|"|>,true],<|"|>q r<|"|>:null}}}}'
        "<tool_call|><|tool_call>call:mul{}<tool_call|><|tool_response>",
        [("add", {**ADD[1], "deep": {"k": [1.5, "x", True], "q r": None}}), MUL],
        "Hm",
    ),
    Sample("kimi_k2", _KIMI, BOTH),
    Sample(
        "minimax_m2",
        f'<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="s">'
        f'{_VALUE}</parameter>\n</invoke>\n<invoke name="mul">\n</invoke>\n</minimax:tool_call>',
        BOTH,
    ),
    Sample("minimax", f"<tool_calls>\n{_ADD}\n{_MUL}\n</tool_calls>", BOTH),
    Sample("nemotron", f"Hm\n\n<TOOLCALL>[{_ADD}, {_MUL}]</TOOLCALL>", BOTH, "Hm\n\n"),
    Sample("nemotron", _QWEN, BOTH),
    Sample("functionary", "all\nHm>>>add\n" + _JSON + ">>>mul\n{}", BOTH, "Hm"),
    Sample("functionary", "Hm<|reserved_special_token_249|>add\n" + _JSON, [ADD], "Hm"),
    Sample("functionary", f"<function=add>{_JSON}</function>", [ADD]),
    Sample("xlam", f"[{_ADD}, {_MUL}]", BOTH),
    Sample(
        "harmony",
        "<|channel|>commentary<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        f"<|constrain|>json<|message|>{_JSON}<|call|><|start|>assistant to=functions.mul<|channel|>commentary"
        "<|message|>{}<|call|>",
        BOTH,
        "Hm",
    ),
]  # fmt: skip
