"""Rows with grammars in the engine: exact beside free rows, over preemption and replay, alone in their faults."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.config import EngineConfig
from headrace.core.scheduler import Scheduler
from headrace.params import Grammar, SamplingParams
from headrace.request import EngineRequest, FinishReason, TokenLogprobs
from headrace.runner.build import BuiltRunner, build_runner
from headrace.text.grammars import content
from headrace.text.grammars.compose import AnswerGrammar
from headrace.text.model_text import ModelText, load
from headrace.worker.engine import Engine
from headrace.worker.protocol import AbortRequest, Accepted, AddRequest, Rejected
from headrace.worker.step_record import StepRecord

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "words": {"type": "array", "items": {"enum": ["one", "two", "three"]}, "minItems": 6, "maxItems": 9},
        "on": {"type": "boolean"},
    },
    "required": ["id", "words", "on"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@dataclass
class Output:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    error: str = ""


class House:
    """A built runner; each ``run`` has an engine of its own over it."""

    def __init__(self, folder: Path, record: Path, **config: Any) -> None:
        settings = {"kv_memory_bytes": 16 << 20, "max_model_len": 512, "block_size": 16, **config}
        self.built: BuiltRunner = build_runner(EngineConfig(model=str(folder), **settings), lambda *_: None)
        self.text: ModelText = load(folder)
        self.record = record
        self.answers: list[Accepted | Rejected] = []
        self.preemptions = 0

    def engine(self) -> Engine:
        built = self.built
        scheduler = Scheduler(built.scheduler_config, built.layout, built.num_blocks)
        return Engine(scheduler, built.runner, StepRecord(str(self.record)), grammars=built.grammars)

    def grammar(self, schema: object = SCHEMA) -> Grammar:
        return AnswerGrammar(self.text.tokenizer, None, None).build(content.json_schema(schema))

    def request(self, request_id: str, prompt: str = "<|s01|><|assistant|>", **fields: Any) -> EngineRequest:
        outer = {name: fields.pop(name) for name in ("n", "emitted") if name in fields}
        defaults = {
            "max_tokens": 120,
            "temperature": 0.0,
            "stop_token_ids": tuple(sorted(self.text.end_token_ids)),
        }
        tokens = self.text.tokenizer.encode(prompt, parse_special=True)
        params = SamplingParams(**{**defaults, **fields})
        return EngineRequest(id=request_id, prompt_token_ids=tokens, params=params, **outer)

    def run(
        self, *requests: EngineRequest, abort: str | None = None, apart: int = 0
    ) -> dict[tuple[str, int], Output]:
        """Outputs; ``abort``: that request is aborted in the 12th step; ``apart``: steps between arrivals."""
        engine = self.engine()
        outputs: dict[tuple[str, int], Output] = {}
        coming = list(reversed(requests))
        self.answers = []
        steps = 0
        while engine.has_work or coming:
            while coming and steps >= apart * (len(requests) - len(coming)):
                if (answer := engine.handle(AddRequest(coming.pop()))) is not None:
                    self.answers.append(answer)
            self.answers += engine.compiled()
            message = engine.step()
            steps += message is not None
            if steps == 12 and abort is not None:
                engine.handle(AbortRequest(abort))
            for output in message.outputs if message is not None else ():
                seen = outputs.setdefault((output.request_id, output.index), Output())
                seen.tokens += output.token_ids
                seen.logprobs += output.logprobs
                seen.reason, seen.error = output.finish_reason or seen.reason, output.error or seen.error
            if message is None:
                time.sleep(0.001)
        self.preemptions = engine.stats().preemptions_total
        assert engine.stats().blocks_held == 0
        return outputs

    def value(self, output: Output) -> Any:
        assert output.reason is FinishReason.STOP and output.tokens[-1] in self.text.end_token_ids
        return json.loads(self.text.tokenizer.decode(output.tokens, skip_special=True))


def is_valid(value: Any) -> bool:
    return (
        list(value) == SCHEMA["required"]
        and 0 <= value["id"] <= 999
        and 6 <= len(value["words"]) <= 9
        and set(value["words"]) <= {"one", "two", "three"}
        and type(value["on"]) is bool
    )


@pytest.fixture(scope="module")
def house(scripted_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    made = House(scripted_folder("plain"), tmp_path_factory.mktemp("record") / "record")
    yield made
    made.built.grammars.close()


def random_fields(house: House, seed: int) -> dict[str, Any]:
    """Everything that samples, at once."""
    return {
        "grammar": house.grammar(), "temperature": 1.0, "seed": seed, "top_p": 0.95, "repetition_penalty": 1.1,
        "frequency_penalty": 0.2, "logit_bias": {65: 3.0}, "logprobs": 2,
    }  # fmt: skip


def test_any_sampling_gives_what_the_schema_says(house: House) -> None:
    outputs = house.run(*(house.request(f"r{seed}", **random_fields(house, seed)) for seed in range(12)))
    values = [house.value(output) for output in outputs.values()]
    assert len(values) == 12 and all(map(is_valid, values))
    assert len({json.dumps(value) for value in values}) > 6


@pytest.mark.slow
@pytest.mark.parametrize("apart", [0, 1, 4])
def test_neighbours_change_nothing(house: House, apart: int) -> None:
    constrained = [house.request(f"c{seed}", **random_fields(house, seed)) for seed in range(3)]
    free = [house.request(f"f{i}", f"<|s0{i}|><|assistant|>", max_tokens=40) for i in (0, 1, 5, 7)]
    free.append(house.request("random", "<|s01|>x<|assistant|>", temperature=1.0, seed=7, logit_bias={65: 19.0}))
    requests = [*free[:2], *constrained, *free[2:]]
    together = house.run(*requests, apart=apart)
    for request in requests:
        alone = house.run(request)[request.id, 0]
        assert together[request.id, 0].tokens == alone.tokens, request.id
        assert together[request.id, 0].reason is alone.reason


def test_each_sequence_of_a_request_has_its_own_matcher(house: House) -> None:
    outputs = house.run(house.request("n", n=3, **random_fields(house, 5)))
    values = [house.value(outputs["n", index]) for index in range(3)]
    assert all(map(is_valid, values)) and len({json.dumps(value) for value in values}) == 3
    first = house.run(house.request("n", **random_fields(house, 5)))["n", 0]
    assert outputs["n", 0].tokens == first.tokens


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_replay_goes_on_with_the_token_that_would_have_come(house: House, share: float) -> None:
    fields = random_fields(house, 11)
    whole = house.run(house.request("a", **fields))["a", 0].tokens
    cut = int(len(whole) * share)
    rest = house.run(house.request("b", emitted={0: whole[:cut]} if cut else {}, **fields))["b", 0].tokens
    assert whole[:cut] + rest == whole


@pytest.mark.slow
def test_preemption_changes_nothing(house: House, scripted_folder: Callable[[str], Path], tmp_path: Path) -> None:
    requests = [house.request(f"r{seed}", **random_fields(house, seed)) for seed in range(6)]
    roomy = house.run(*requests)
    tight = House(scripted_folder("plain"), tmp_path / "record", max_cache_blocks=16, max_model_len=200)
    outputs = tight.run(*requests)
    assert tight.preemptions > 0
    assert {key: output.tokens for key, output in outputs.items()} == {
        key: output.tokens for key, output in roomy.items()
    }
    tight.built.grammars.close()


def test_an_abort_leaves_the_others_alone(house: House) -> None:
    requests = [house.request(f"r{seed}", **random_fields(house, seed)) for seed in range(3)]
    outputs = house.run(*requests, abort="r1")
    assert outputs["r1", 0].reason is None
    assert is_valid(house.value(outputs["r0", 0])) and is_valid(house.value(outputs["r2", 0]))


def test_a_complete_form_ends_whatever_min_tokens_says(house: House) -> None:
    output = house.run(house.request("a", grammar=house.grammar({"const": 1}), min_tokens=50))["a", 0]
    assert house.value(output) == 1 and len(output.tokens) == 2


def test_without_end_tokens_the_form_is_complete_and_the_length_is_kept(house: House) -> None:
    output = house.run(house.request("a", grammar=house.grammar({"const": 1}), stop_token_ids=(), max_tokens=9))
    assert output["a", 0].reason is FinishReason.LENGTH and len(output["a", 0].tokens) == 9
    assert house.text.tokenizer.decode(output["a", 0].tokens, skip_special=True) == "1"


def test_logprobs_are_of_what_is_allowed(house: House) -> None:
    output = house.run(house.request("a", grammar=house.grammar({"const": "ab"}), logprobs=3))["a", 0]
    assert house.value(output) == "ab"
    assert all(len(entry.top) == 3 and -9999 <= entry.logprob <= 0 for entry in output.logprobs)
    assert output.logprobs[0].logprob == 0.0  # nothing else was possible


def test_faults_are_of_one_request(house: House) -> None:
    good = house.request("good", **random_fields(house, 3))
    narrow = house.request("narrow", grammar=house.grammar({"type": "string"}), allowed_token_ids=(65, 66))
    foreign = house.request("foreign", grammar=house.grammar({"type": "string"}), emitted={0: [65, 66]})
    broken = house.request("broken", grammar=house.grammar({"type": "nonsense"}))
    free = house.request("free", "<|s05|><|assistant|>")
    outputs = house.run(good, narrow, foreign, broken, free)
    assert is_valid(house.value(outputs["good", 0]))
    assert house.text.tokenizer.decode(outputs["free", 0].tokens, skip_special=True) == "ABCDEFGH"
    for name, words in (("narrow", "allowed_token_ids"), ("foreign", "cannot be kept to")):
        assert outputs[name, 0].reason is FinishReason.ERROR and words in outputs[name, 0].error
        assert "\n" not in outputs[name, 0].error
    rejected = [answer for answer in house.answers if isinstance(answer, Rejected)]
    assert [(answer.request_id, answer.status) for answer in rejected] == [("broken", 400)]
    assert "nonsense" in rejected[0].message


def test_a_fault_alone_is_no_poisoned_step(house: House) -> None:
    narrow = house.request("narrow", grammar=house.grammar({"type": "string"}), allowed_token_ids=(65, 66))
    assert house.run(narrow)["narrow", 0].reason is FinishReason.ERROR


def test_a_large_grammar_is_compiled_beside_the_steps(house: House) -> None:
    large = house.grammar({"enum": [f"{number}{'x' * 200}" for number in range(3000)]})
    outputs = house.run(
        house.request("large", grammar=large, max_tokens=300), house.request("free", "<|s00|><|assistant|>")
    )
    assert house.answers[0].request_id == "free"
    assert house.value(outputs["large", 0]).endswith("x" * 200)
    assert outputs["free", 0].reason is FinishReason.STOP
