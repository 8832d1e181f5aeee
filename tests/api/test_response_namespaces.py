"""Tools in groups on ``/v1/responses``: flat for the model, two names for the client, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_harness import Api

from headrace.api.responses.render import ResponseRenderer
from headrace.gateway.events import CallArguments, CallEnded, CallStarted

PATH = "/v1/responses"
CLOSE = {"type": "function", "name": "close", "description": "Ends one.", "parameters": {"type": "object"}}
GROUP = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [CLOSE]}
PLAIN = {"type": "function", "name": "close", "parameters": {"type": "object"}}


def prompt(api: Api) -> str:
    return api.app.state.services.text.tokenizer.decode(api.engine.requests[-1].prompt_token_ids)


def test_the_model_sees_one_list_and_its_own_calls(make_api: Callable[..., Api], tmp_path: Path) -> None:
    api = make_api(response_store_mb=1, response_store_file=str(tmp_path / "store"))
    call = {"type": "function_call", "call_id": "c", "namespace": "agents", "name": "close", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "done"}
    given = [{"role": "user", "content": "<|s05|>"}, call, output]
    answer = api.post(PATH, {"input": given, "tools": [GROUP, PLAIN]}).json()
    text = prompt(api)
    assert text.count('"name": "agents__close"') == 2 and '"name": "close"' in text
    assert "Helpers.\\nEnds one." in text
    assert answer["tools"][0]["type"] == "namespace" and answer["tools"][0]["tools"][0]["name"] == "close"
    (kept,) = [
        item for item in api.run(api.client.get(f"{PATH}/{answer['id']}/input_items")).json()["data"]
        if item["type"] == "function_call"
    ]  # fmt: skip
    assert (kept["namespace"], kept["name"]) == ("agents", "close")


def test_a_call_leaves_with_both_names() -> None:
    async def keep(response: dict[str, Any]) -> None:
        pass

    renderer = ResponseRenderer({"id": "resp_1"}, {"agents__close": ("agents", "close")}, keep)
    for index, name in enumerate(("agents__close", "close")):
        renderer.take([
            CallStarted(0, index, f"call_{index}", name), CallArguments(0, index, "{}"), CallEnded(0, index, True),
        ])  # fmt: skip
    first, second = renderer._output
    assert (first["namespace"], first["name"]) == ("agents", "close")
    assert "namespace" not in second and second["name"] == "close"


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({**GROUP, "name": ""}, "tools[0].name"),
        ({**GROUP, "tools": None}, "tools[0].tools"),
        ({**GROUP, "tools": [7]}, "tools[0].tools"),
        ({**GROUP, "tools": [{"type": "custom", "name": "x"}]}, "tools[0].tools[0].type"),
        ({**GROUP, "tools": [{"type": "function"}]}, "name"),
        ({**GROUP, "description": 7}, "description"),
        ({"type": "web_search"}, "web_search"),
    ],
)
def test_refusals(api: Api, tool: dict[str, Any], words: str) -> None:
    answer = api.post(PATH, {"input": "<|s05|>", "tools": [tool]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools" and words in answer.json()["error"]["message"]
