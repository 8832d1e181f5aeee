"""Which tokens the grammars of a step's rows allow, as bit masks made on the host.

Every sequence with a grammar has a matcher that has taken in exactly the tokens sampled so far. It is kept between
steps for speed alone: a row carries the tokens, so a matcher that is missing or has gone another way (preemption,
a step that was not believed) is made anew and led through them.

    masks of step k+1 need the tokens of step k:   read k ─► forward k+1 starts ─► masks (here) ─► sampling k+1
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import llguidance
import numpy as np
import numpy.typing as npt

from headrace.core.step import ScheduledRow
from headrace.errors import GrammarError
from headrace.params import Grammar
from headrace.text.grammars.compiler import GrammarCompiler, one_line

MAX_MASK_S = 1.0  # of one thread; a form that takes longer would hold up everybody else's tokens
_SIDE_BY_SIDE = 8  # so many masks are worth several threads
_IDLE_STATES = 64

Words = npt.NDArray[np.uint32]


@dataclass(slots=True)
class StepMasks:
    """Masks of one step.

    Attributes:
        rows: indices into the step's sampled rows.
        words: ``[len(rows), ceil(vocab / 32)]``; bit ``i % 32`` of word ``i // 32`` allows token i.
        ending: indices of rows that can only end now: nothing may keep their end tokens from them.
        refused: seq_id -> why the row cannot go on; its mask allows everything.
    """

    rows: list[int]
    words: Words
    ending: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _State:
    matcher: llguidance.LLMatcher
    taken: tuple[int, ...] = ()


class GrammarMasks:
    """Matchers of the running sequences.

    Args:
        compiler: of this model.
        vocab_size: width of the logits; ids beyond the tokenizer's vocabulary are never allowed.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._num_words = (vocab_size + 31) // 32
        self._states: dict[int, _State] = {}
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="masks")

    def masks(self, rows: Sequence[ScheduledRow], newest: Mapping[int, int]) -> StepMasks | None:
        """Masks for the rows that have a grammar; None when there is none.

        Args:
            rows: that sample in this step.
            newest: seq_id -> token sampled by the step before, for rows whose history lacks it.
        """
        chosen = [index for index, row in enumerate(rows) if row.params.grammar is not None]
        if not chosen:
            return None
        step = StepMasks(chosen, np.zeros((len(chosen), self._num_words), np.uint32))
        self._forget_idle([rows[index].seq_id for index in chosen])
        work = list(enumerate(chosen))
        if len(work) < _SIDE_BY_SIDE:
            for place, index in work:
                self._fill(step, place, index, rows[index], newest)
        else:
            list(self._threads.map(lambda item: self._fill(step, item[0], item[1], rows[item[1]], newest), work))
        return step

    def _fill(self, step: StepMasks, place: int, index: int, row: ScheduledRow, newest: Mapping[int, int]) -> None:
        """Make one row's mask; what goes wrong here is that row's alone."""
        output = tuple(row.history[row.num_prompt_tokens :])
        if not row.token_ids:
            output = (*output, newest[row.seq_id])
        words = step.words[place]
        try:
            assert row.params.grammar is not None
            began = time.thread_time()
            _fill_words(self._matcher(row.seq_id, row.params.grammar, output), words)
            if time.thread_time() - began > MAX_MASK_S:
                raise GrammarError("it is too complex: finding the next token takes too long")
            if row.params.allowed_token_ids:
                words &= _as_words(row.params.allowed_token_ids, self._num_words)
            if not words.any():
                raise GrammarError("allowed_token_ids leaves no token that it allows")
            if not (words & ~_as_words(row.params.stop_token_ids, self._num_words)).any():
                step.ending.add(index)
        except GrammarError as error:
            self._states.pop(row.seq_id, None)
            step.refused[row.seq_id] = f"the demanded form of the answer cannot be kept to: {error}"
            words[:] = 0xFFFFFFFF

    def _matcher(self, seq_id: int, grammar: Grammar, output: tuple[int, ...]) -> llguidance.LLMatcher:
        """The sequence's matcher behind ``output``."""
        state = self._states.get(seq_id)
        if state is None or output[: len(state.taken)] != state.taken:
            state = self._states[seq_id] = _State(self._compiler.compile(grammar).result().deep_copy())
        matcher = state.matcher
        for token_id in output[len(state.taken) :]:
            # Behind its end a matcher takes nothing; a sequence that ignores end tokens may still go on.
            if not matcher.is_stopped() and not matcher.consume_token(token_id):
                raise GrammarError(one_line(matcher.get_error()))
        state.taken = output
        if matcher.is_error():
            raise GrammarError(one_line(matcher.get_error()))
        return matcher

    def _forget_idle(self, seq_ids: list[int]) -> None:
        if len(self._states) > len(seq_ids) + _IDLE_STATES:
            self._states = {seq_id: self._states[seq_id] for seq_id in seq_ids if seq_id in self._states}


def _fill_words(matcher: llguidance.LLMatcher, words: Words) -> None:
    """The matcher's mask; one that has stopped allows the end tokens."""
    data = matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarError(one_line(matcher.get_error()))
    found = np.frombuffer(data, np.uint32)[: len(words)]
    words[: len(found)] = found


def _as_words(token_ids: Sequence[int], num_words: int) -> Words:
    words = np.zeros(num_words, np.uint32)
    ids = np.array(token_ids, np.int64)
    ids = ids[ids < num_words * 32]
    np.bitwise_or.at(words, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
    return words
