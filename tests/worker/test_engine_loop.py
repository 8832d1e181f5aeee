"""The engine's step: one step ahead, honest records, requests' faults as answers, poisoned steps as exits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.core.layout import KVLayout, LayerGroup
from headrace.core.scheduler import Scheduler, SchedulerConfig
from headrace.core.step import SampledToken, SchedulerOutput, StepResult
from headrace.params import SamplingParams
from headrace.request import EngineRequest, FinishReason
from headrace.worker.engine import Engine, PoisonedStep
from headrace.worker.process import serve, tell
from headrace.worker.protocol import (
    EXIT_POISONED_STEP,
    AbortRequest,
    Accepted,
    AddRequest,
    ClearPrefixCache,
    EngineStats,
    Rejected,
    Shutdown,
    StepOutputs,
    StepPoisoned,
)
from headrace.worker.step_record import StepRecord, read_step_record


class Runner:
    """Writes down what is launched and read; samples the position."""

    def __init__(self, record: Path) -> None:
        self.events: list[str] = []
        self.record = record
        self.recorded: list[frozenset[str]] = []
        self.fault: Exception | None = None
        self.not_finite: set[int] = set()  # sequences

    def launch(self, output: SchedulerOutput) -> Any:
        self.events.append(f"launch {output.step_id}")
        self.recorded.append(read_step_record(self.record) or frozenset())
        return Handle(self, output)


class Handle:
    def __init__(self, runner: Runner, output: SchedulerOutput) -> None:
        self.runner, self.output = runner, output

    def result(self) -> StepResult:
        if self.runner.fault is not None:
            raise self.runner.fault
        self.runner.events.append(f"read {self.output.step_id}")
        rows = (*self.output.decode, *self.output.prefill)
        bad = self.runner.not_finite
        sampled = {r.seq_id: SampledToken(r.sample_position) for r in rows if r.samples and r.seq_id not in bad}
        failed = {row.seq_id: "not finite" for row in rows if row.samples and row.seq_id in bad}
        return StepResult(self.output.step_id, sampled, failed, {}, 0.01)


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "record"


def engine_of(runner: Runner, announce: Callable[[StepOutputs], None] | None = None) -> Engine:
    layout = KVLayout(16, (LayerGroup("full", 1, 64),))
    config = SchedulerConfig(max_model_len=1000, prefill_step_size=32, max_queue=2, max_num_seqs=4)
    return Engine(Scheduler(config, layout, (100,)), runner, StepRecord(str(runner.record)), announce=announce)


def add(engine: Engine, name: str, prompt: int = 5, max_tokens: int = 4) -> Accepted | Rejected | None:
    params = SamplingParams(max_tokens=max_tokens)
    return engine.handle(AddRequest(EngineRequest(id=name, prompt_token_ids=[1] * prompt, params=params)))


def drain(engine: Engine) -> list[StepOutputs]:
    messages = []
    while engine.has_work:
        if (message := engine.step()) is not None:
            messages.append(message)
    return messages


def test_a_step_is_launched_before_the_one_before_is_read(record: Path) -> None:
    runner = Runner(record)
    engine = engine_of(runner)
    assert add(engine, "a") == Accepted("a")
    messages = drain(engine)
    assert runner.events[:4] == ["launch 0", "launch 1", "read 0", "launch 2"]
    outputs = [output for message in messages for output in message.outputs]
    assert [token for output in outputs for token in output.token_ids] == [5, 6, 7, 8]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert messages[-1].stats.running == 0 and messages[-1].stats.steps_total == len(runner.events) // 2
    assert engine.step() is None and not engine.has_work


def test_signs_of_life_come_before_each_chunk_until_the_first_token(record: Path) -> None:
    runner = Runner(record)
    announced: list[StepOutputs] = []

    def announce(message: StepOutputs) -> None:
        runner.events.append("announce")
        announced.append(message)

    engine = engine_of(runner, announce)
    add(engine, "long", prompt=100, max_tokens=2)
    outputs = [output for message in drain(engine) for output in message.outputs]
    assert len(announced) >= 3 and runner.events[:2] == ["announce", "launch 0"]
    assert announced[0].stats.running == 1
    signs = [output for message in announced for output in message.outputs]
    assert {output.request_id for output in signs} == {"long"} and not any(output.token_ids for output in signs)
    assert [output.token_ids for output in outputs if output.token_ids] == [[100], [101]]


def test_the_record_names_all_requests_in_flight_and_is_cleared(record: Path) -> None:
    runner = Runner(record)
    engine = engine_of(runner)
    add(engine, "a", max_tokens=3)
    engine.step()
    add(engine, "b", max_tokens=3)
    drain(engine)
    assert runner.recorded[0] == {"a"}
    assert {"a", "b"} in runner.recorded
    engine.step()
    assert read_step_record(record) == frozenset()


def test_torn_records_are_unknown(record: Path) -> None:
    assert read_step_record(record) is None
    writer = StepRecord(str(record))
    writer.write({"request one", "zwei"})
    assert read_step_record(record) == {"request one", "zwei"}
    writer.write({"z"})
    assert read_step_record(record) == {"z"}
    data = bytearray(record.read_bytes())
    data[8] ^= 1
    record.write_bytes(data)
    assert read_step_record(record) is None
    record.write_bytes(data[:5])
    assert read_step_record(record) is None


def test_a_refused_request_is_an_answer(record: Path) -> None:
    engine = engine_of(Runner(record))
    answer = add(engine, "long", prompt=2000)
    assert isinstance(answer, Rejected) and (answer.status, answer.code) == (400, "context_length_exceeded")
    answers = [add(engine, f"r{i}") for i in range(10)]
    full = answers[-1]
    assert isinstance(full, Rejected) and full.status == 429 and full.retry_after_s
    assert isinstance(answers[0], Accepted)


def test_a_bug_in_queueing_is_that_requests_500(record: Path) -> None:
    engine = engine_of(Runner(record))

    def broken(request: EngineRequest, now: float) -> None:
        raise KeyError("bug")

    engine._scheduler.add_request = broken  # type: ignore[method-assign,assignment]
    answer = add(engine, "a")
    assert isinstance(answer, Rejected) and answer.status == 500


def test_a_fault_of_the_scheduler_makes_everybody_a_suspect(record: Path) -> None:
    engine = engine_of(Runner(record))
    for i in range(6):
        add(engine, f"r{i}", max_tokens=100)
    engine.step()

    def broken(now: float) -> None:
        raise KeyError("bug")

    engine._scheduler.schedule = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(KeyError):
        engine.step()
    assert read_step_record(record) == {f"r{i}" for i in range(6)}


def test_aborts_free_everything(record: Path) -> None:
    engine = engine_of(Runner(record))
    add(engine, "a", max_tokens=500)
    for _ in range(5):
        engine.step()
    engine.handle(AbortRequest("a"))
    engine.handle(AbortRequest("unknown"))
    engine.handle(ClearPrefixCache())
    drain(engine)
    assert engine.stats().running == engine.stats().blocks_held == 0


class ScriptedMailbox:
    """One batch of messages per look; ends with a shutdown."""

    def __init__(self, *batches: list[Any]) -> None:
        self.batches = list(batches)
        self.waits: list[float | None] = []
        self.sent: list[Any] = []

    def receive(self, timeout_s: float | None) -> list[Any]:
        self.waits.append(timeout_s)
        return self.batches.pop(0) if self.batches else [Shutdown()] if timeout_s is None else []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Beat:
    stats = EngineStats()


def test_the_loop_waits_only_without_work(record: Path) -> None:
    request = EngineRequest(id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=3))
    mailbox, beat = ScriptedMailbox([AddRequest(request)]), Beat()
    assert serve(engine_of(Runner(record)), mailbox, beat) == 0  # type: ignore[arg-type]
    assert mailbox.waits[0] is None and mailbox.waits[-1] is None
    assert set(mailbox.waits[1:-1]) == {0}
    assert mailbox.sent[0] == Accepted("a")
    assert beat.stats.steps_total > 0 and beat.stats.running == 0


def test_heartbeats_of_a_long_launch_are_not_older_than_what_was_said_before_it(record: Path) -> None:
    beats: list[tuple[int, int]] = []

    class Slow(Runner):
        def launch(self, output: SchedulerOutput) -> Any:
            if output.prefill:
                beats.append((beat.stats.running, beat.stats.prompt_tokens_total))
            return super().launch(output)

    request = EngineRequest(id="a", prompt_token_ids=[1] * 70, params=SamplingParams(max_tokens=3))
    mailbox, beat = ScriptedMailbox([AddRequest(request)]), Beat()
    engine = engine_of(Slow(record), partial(tell, mailbox, beat))  # type: ignore[arg-type]
    assert serve(engine, mailbox, beat) == 0  # type: ignore[arg-type]
    assert beats == [(1, 70)] * 3 and beat.stats.running == 0


def test_a_poisoned_step_releases_nothing_and_exits_with_its_code(record: Path) -> None:
    runner = Runner(record)
    runner.fault = RuntimeError("device lost\nsecond line")
    request = EngineRequest(id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=3))
    mailbox = ScriptedMailbox([AddRequest(request)])
    assert serve(engine_of(runner), mailbox, Beat()) == EXIT_POISONED_STEP  # type: ignore[arg-type]
    assert mailbox.sent[-1] == StepPoisoned("a step failed: RuntimeError: device lost")
    tokens = [o.token_ids for m in mailbox.sent if isinstance(m, StepOutputs) for o in m.outputs if o.token_ids]
    assert tokens == []
    assert read_step_record(record) == {"a"}


def test_a_step_without_a_finite_row_is_poisoned(record: Path) -> None:
    engine = engine_of(runner := Runner(record))
    for name in "ab":
        add(engine, name, max_tokens=20)
    outputs = [engine.step() for _ in range(4)]
    runner.not_finite = {0, 1}
    with pytest.raises(PoisonedStep, match="all 2 rows"):
        drain(engine)
    assert outputs[-1] is not None and all(o.finish_reason is None for o in outputs[-1].outputs)


def test_a_row_that_is_never_finite_fails_without_the_worker(record: Path) -> None:
    engine = engine_of(runner := Runner(record))
    for name in "ab":
        add(engine, name, max_tokens=20)
    runner.not_finite = {1}
    ends = {o.request_id: o.finish_reason for m in drain(engine) for o in m.outputs if o.finish_reason}
    assert ends == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR}
    assert engine.stats().blocks_held == 0
