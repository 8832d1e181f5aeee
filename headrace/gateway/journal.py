"""The journal of open requests: what a new worker needs to continue what a dead one left.

Every token that reaches a client's stream is recorded first. When a worker dies, each open request is submitted
again as prompt + emitted tokens; sampling is a pure function of (seed, position), so generation goes on with the
token that would have come. Outputs pass through ``record`` once, whichever worker they come from, so nothing
is sent twice:

    prompt | emitted (journal, already with the client) | next token of the new worker
                                                        ^ the only place where it may go on

Blame: the requests in the step that died are suspects. One that was in two such steps is replayed alone, until
it has shown ``PROBATION_TOKENS`` tokens; one that died alone twice is given up. Deaths that came from outside
(signals, memory pressure) blame nobody.

Plain data and small functions; one owner (the worker client), no clock, no socket.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import msgspec

from headrace.request import EngineRequest, SequenceOutput

SUSPECT_DEATHS = 2
ALONE_DEATHS = 2
PROBATION_TOKENS = 4


@dataclass(slots=True)
class JournalEntry:
    """One open request.

    Attributes:
        request: as submitted by the pipeline.
        emitted: sequence index -> tokens already given to the stream.
        done: indices that ended (finished, or aborted alone).
        begun: indices whose first output (it carries prompt facts) was given to the stream.
        deaths: steps that died with this request in them, since it last proved itself.
        alone_deaths: those of them in which it was the only request.
        trial_tokens: tokens since the last replay.
    """

    request: EngineRequest
    emitted: dict[int, list[int]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    deaths: int = 0
    alone_deaths: int = 0
    trial_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        return len(self.done) >= self.request.n

    @property
    def is_suspect(self) -> bool:
        """Whether a replay must be the only request of the worker."""
        return self.deaths >= SUSPECT_DEATHS


Journal = dict[str, JournalEntry]
"""Open requests by id, in order of submission."""


def open_entry(request: EngineRequest) -> JournalEntry:
    emitted = {index: list(tokens) for index, tokens in request.emitted.items()}
    return JournalEntry(request, emitted, set(request.done))


def record(entry: JournalEntry, output: SequenceOutput) -> SequenceOutput | None:
    """Note what ``output`` gives to the client; return what may be passed on, or None when the sequence is done.

    Facts about the prompt (cached tokens, prompt logprobs) pass once per sequence, not again after a replay.
    """
    index = output.index
    if index in entry.done:
        return None
    if output.token_ids:
        entry.emitted.setdefault(index, []).extend(output.token_ids)
        entry.trial_tokens += len(output.token_ids)
    if output.finish_reason is not None:
        entry.done.add(index)
    if entry.is_suspect and entry.trial_tokens >= PROBATION_TOKENS:
        entry.deaths = entry.alone_deaths = 0
    if index in entry.begun:
        if output.cached_tokens or output.prompt_logprobs is not None:
            return msgspec.structs.replace(output, cached_tokens=0, prompt_logprobs=None)
    elif output.has_begun:
        entry.begun.add(index)
    return output


def resubmission(entry: JournalEntry) -> EngineRequest:
    """The request as a new worker must get it; starts a new trial."""
    entry.trial_tokens = 0
    emitted = {
        index: list(tokens) for index, tokens in entry.emitted.items() if tokens and index not in entry.done
    }
    return msgspec.structs.replace(entry.request, emitted=emitted, done=sorted(entry.done))


def blame(journal: Journal, in_step: Set[str]) -> list[str]:
    """Count a fault of the worker against the requests in the step that died; return those to give up."""
    suspects = [request_id for request_id in journal if request_id in in_step]
    given_up: list[str] = []
    for request_id in suspects:
        entry = journal[request_id]
        entry.deaths += 1
        if len(in_step) == 1:
            entry.alone_deaths += 1
        if entry.alone_deaths >= ALONE_DEATHS:
            given_up.append(request_id)
    return given_up


def next_suspect(journal: Journal, waiting: Iterable[str]) -> str | None:
    """The one of ``waiting`` to be replayed alone now: the one with most deaths, the newest of equals.

    What ran before the newest came had been running well.
    """
    waits = frozenset(waiting)
    newest_first = reversed([request_id for request_id in journal if request_id in waits])
    suspects = [request_id for request_id in newest_first if journal[request_id].is_suspect]
    return max(suspects, key=lambda request_id: journal[request_id].deaths, default=None)
