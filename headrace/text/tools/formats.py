"""The call formats by name, and the readers that are only a few marks around JSON or tagged arguments.

Sources: the models' published chat templates and prompt format pages; the forms are listed in docs/parsers.md.
"""

from __future__ import annotations

import secrets
import string

from headrace.text.reasoning.cursor import WHITE_SPACE, Cursor, Step
from headrace.text.tools import pythonic_calls as pythonic
from headrace.text.tools.calls import CallFormat, Calls, Reader
from headrace.text.tools.gemma_calls import CLOSE, QUOTE, RESPONSE, gemma_calls
from headrace.text.tools.json_calls import arguments, bare_objects, call_objects, objects_until
from headrace.text.tools.tag_calls import DSML, GLM, MINIMAX, QWEN, TagForm, tagged_arguments

# -- <tool_call> and its relatives ---------------------------------------------------------------------


def _qwen_function(cursor: Cursor, calls: Calls) -> Step[bool]:
    """Behind ``<function=``: NAME> and parameters; then the wrapper's end, if there is a wrapper."""
    name, end = yield from cursor.word_until((">",))
    if not end or not name.strip() or not (yield from tagged_arguments(cursor, calls, name.strip(), QWEN)):
        return False
    yield from cursor.skip(WHITE_SPACE)
    yield from cursor.literal("</tool_call>")
    return True


def _qwen_wrapper(cursor: Cursor, calls: Calls) -> Step[bool]:
    yield from cursor.skip(WHITE_SPACE)
    return bool((yield from cursor.literal("<function="))) and (yield from _qwen_function(cursor, calls))


def _glm_call(cursor: Cursor, calls: Calls) -> Step[bool]:
    name, end = yield from cursor.word_until(("\n", "<arg_key>", "</tool_call>"), banned="")
    if not end or not name.strip() or any(char in WHITE_SPACE + "<{" for char in name.strip()):
        return False
    cursor.advance(-len(end))
    return (yield from tagged_arguments(cursor, calls, name.strip(), GLM))


def _function_tag(cursor: Cursor, calls: Calls) -> Step[bool]:
    """Behind ``<function=``: NAME>{…}</function>."""
    name, end = yield from cursor.word_until((">",))
    if not end or not name.strip():
        return False
    yield from cursor.skip(WHITE_SPACE)
    if not (yield from arguments(cursor, calls, name.strip(), closers=("</function>",))):
        return False
    yield from cursor.skip(WHITE_SPACE)
    yield from cursor.literal("</function>")
    return True


# -- containers of several calls -----------------------------------------------------------------------


def _invokes(invoke: str, form: TagForm, container_ends: tuple[str, ...]) -> Reader:
    """Reader of ``<invoke name="NAME">…</invoke>`` repeated, up to the container's end."""

    def read(cursor: Cursor, calls: Calls) -> Step[bool]:
        before = calls.count
        while True:
            yield from cursor.skip(WHITE_SPACE)
            mark = yield from cursor.literal(invoke, *container_ends)
            if mark != invoke:
                return calls.count > before and (bool(mark) or cursor.at_end)
            name, end = yield from cursor.word_until(('">',))
            if not end or not name or not (yield from tagged_arguments(cursor, calls, name, form)):
                return False

    return read


_KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END = (
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
_KIMI_SECTION, _KIMI_SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def _kimi_section(cursor: Cursor, calls: Calls) -> Step[bool]:
    """Repeated ``<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``."""
    before = calls.count
    while True:
        yield from cursor.skip(WHITE_SPACE)
        mark = yield from cursor.literal(_KIMI_BEGIN, _KIMI_SECTION_END)
        if mark != _KIMI_BEGIN:
            return calls.count > before and (bool(mark) or cursor.at_end)
        if not (yield from _kimi_call(cursor, calls)):
            return False


def _kimi_call(cursor: Cursor, calls: Calls) -> Step[bool]:
    call_id, end = yield from cursor.word_until((_KIMI_ARGUMENTS,))
    call_id = call_id.strip()
    name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id.removeprefix("functions.")
    if not end or not name:
        return False
    yield from cursor.skip(WHITE_SPACE)
    model_id = call_id if ":" in call_id else ""
    borders = (_KIMI_BEGIN, _KIMI_SECTION_END)
    if not (yield from arguments(cursor, calls, name, (_KIMI_END,), borders, model_id)):
        return False
    yield from cursor.skip(WHITE_SPACE)
    yield from cursor.literal(_KIMI_END)
    return True


_DEEPSEEK_SECTION, _DEEPSEEK_SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _deepseek_section(cursor: Cursor, calls: Calls) -> Step[bool]:
    before = calls.count
    while True:
        yield from cursor.skip(WHITE_SPACE)
        mark = yield from cursor.literal(_DEEPSEEK_BEGIN, _DEEPSEEK_SECTION_END)
        if mark != _DEEPSEEK_BEGIN:
            return calls.count > before and (bool(mark) or cursor.at_end)
        if not (yield from _deepseek_call(cursor, calls)):
            return False


def _deepseek_call(cursor: Cursor, calls: Calls) -> Step[bool]:
    """V3.1 writes ``NAME<sep>{…}``; V3 and R1 write ``function<sep>NAME``, then the JSON fenced by back ticks."""
    name, end = yield from cursor.word_until((_DEEPSEEK_SEP,))
    if not end:
        return False
    yield from cursor.skip(WHITE_SPACE)
    is_fenced = (yield from cursor.char()) != "{"
    if is_fenced:
        name, end = yield from cursor.word_until(("\n",), banned="")
        yield from cursor.skip(WHITE_SPACE)
        yield from cursor.literal("```json", "```")
        yield from cursor.skip(WHITE_SPACE)
    borders = (_DEEPSEEK_BEGIN, _DEEPSEEK_SECTION_END)
    if not end or not name.strip():
        return False
    if not (yield from arguments(cursor, calls, name.strip(), (_DEEPSEEK_END,), borders)):
        return False
    yield from cursor.skip(WHITE_SPACE)
    if is_fenced and (yield from cursor.literal("```")):
        yield from cursor.skip(WHITE_SPACE)
    yield from cursor.literal(_DEEPSEEK_END)
    return True


# -- mistral, llama, functionary -----------------------------------------------------------------------

_TOOL_CALLS = "[TOOL_CALLS]"
_ID_CHARS = string.ascii_letters + string.digits


def _mistral_id() -> str:
    """Mistral's templates accept only nine letters or digits."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


def _mistral_calls(cursor: Cursor, calls: Calls) -> Step[bool]:
    """Behind ``[TOOL_CALLS]``: the old array of objects, or NAME, perhaps [CALL_ID]ID, [ARGS]{…}."""
    yield from cursor.skip(WHITE_SPACE)
    if (yield from cursor.char()) in ("[", "{"):
        before = calls.count
        return (yield from call_objects(cursor, calls, ())) and calls.count > before
    name, end = yield from cursor.word_until(("[ARGS]", "[CALL_ID]", "{"))
    call_id = ""
    if end == "[CALL_ID]":
        call_id, end = yield from cursor.word_until(("[ARGS]", "{"))
    if end == "{":
        cursor.advance(-1)
    if not end or not name.strip() or any(char in WHITE_SPACE for char in name.strip()):
        return False
    yield from cursor.skip(WHITE_SPACE)
    return (yield from arguments(cursor, calls, name.strip(), borders=(_TOOL_CALLS,), call_id=call_id))


def _llama4_calls(cursor: Cursor, calls: Calls) -> Step[bool]:
    """A pythonic list, or objects; between ``<|python_start|>`` and ``<|python_end|>`` or without marks."""
    yield from cursor.skip(WHITE_SPACE)
    reader = bare_objects if (yield from cursor.char()) == "{" else pythonic.pythonic_calls
    if not (yield from reader(cursor, calls)):
        return False
    yield from cursor.skip(WHITE_SPACE)
    yield from cursor.literal("<|python_end|>")
    return True


def _marked_objects(cursor: Cursor, calls: Calls) -> Step[bool]:
    before = calls.count
    return (yield from call_objects(cursor, calls, ())) and calls.count > before


_RECIPIENT, _V2_RECIPIENT = ">>>", "<|reserved_special_token_249|>"


def _functionary_message(cursor: Cursor, calls: Calls) -> Step[bool]:
    """RECIPIENT, a line end, and the message: content for "all", arguments for a declared tool."""
    recipient, end = yield from cursor.word_until(("\n",), banned="")
    recipient = recipient.strip()
    if end and recipient == "all":
        return True
    if not end or not calls.is_declared(recipient):
        return False
    yield from cursor.skip(WHITE_SPACE)
    return (yield from arguments(cursor, calls, recipient, borders=(_RECIPIENT, _V2_RECIPIENT)))


# -- the table -----------------------------------------------------------------------------------------


_HERMES = CallFormat({"<tool_call>": objects_until("</tool_call>")}, closers=frozenset({"</tool_call>"}))
_QWEN_XML = CallFormat(
    {"<tool_call>": _qwen_wrapper, "<function=": _qwen_function}, closers=frozenset({"</tool_call>"})
)
_GLM = CallFormat(
    {"<tool_call>": _glm_call},
    closers=frozenset({"</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}),
)
_LLAMA3 = CallFormat({"<|python_tag|>": _marked_objects, "<function=": _function_tag}, at_start=bare_objects)
_LLAMA4 = CallFormat(
    {"<|python_start|>": _llama4_calls, "<|python_tag|>": _llama4_calls},
    at_start=_llama4_calls,
    closers=frozenset({"<|python_end|>"}),
    max_held=pythonic.MAX_HELD_CHARS,
)
_PYTHONIC = CallFormat({}, at_start=pythonic.pythonic_calls, max_held=pythonic.MAX_HELD_CHARS)
_MISTRAL = CallFormat(
    {_TOOL_CALLS: _mistral_calls}, closers=frozenset({"[ARGS]", "[CALL_ID]"}), new_id=_mistral_id
)
_DEEPSEEK = CallFormat(
    {_DEEPSEEK_SECTION: _deepseek_section},
    closers=frozenset({_DEEPSEEK_SECTION_END, _DEEPSEEK_BEGIN, _DEEPSEEK_SEP, _DEEPSEEK_END}),
)
_DSML_ENDS = ("</｜DSML｜tool_calls>", "</｜DSML｜function_calls>")
_dsml_invokes = _invokes('<｜DSML｜invoke name="', DSML, _DSML_ENDS)
_DEEPSEEK_V4 = CallFormat(
    {"<｜DSML｜tool_calls>": _dsml_invokes, "<｜DSML｜function_calls>": _dsml_invokes},
    closers=frozenset({"｜DSML｜"}),
)
_MINIMAX = CallFormat(
    {
        "<minimax:tool_call>": _invokes('<invoke name="', MINIMAX, ("</minimax:tool_call>",)),
        "<tool_calls>": objects_until("</tool_calls>"),
    },
    closers=frozenset({"</minimax:tool_call>", "</tool_calls>"}),
)
_GRANITE = CallFormat(
    {
        "<|tool_call|>": _marked_objects,  # nothing closes it
        "<tool_call>": objects_until("</tool_call>"),
        "<function_call>": objects_until("</function_call>"),
    },
    closers=frozenset({"</tool_call>"}),
)
_GEMMA4 = CallFormat({"<|tool_call>": gemma_calls}, closers=frozenset({CLOSE, QUOTE, RESPONSE}))
_KIMI = CallFormat(
    {_KIMI_SECTION: _kimi_section}, closers=frozenset({_KIMI_SECTION_END, _KIMI_BEGIN, _KIMI_ARGUMENTS, _KIMI_END})
)
_NEMOTRON = CallFormat(
    {"<TOOLCALL>": objects_until("</TOOLCALL>"), "<tool_call>": _qwen_wrapper},
    closers=frozenset({"</TOOLCALL>", "</tool_call>"}),
)
_FUNCTIONARY = CallFormat(
    {_RECIPIENT: _functionary_message, _V2_RECIPIENT: _functionary_message, "<function=": _function_tag},
    at_start=_functionary_message,
)
_XLAM = CallFormat({}, at_start=bare_objects)

FORMATS: dict[str, CallFormat] = {
    **dict.fromkeys(("hermes", "nous", "qwen", "qwen3"), _HERMES),
    **dict.fromkeys(("qwen3_coder", "qwen3_xml", "qwen3_5", "step3p5"), _QWEN_XML),
    **dict.fromkeys(("llama", "llama3", "llama3_json"), _LLAMA3),
    **dict.fromkeys(("llama4", "llama4_pythonic", "llama4_json"), _LLAMA4),
    "mistral": _MISTRAL,
    **dict.fromkeys(("deepseek", "deepseek_v3", "deepseek_v31", "deepseek_r1"), _DEEPSEEK),
    **dict.fromkeys(("deepseek_v32", "deepseek_v4"), _DEEPSEEK_V4),
    **dict.fromkeys(("glm4", "glm45", "glm47", "poolside_v1"), _GLM),
    "granite": _GRANITE,
    "gemma4": _GEMMA4,
    **dict.fromkeys(("kimi", "kimi_k2"), _KIMI),
    **dict.fromkeys(("minimax", "minimax_m2"), _MINIMAX),
    "nemotron": _NEMOTRON,
    "functionary": _FUNCTIONARY,
    "xlam": _XLAM,
    "pythonic": _PYTHONIC,
}
