"""The journal: whatever dies and whenever, each token passes exactly once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateway.journal import (
    PROBATION_TOKENS,
    JournalEntry,
    blame,
    next_suspect,
    open_entry,
    record,
    resubmission,
)
from headrace.params import SamplingParams
from headrace.request import EngineRequest, FinishReason, SequenceOutput, TokenLogprobs


def request(request_id: str = "r", n: int = 1, max_tokens: int = 50) -> EngineRequest:
    return EngineRequest(
        id=request_id, prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=max_tokens), n=n
    )


def true_tokens(index: int, count: int) -> list[int]:
    """What a sequence must say: a pure function of index and position."""
    return [index * 1000 + position for position in range(count)]


class Worker:
    """Runs one request from its EngineRequest alone, as a real worker would, a few tokens at a time."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.position = {i: len(request.emitted.get(i, [])) for i in range(request.n) if i not in request.done}

    def step(self, index: int, count: int) -> SequenceOutput | None:
        if index not in self.position:
            return None
        total = self.request.params.max_tokens
        start = self.position[index]
        end = min(start + count, total)
        self.position[index] = end
        reason = FinishReason.LENGTH if end == total else None
        if reason is not None:
            del self.position[index]
        tokens = true_tokens(index, end)[start:]
        return SequenceOutput(request_id=self.request.id, index=index, token_ids=tokens, finish_reason=reason)


# per event: (sequence index, tokens), or None for a death of the worker; a lost output dies with it
events = st.lists(st.none() | st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans()), max_size=60)


@given(n=st.integers(1, 3), total=st.integers(1, 12), script=events)
def test_every_token_passes_once_whatever_dies(n: int, total: int, script: list[object]) -> None:
    entry = open_entry(request(n=n, max_tokens=total))
    seen: dict[int, list[int]] = {i: [] for i in range(n)}
    finishes = dict.fromkeys(range(n), 0)

    def deliver(output: SequenceOutput) -> None:
        passed = record(entry, output)
        if passed is not None:
            seen[passed.index] += passed.token_ids
            finishes[passed.index] += passed.finish_reason is not None

    worker = Worker(resubmission(entry))
    for event in script:
        if event is None:
            worker = Worker(resubmission(entry))
            continue
        index, count, lost = event  # type: ignore[misc]
        output = worker.step(index, count)
        if output is None:
            continue
        if lost:  # computed, but never arrived: the worker died
            worker = Worker(resubmission(entry))
        else:
            deliver(output)
    worker = Worker(resubmission(entry))
    for index in list(worker.position):
        output = worker.step(index, total)
        assert output is not None
        deliver(output)
    assert entry.is_finished
    assert seen == {i: true_tokens(i, total) for i in range(n)}
    assert all(count == 1 for count in finishes.values())


def test_done_sequences_are_not_run_again_and_their_tokens_not_sent_along() -> None:
    entry = open_entry(request(n=2))
    record(entry, SequenceOutput(request_id="r", index=0, token_ids=[5], finish_reason=FinishReason.STOP))
    record(entry, SequenceOutput(request_id="r", index=1, token_ids=[6]))
    again = resubmission(entry)
    assert again.done == [0]
    assert again.emitted == {1: [6]}
    assert record(entry, SequenceOutput(request_id="r", index=0, token_ids=[7])) is None


def test_prompt_facts_pass_once() -> None:
    entry = open_entry(request())
    scored = [None, TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, [])]
    first = SequenceOutput(request_id="r", token_ids=[5], cached_tokens=2, prompt_logprobs=scored)
    assert record(entry, first) is first
    again = record(entry, SequenceOutput(request_id="r", token_ids=[6], cached_tokens=3, prompt_logprobs=scored))
    assert again is not None
    assert (again.token_ids, again.cached_tokens, again.prompt_logprobs) == ([6], 0, None)


def test_a_sign_of_life_is_not_the_first_output() -> None:
    entry = open_entry(request())
    record(entry, SequenceOutput(request_id="r"))
    passed = record(entry, SequenceOutput(request_id="r", token_ids=[5], cached_tokens=2))
    assert passed is not None and passed.cached_tokens == 2


def entries(*names: str) -> dict[str, JournalEntry]:
    return {name: open_entry(request(name)) for name in names}


def test_a_request_that_dies_alone_twice_is_given_up() -> None:
    journal = entries("a", "b")
    assert blame(journal, {"a"}) == []
    assert blame(journal, {"a"}) == ["a"]
    assert not journal["b"].is_suspect


def test_two_deaths_in_company_make_suspects_but_give_nobody_up() -> None:
    journal = entries("a", "b", "c")
    assert blame(journal, {"a", "b"}) == []
    assert blame(journal, {"a", "b"}) == []
    assert [name for name in journal if journal[name].is_suspect] == ["a", "b"]
    assert next_suspect(journal, ["b", "c", "a"]) == "b"
    assert blame(journal, {"b"}) == [] and next_suspect(journal, ["a", "b", "c"]) == "b"
    assert blame(journal, {"b"}) == ["b"]


def test_a_suspect_that_shows_tokens_is_cleared() -> None:
    journal = entries("a", "b")
    for _ in range(2):
        blame(journal, {"a", "b"})
    resubmission(journal["a"])
    for i in range(PROBATION_TOKENS):
        assert journal["a"].is_suspect
        record(journal["a"], SequenceOutput(request_id="a", token_ids=[i]))
    assert not journal["a"].is_suspect
    assert next_suspect(journal, ["a", "b"]) == "b"


def test_tokens_before_the_death_do_not_clear_a_suspect() -> None:
    journal = entries("a", "b")
    for i in range(50):
        record(journal["a"], SequenceOutput(request_id="a", token_ids=[i]))
    for _ in range(2):
        blame(journal, {"a", "b"})
    resubmission(journal["a"])
    record(journal["a"], SequenceOutput(request_id="a", token_ids=[99]))
    assert journal["a"].is_suspect
