"""Structured output against a running server: every answer parsed and validated, and what it costs.

    python benchmarks/structured_output.py --url http://127.0.0.1:8000 --model NAME
    python benchmarks/structured_output.py … --schemas 200 --concurrency 16 --max-tokens 300

First so many different generated schemas, each once, at temperature 1 with a seed; then as many free requests of
the same lengths, for the price of the masks. An answer that ended with "stop" and does not satisfy its schema is
a fault: the exit code is 1 then. Answers cut by their length are counted, not judged.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from json_schemas import Schema, is_valid, make_schema


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    schemas = [make_schema(rng) for _ in range(options.schemas)]
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with httpx.Client(base_url=options.url, headers=headers, timeout=600) as http:
        run = Run(http, options)
        answers, masked_s = run.all([run.body(schema, number) for number, schema in enumerate(schemas)])
        verdicts = [judge(answer, schema) for answer, schema in zip(answers, schemas, strict=True)]
        lengths = [answer.get("usage", {}).get("completion_tokens", 1) for answer in answers]
        _, free_s = run.all([run.body(None, number, length) for number, length in enumerate(lengths)])
    tokens = sum(lengths)
    report = {verdict: verdicts.count(verdict) for verdict in ("valid", "cut", "invalid", "refused")}
    print(json.dumps({
        **report, "tokens": tokens, "masked_tok_s": round(tokens / masked_s, 1),
        "free_tok_s": round(tokens / free_s, 1),
    }))  # fmt: skip
    for verdict, answer, schema in zip(verdicts, answers, schemas, strict=True):
        if verdict in ("invalid", "refused"):
            print(verdict, json.dumps(schema), json.dumps(answer)[:500], file=sys.stderr)
    return 1 if report["invalid"] or report["refused"] else 0


class Run:
    """Sends requests side by side."""

    def __init__(self, http: httpx.Client, options: argparse.Namespace) -> None:
        self._http = http
        self._options = options

    def body(self, schema: Schema | None, seed: int, length: int | None = None) -> dict[str, Any]:
        body = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": "Describe somebody you know, as JSON."}],
            "temperature": 1,
            "seed": seed,
            "max_tokens": length or self._options.max_tokens,
        }
        if schema is None:
            return {**body, "ignore_eos": True}
        return {**body, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    def all(self, bodies: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], float]:
        """The answers, and how long they took together."""
        began = time.perf_counter()
        with ThreadPoolExecutor(self._options.concurrency) as pool:
            answers = list(
                pool.map(lambda body: self._http.post("/v1/chat/completions", json=body).json(), bodies)
            )
        return answers, time.perf_counter() - began


def judge(answer: dict[str, Any], schema: Schema) -> str:
    if "error" in answer:
        return "refused"
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut"
    try:
        value = json.loads(choice["message"]["content"])
    except ValueError:
        return "invalid"
    return "valid" if is_valid(value, schema) else "invalid"


if __name__ == "__main__":
    sys.exit(main())
