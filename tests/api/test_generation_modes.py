"""Streamed and single answers: equal, well-formed, exact."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from http_harness import CONFIG, MODEL, Api
from support import scripted

from headrace.config import EngineConfig
from headrace.text.model_text import ModelText


@pytest.mark.parametrize("script", sorted(scripted.SCRIPTS))
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_both_modes_say_the_script(api: Api, script: str, chunk: int) -> None:
    api.engine.chunk = chunk
    answer = api.chat(f"<|{script}|>").json()
    streamed = api.chat_stream(f"<|{script}|>", stream_options={"include_usage": True})
    choice = answer["choices"][0]
    assert choice["message"] == {
        "role": "assistant",
        "content": scripted.expected_text(script),
        "refusal": None,
    }
    assert choice["finish_reason"] == scripted.expected_finish(script)
    assert streamed.text() == choice["message"]["content"]
    assert streamed.finish_reasons() == [choice["finish_reason"]]
    assert streamed.usage == answer["usage"]
    assert streamed.done


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_stream_interval_changes_only_the_cut(make_api: Any, interval: int) -> None:
    api = make_api(stream_interval=interval)
    streamed = api.chat_stream("<|s01|>", max_tokens=20)
    assert streamed.text() == scripted.expected_text("s01", 20)
    texts = [choice["delta"]["content"] for choice in streamed.choices() if choice["delta"]]
    assert texts[0] == " one"
    expected = 1 + -(-19 // interval)
    assert len(texts) == expected


def test_stream_shape(api: Api) -> None:
    first, second = api.chat_stream("<|s00|>"), api.chat_stream("<|s00|>")
    constants = [{name: chunk[name] for name in ("id", "object", "created", "model")} for chunk in first.chunks]
    assert all(constant == constants[0] for constant in constants)
    assert constants[0]["object"] == "chat.completion.chunk"
    assert constants[0]["model"] == MODEL
    assert constants[0]["id"].startswith("chatcmpl-")
    assert first.chunks[0]["id"] != second.chunks[0]["id"]
    deltas = [choice["delta"] for choice in first.choices()]
    assert deltas[0] == {"role": "assistant", "content": "Al"}
    assert not any("role" in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    assert first.raw.endswith("data: [DONE]\n\n")
    assert all("usage" not in chunk for chunk in first.chunks)


def test_completion_stream_shape(api: Api) -> None:
    streamed = api.complete_stream()
    assert streamed.chunks[0]["object"] == "text_completion"
    assert streamed.chunks[0]["id"].startswith("cmpl-")
    assert streamed.text() == "ABCDEFGH"
    assert streamed.finish_reasons() == ["stop"]


def test_no_event_breaks_a_character(api: Api) -> None:
    assert "\N{REPLACEMENT CHARACTER}" not in api.chat_stream("<|s02|>").raw
    assert "\N{REPLACEMENT CHARACTER}" not in api.chat_stream("<|s02|>", logprobs=True).raw


@pytest.mark.parametrize(
    ("max_tokens", "text", "reason"),
    [(7, "ABCDEFG", "length"), (8, "ABCDEFGH", "length"), (9, "ABCDEFGH", "stop"), (10, "ABCDEFGH", "stop")],
)
def test_length_and_end_token(api: Api, max_tokens: int, text: str, reason: str) -> None:
    answer = api.chat(max_tokens=max_tokens).json()
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["choices"][0]["finish_reason"] == reason
    assert answer["usage"]["completion_tokens"] == min(max_tokens, 9)
    streamed = api.complete_stream(max_tokens=max_tokens, logprobs=0)
    assert streamed.text() == text
    assert streamed.finish_reasons() == [reason]
    assert "im_end" not in streamed.raw


def test_end_token_at_once_is_a_whole_stream(api: Api) -> None:
    end = scripted.vocabulary().added["<|im_end|>"]
    streamed = api.chat_stream(logit_bias={str(end): 100})
    assert [choice["delta"] for choice in streamed.choices()] == [{"role": "assistant", "content": ""}]
    assert streamed.finish_reasons() == ["stop"]
    assert streamed.done
    assert api.chat(logit_bias={str(end): 100}).json()["choices"][0]["message"]["content"] == ""


STOPS: list[tuple[str, Any, str, str]] = [
    ("s00", ["gamma"], "Alpha beta ", "gamma"),
    ("s00", ["ma del"], "Alpha beta gam", "ma del"),
    ("s00", ["mm"], "Alpha beta ga", "mm"),
    ("s00", "beta", "Alpha ", "beta"),
    ("s00", ["ta.", "zz"], "Alpha beta gamma del", "ta."),
    ("s00", ["Al"], "", "Al"),
    ("s02", ["é"], "ok 😀 caf", "é"),
]


@pytest.mark.parametrize(("script", "stop", "text", "matched"), STOPS)
@pytest.mark.parametrize("chunk", [1, 2, 50])
def test_stop_strings(api: Api, script: str, stop: Any, text: str, matched: str, chunk: int) -> None:
    api.engine.chunk = chunk
    answer = api.chat(f"<|{script}|>", stop=stop).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == matched
    streamed = api.chat_stream(f"<|{script}|>", stop=stop, stream_options={"include_usage": True})
    assert streamed.text() == text
    assert streamed.finish_reasons() == ["stop"]
    assert streamed.usage == answer["usage"]
    assert answer["usage"]["completion_tokens"] <= len(scripted.SCRIPTS[script].pieces)
    completed = api.complete(f"<|{script}|><|assistant|>", stop=stop).json()
    assert completed["choices"][0]["text"] == text
    assert completed["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_a_stop_string_ends_the_sequence_in_the_engine(api: Api) -> None:
    assert api.chat("<|s01|>", stop=["three"], max_tokens=400).status_code == 200
    assert api.engine.aborted
    assert api.engine.running == 0
    assert api.metrics.reasons == ["stop"]


def test_stop_string_can_be_part_of_the_answer(api: Api) -> None:
    answer = api.chat("<|s00|>", stop=["gamma"], include_stop_str_in_output=True).json()
    assert answer["choices"][0]["message"]["content"] == "Alpha beta gamma"


def test_min_tokens_delays_stop_strings(api: Api) -> None:
    answer = api.chat("<|s01|>", stop=[" two"], min_tokens=4, max_tokens=30).json()
    assert answer["choices"][0]["message"]["content"] == " one two three four five six one"


def test_stop_token_ids_are_reported(api: Api) -> None:
    token_id = scripted.vocabulary().ids[b"C"]
    answer = api.chat(stop_token_ids=[token_id]).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("AB", "stop")
    assert choice["stop_reason"] == token_id
    assert api.chat().json()["choices"][0]["stop_reason"] is None


def test_ignore_eos_runs_to_the_limit(api: Api) -> None:
    answer = api.chat(ignore_eos=True, max_tokens=12).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


def test_several_sequences(api: Api) -> None:
    answer = api.chat("<|s00|>", n=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Alpha beta gamma delta."}
    assert answer["usage"]["completion_tokens"] == 27
    streamed = api.chat_stream("<|s00|>", n=3, stream_options={"include_usage": True})
    assert streamed.usage == answer["usage"]
    for index in range(3):
        assert streamed.text(index) == "Alpha beta gamma delta."
        assert streamed.finish_reasons(index) == ["stop"]


def test_several_prompts_keep_their_order(api: Api) -> None:
    prompts = [f"<|{name}|><|assistant|>" for name in ("s05", "s00", "s02")]
    texts = [scripted.expected_text(name) for name in ("s05", "s00", "s02")]
    answer = api.complete(prompts, n=2).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [text for text in texts for _ in range(2)]
    assert answer["usage"]["prompt_tokens"] == 6
    streamed = api.complete_stream(prompts, stream_options={"include_usage": True})
    assert [streamed.text(index) for index in range(3)] == texts
    assert [streamed.finish_reasons(index) for index in range(3)] == [["stop"]] * 3
    assert streamed.usage is not None
    assert streamed.usage["completion_tokens"] == answer["usage"]["completion_tokens"] // 2


def test_prompts_as_token_ids(api: Api) -> None:
    token_ids = api.post("/tokenize", {"prompt": "<|s05|><|assistant|>"}).json()["tokens"]
    assert len(token_ids) == 2
    assert api.complete(token_ids).json()["choices"][0]["text"] == "ABCDEFGH"
    answer = api.complete([token_ids, token_ids]).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ABCDEFGH"] * 2


def test_usage_counts_and_cached_tokens(api: Api) -> None:
    api.engine.cached_tokens = 100
    content = "<|s02|>" + "x" * 200
    answer = api.chat(content).json()
    assert answer["usage"]["prompt_tokens"] == scripted.expected_prompt_tokens(content)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 100}
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 10
    streamed = api.chat_stream(content, stream_options={"include_usage": True, "continuous_usage_stats": True})
    running = [chunk["usage"]["completion_tokens"] for chunk in streamed.chunks if chunk["choices"]]
    assert running == sorted(running)
    assert running[-1] == 10
    assert streamed.usage == answer["usage"]


def test_fields_reach_the_engine(api: Api) -> None:
    api.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias={"65": -5}, allowed_token_ids=[65, 66], seed=-1, min_tokens=2, n=2,
        priority=-3, cache_salt="s", max_completion_tokens=5, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    request = api.engine.requests[-1]
    params = request.params
    assert (request.n, request.priority, request.cache_salt) == (2, -3, "s")
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert params.logit_bias == {65: -5.0}
    assert params.allowed_token_ids == (65, 66)
    assert params.seed == 2**64 - 1
    assert (params.min_tokens, params.max_tokens, params.logprobs) == (2, 5, 4)


def test_seeds_are_drawn_and_off_is_off(api: Api) -> None:
    for top_k in (0, -1, None):
        api.chat(temperature=1, top_k=top_k)
    assert len({request.params.seed for request in api.engine.requests}) == 3
    assert {request.params.top_k for request in api.engine.requests} == {0}
    api.complete(["<|s05|>", "<|s05|>"], temperature=1)
    assert api.engine.requests[-1].params.seed != api.engine.requests[-2].params.seed
    api.chat(temperature=1e-5)
    assert api.engine.requests[-1].params.temperature == 0
    api.chat(temperature=1, top_p=0)
    assert (api.engine.requests[-1].params.top_k, api.engine.requests[-1].params.top_p) == (1, 1.0)


def test_defaults_and_limits(make_api: Any) -> None:
    api = make_api(defaults={"temperature": 0.3, "top_k": 9}, max_request_tokens=30)
    body = {"messages": [{"role": "user", "content": "<|s01|>"}]}
    answer = api.post("/v1/chat/completions", body).json()
    params = api.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 9, 1.0)
    assert answer["model"] == MODEL
    assert answer["usage"]["completion_tokens"] == 30


def test_without_a_limit_generation_fills_the_context(api: Api) -> None:
    answer = api.chat("<|s01|>", max_tokens=None).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512
    clipped = api.chat("<|s01|>", max_tokens=100_000).json()
    assert clipped["usage"]["total_tokens"] == 512


def test_token_ids_are_returned_when_asked(api: Api) -> None:
    answer = api.chat(return_token_ids=True).json()
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"] == 9
    streamed = api.chat_stream(return_token_ids=True)
    joined = [token for choice in streamed.choices() for token in choice.get("token_ids", [])]
    assert joined == answer["choices"][0]["token_ids"]
    assert [c["prompt_token_ids"] for c in streamed.chunks if "prompt_token_ids" in c] == [
        answer["prompt_token_ids"]
    ]
    completed = api.complete(return_token_ids=True).json()["choices"][0]
    assert len(completed["prompt_token_ids"]) == 2


def test_more_prompts_than_ever_fit_are_not_asked_to_come_back(text_side: ModelText) -> None:
    small = EngineConfig(model="unused", max_num_seqs=2, max_queue=3)
    api = Api(text_side, msgspec.structs.replace(CONFIG, engine=small))
    answer = api.complete(["<|s05|><|assistant|>"] * 6)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
    assert "2 may run and 3 wait" in answer.json()["error"]["message"]
    assert len(api.complete(["<|s05|><|assistant|>"] * 5).json()["choices"]) == 5
    api.close()
