"""LangChain and LiteLLM against a server of the scripted model: a chat, a stream and a tool call each.

Runs in an environment of its own (``benchmarks/client_suites.py`` makes it): python frameworks.py URL
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

TEXT = "ABCDEFGH"
CALL = {"a": 1, "s": "é\n"}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["a", "s"],
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}


def langchain(model: Any) -> None:
    """``model``: a chat model of LangChain."""
    answer = model.invoke("<|s05|>")
    assert answer.text == TEXT, answer
    assert answer.usage_metadata["output_tokens"] == 9, answer.usage_metadata
    chunks = list(model.stream("<|s05|>"))
    assert "".join(chunk.text for chunk in chunks) == TEXT, chunks
    bound = model.bind_tools([TOOL])
    assert [(call["name"], call["args"]) for call in bound.invoke("<|s04|>").tool_calls] == [("add", CALL)]
    whole = None
    for chunk in bound.stream("<|s04|>"):
        whole = chunk if whole is None else whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("add", CALL)], whole


def langchain_openai(url: str) -> None:
    from langchain_openai import ChatOpenAI

    common: dict[str, Any] = dict(base_url=f"{url}/v1", api_key="none", model="m", temperature=0, max_retries=0)
    langchain(ChatOpenAI(**common, stream_usage=True))
    langchain(ChatOpenAI(**common, use_responses_api=True))


def langchain_anthropic(url: str) -> None:
    from langchain_anthropic import ChatAnthropic

    langchain(ChatAnthropic(base_url=url, api_key="none", model="m", temperature=0, max_tokens=100, max_retries=0))


def litellm_openai(url: str) -> None:
    _litellm(f"{url}/v1", "openai/m")


def litellm_anthropic(url: str) -> None:
    _litellm(url, "anthropic/m")


def _litellm(base: str, model: str) -> None:
    import litellm

    def ask(script: str, **more: Any) -> Any:
        return litellm.completion(
            model=model,
            api_base=base,
            api_key="none",
            messages=[{"role": "user", "content": f"<|{script}|>"}],
            temperature=0,
            max_tokens=100,
            **more,
        )

    answer = ask("s05")
    assert answer.choices[0].message.content == TEXT and answer.usage.completion_tokens == 9, answer
    chunks = list(ask("s05", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT, chunks
    (call,) = ask("s04", tools=[TOOL]).choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == CALL, call


SUITES: tuple[Callable[[str], None], ...] = (
    langchain_openai,
    langchain_anthropic,
    litellm_openai,
    litellm_anthropic,
)


def main() -> int:
    url, faults = sys.argv[1], 0
    for suite in SUITES:
        try:
            suite(url)
        except Exception as error:  # a judge reports whatever its subject provokes
            faults += 1
            print(f"{suite.__name__}: FAILED {type(error).__name__}: {error}")
        else:
            print(f"{suite.__name__}: chat, stream and tool call are right")
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main())
