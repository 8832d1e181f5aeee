"""``bench-serve`` as a command against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_http import Log, Routes, Script, good_stream, scripted_thread

from headrace.cli.main import main


def words_as_tokens(body: dict[str, object]) -> object:
    """A tokenizer of one token per word, and four of template around a message."""
    if "messages" in body:
        messages: list[dict[str, str]] = body["messages"]  # type: ignore[assignment]
        return {"count": sum(4 + len(message["content"].split()) for message in messages)}
    return {"count": len(str(body["prompt"]).split())}


ROUTES: Routes = {
    "/v1/models": lambda body: {"data": [{"id": "stub", "max_model_len": 4096}]},
    "/tokenize": words_as_tokens,
}


class Bench:
    """``bench(script_of, *words)`` -> report; ``code``, ``err`` and ``log`` are of the last call."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        self.code = -1
        self.err = ""
        self.log = Log()

    def __call__(self, script_of: Callable[[int], Script], *words: str, routes: Routes = ROUTES) -> dict[str, Any]:
        with scripted_thread(script_of, routes) as (url, log):
            warm = () if "--warmup" in words else ("--warmup", "0")
            self.code = main(["bench-serve", "--url", url, "--format", "json", *warm, *words])
        self.log = log
        out, self.err = self.capsys.readouterr()
        report: dict[str, Any] = json.loads(out)
        return report


def quick(index: int) -> Script:
    return good_stream(0.03, 0.01, 3)  # slow enough for a client on a busy machine
