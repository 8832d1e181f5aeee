"""Text with tokens that the tokenizer knows and the model does not: refused on every route, never run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from http_harness import Api
from support import scripted

KNOWN = scripted.vocabulary().added["<|s05|>"]  # the highest id that the model of these tests has
FOREIGN = "<|s06|>"


@pytest.fixture
def api(make_api: Any) -> Api:
    made: Api = make_api()
    ready = made.engine.state_now.ready
    assert ready is not None
    smaller = msgspec.structs.replace(ready, vocab_size=KNOWN + 1)
    made.engine.state_now = msgspec.structs.replace(made.engine.state_now, ready=smaller)
    return made


def bodies(text: str) -> dict[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "hello"}]
    return {
        "/v1/completions": {"prompt": ["hello", text], "max_tokens": 3},
        "/v1/embeddings": {"input": ["hello", text]},
        "/v1/rerank": {"query": "hello", "documents": [text]},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 3},
        "/v1/messages": {"messages": messages, "max_tokens": 3, "model": "alias"},
        "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/rerank"])
def test_foreign_tokens_are_refused(api: Api, path: str, stream: bool) -> None:
    streams = {"stream": True} if stream and path == "/v1/completions" else {}
    answer = api.post(path, {**bodies(FOREIGN)[path], **streams})
    assert answer.status_code == 400, answer.text
    assert f"id {KNOWN + 1}" in answer.json()["error"]["message"]
    assert str(KNOWN) in answer.json()["error"]["message"]
    assert all(max(request.prompt_token_ids) <= KNOWN for request in api.engine.requests)
    assert api.engine.running == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_template_may_write_foreign_tokens(api: Api, path: str) -> None:
    template = api.app.state.services.text.chat_template
    assert api.post(path, bodies("")[path]).status_code == 200
    words = scripted.vocabulary().added
    ready = api.engine.state_now.ready
    assert ready is not None
    smaller = msgspec.structs.replace(ready, vocab_size=words["<|assistant|>"])
    api.engine.state_now = msgspec.structs.replace(api.engine.state_now, ready=smaller)
    assert max(template.render([{"role": "user", "content": "hello"}]).token_ids) > words["<|assistant|>"]
    answer = api.post(path, bodies("")[path])
    assert answer.status_code == 400 and "vocabulary ends at" in answer.json()["error"]["message"]
