"""Messages in Anthropic's form -> the chat form that templates read.

    user [tool_result, tool_result, text]      ->  tool, tool, user
    assistant [thinking, text, tool_use]       ->  assistant with reasoning_content, content, tool_calls
    system "ab" = [text "a", text "b"]         ->  system, at the beginning; in the middle it stays where it is

Text blocks that follow each other are joined without a separator. A final assistant message is continued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.api.anthropic.schema import MessagesFields, PromptFields
from headrace.api.fields import shown
from headrace.api.openai.schema import ChatFields
from headrace.api.openai.thinking import effort_variables, switch_of
from headrace.api.openai.tools import check_function
from headrace.errors import InvalidRequest
from headrace.text.stop_strings import validate_stops

Blocks = list[dict[str, Any]]


def chat_fields(fields: PromptFields, template_of: Callable[[bool], str], thinks: bool) -> ChatFields:
    """The same request in the chat form.

    ``template_of(with tools)`` is the model's template; ``thinks``: its thinking is recognised.
    """
    budget = _budget(fields.thinking)
    omits_thinking(fields)
    messages = _messages(fields)
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.tools or ())]
    choice, parallel = _tool_choice(fields)
    is_open = messages[-1]["role"] == "assistant"
    if is_open and "tool_calls" in messages[-1]:
        raise InvalidRequest(
            "the last message has tool_use blocks; their tool_result blocks must follow", param="messages"
        )
    sampling: dict[str, Any] = {}
    if isinstance(fields, MessagesFields):
        sampling = {
            "max_tokens": fields.max_tokens,
            "stream": fields.stream,
            "stop": list(validate_stops(fields.stop_sequences, "stop_sequences")) or None,
            "temperature": fields.temperature,
            "top_p": fields.top_p,
            "top_k": fields.top_k,
        }
    return ChatFields(
        model=fields.model,
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        continue_final_message=is_open or None,
        chat_template_kwargs=_template_variables(fields, template_of(bool(tools))) or None,
        thinking_token_budget=budget if thinks else None,
        # With thinking off, what a model thinks all the same (its template cannot stop it) is left out.
        include_reasoning=(fields.thinking or {}).get("type") != "disabled",
        response_format=_response_format(fields.output_config),
        **sampling,
    )


# -- messages ------------------------------------------------------------------------------------------


def _messages(fields: PromptFields) -> list[dict[str, Any]]:
    if not fields.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    result: list[dict[str, Any]] = []
    if fields.system:
        result.append({"role": "system", "content": _text(fields.system, "system")})
    for position, message in enumerate(fields.messages):
        where = f"messages[{position}]"
        role, content = message.get("role"), message.get("content")
        blocks: Blocks = (
            [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content, where)
        )
        if role == "user":
            result += _user(blocks, where)
        elif role == "assistant":
            result.append(_assistant(blocks, where))
        elif role == "system":
            result.append({"role": "system", "content": _text(blocks, where)})
        else:
            raise InvalidRequest(
                f'{where}.role must be "user" or "assistant", not {shown(role)}', param="messages"
            )
    return result


def _blocks(content: object, where: str) -> Blocks:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise InvalidRequest(f"{where}.content must be a string or a list of blocks", param="messages")
    return content


def _text(content: object, where: str) -> str:
    """Text of a string or of text blocks."""
    if isinstance(content, str):
        return content
    param = "system" if where == "system" else "messages"
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text blocks", param=param)
    texts: list[str] = []
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidRequest(f"{where}[{i}] must be a block, not {shown(block)}", param=param)
        if block.get("type") != "text":
            raise _not_text(block, f"{where}[{i}]", param)
        texts.append(_string(block, "text", f"{where}[{i}]", param))
    return "".join(texts)


def _not_text(block: dict[str, Any], where: str, param: str = "messages") -> InvalidRequest:
    return InvalidRequest(
        f"{where}: this model takes text only, not a block of type {shown(block.get('type'))}", param=param
    )


def _string(block: dict[str, Any], field: str, where: str, param: str = "messages") -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{field} must be a string, not {shown(value)}", param=param)
    return value


def _user(blocks: Blocks, where: str) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        kind = block.get("type")
        if kind == "tool_result":
            result.append(_tool_result(block, at))
        elif kind == "text":
            text = _string(block, "text", at)
            if result and result[-1]["role"] == "user":
                result[-1]["content"] += text
            else:
                result.append({"role": "user", "content": text})
        else:
            raise _not_text(block, at)
    return result or [{"role": "user", "content": ""}]


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool's message; templates know no failed results, so a failed one begins with a word that says so."""
    content, is_error = block.get("content"), block.get("is_error")
    text = _text("" if content is None else content, f"{where}.content")
    if is_error is not None and not isinstance(is_error, bool):
        raise InvalidRequest(f"{where}.is_error must be true or false, not {shown(is_error)}", param="messages")
    if is_error:
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": text}


def _assistant(blocks: Blocks, where: str) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: Blocks = []
    for i, block in enumerate(blocks):
        at = f"{where}.content[{i}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", at))
            case "thinking":
                thoughts.append(_string(block, "thinking", at))
            case "redacted_thinking":
                pass  # encrypted by its maker: nobody else can read it
            case "tool_use":
                calls.append(_tool_use(block, at))
            case _:
                raise _not_text(block, at)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.input must be an object, not {shown(arguments)}", param="messages")
    function = {"name": _string(block, "name", where), "arguments": arguments}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


# -- tools, thinking, format ---------------------------------------------------------------------------


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise InvalidRequest(
            f"{where}.type {shown(kind)} is not supported; declare the tool with name and input_schema",
            param="tools",
        )
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where}.input_schema must be an object, not {shown(schema)}", param="tools")
    function: dict[str, Any] = {"name": check_function(tool, where, "input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": {**function, "parameters": schema}}


def _tool_choice(fields: PromptFields) -> tuple[str | dict[str, Any] | None, bool | None]:
    """The choice in the chat form, and whether several calls may come."""
    choice = fields.tool_choice
    if choice is None:
        return None, None
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise InvalidRequest(
            f"tool_choice.disable_parallel_tool_use must be true or false, not {shown(single)}",
            param="tool_choice",
        )
    parallel = False if single else None
    kind = choice.get("type")
    if kind in ("any", "tool") and not fields.tools:
        raise InvalidRequest(f"tool_choice.type is {shown(kind)}, but tools declares none", param="tool_choice")
    match kind:
        case "auto" | "none":
            return str(kind), parallel
        case "any":
            return "required", parallel
        case "tool":
            name = _string(choice, "name", "tool_choice", "tool_choice")
            return {"type": "function", "function": {"name": name}}, parallel
    raise InvalidRequest(
        f'tool_choice.type must be "auto", "any", "tool" or "none", not {shown(choice.get("type"))}',
        param="tool_choice",
    )


def _template_variables(fields: PromptFields, template: str) -> dict[str, object]:
    """Thinking and effort, as far as the template knows them; both are wishes in this dialect."""
    variables: dict[str, object] = {}
    effort = (fields.output_config or {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidRequest(
                f"output_config.effort must be a string, not {shown(effort)}", param="output_config"
            )
        if switch_of(template) or "reasoning_effort" in template:
            variables |= effort_variables(template, effort, "output_config.effort")
    if fields.thinking is not None:
        kind = fields.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise InvalidRequest(
                f'thinking.type must be "enabled", "disabled" or "adaptive", not {shown(kind)}', param="thinking"
            )
        if switch := switch_of(template):
            variables[switch] = kind != "disabled"
    return variables


def _budget(thinking: dict[str, Any] | None) -> int | None:
    """Tokens that thinking may take; only ``enabled`` has a budget."""
    if thinking is None or thinking.get("type") != "enabled":
        return None
    budget = thinking.get("budget_tokens")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise InvalidRequest(
            f"thinking.budget_tokens must be an integer of at least 1, not {shown(budget)}", param="thinking"
        )
    return budget


def omits_thinking(fields: PromptFields) -> bool:
    """Whether thinking blocks are to be shown without their text."""
    display = (fields.thinking or {}).get("display")
    if display not in (None, "summarized", "omitted"):
        raise InvalidRequest(
            f'thinking.display must be "summarized" or "omitted", not {shown(display)}', param="thinking"
        )
    return display == "omitted"


def _response_format(config: dict[str, Any] | None) -> dict[str, Any] | None:
    found = (config or {}).get("format")
    if found is None:
        return None
    if not isinstance(found, dict) or found.get("type") != "json_schema":
        kind = shown(found.get("type") if isinstance(found, dict) else found)
        raise InvalidRequest(f'output_config.format.type must be "json_schema", not {kind}', param="output_config")
    if found.get("schema") is None:
        raise InvalidRequest("output_config.format.schema is required", param="output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": found.get("schema")}}
