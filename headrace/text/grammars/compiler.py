"""From a grammar's text to a matcher over one model's vocabulary.

The gateway compiles to refuse what cannot be compiled before an answer begins; the worker compiles the same text
to make masks. A compiled grammar is kept and copied for every sequence: a copy costs microseconds.

Compiling recurses as deep as a schema's references do, so it happens on a thread with a stack of its own; that
thread also builds the vocabulary's index, at the first grammar.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from headrace.errors import GrammarError
from headrace.params import Grammar
from headrace.text.model_text import ModelText

MAX_GRAMMAR_CHARS = 4 * 2**20
MAX_FIRST_MASK_S = 1.0
_STACK_BYTES = 512 * 2**20  # reserved address space; pages are taken as they are touched
_KEPT = 64
_MAX_REASON_CHARS = 300


class GrammarCompiler:
    """Compiles grammars for one model. ``compile`` may be called from any thread.

    Args:
        load: reads the model's text side; called once, on the compiler's own thread.
    """

    def __init__(self, load: Callable[[], ModelText]) -> None:
        self._load = load
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    def compile(self, grammar: Grammar) -> Future[llguidance.LLMatcher]:
        """The grammar's matcher in its first state, not to be changed; fails with ``GrammarError``."""
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
            if known is None:
                self._thread = self._thread or _deep_thread()
                return self._thread.submit(self._compile, grammar)
        done: Future[llguidance.LLMatcher] = Future()
        if isinstance(known, GrammarError):
            done.set_exception(known)
        else:
            done.set_result(known)
        return done

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        if self._vocabulary is None:
            self._vocabulary = make_vocabulary(self._load())
        try:
            found: llguidance.LLMatcher | GrammarError = _matcher(self._vocabulary, grammar)
        except GrammarError as error:
            found = error
        with self._lock:
            self._compiled[grammar] = found
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        if isinstance(found, GrammarError):
            raise found
        return found


def make_vocabulary(text: ModelText) -> llguidance.LLTokenizer:
    """The model's tokens for llguidance. Raises GrammarError for a model that cannot end an answer."""
    if not text.end_token_ids:
        raise GrammarError("this model's files declare no end token, so a demanded form could never be complete")
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Vocabulary(text)), eos_token=sorted(text.end_token_ids)
    )


class _Vocabulary:
    """A tokenizer as ``llguidance.TokenizerWrapper`` wants it; calling it tokenizes text that a grammar forces."""

    def __init__(self, text: ModelText) -> None:
        tokenizer = text.tokenizer
        self.eos_token_id = min(text.end_token_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids | text.end_token_ids)
        self._tokenizer = tokenizer

    def __call__(self, data: bytes | str) -> list[int]:
        text = data.decode(errors="replace") if isinstance(data, bytes) else data
        return self._tokenizer.encode_parts(["", text])


def _matcher(vocabulary: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken")
    try:
        matcher = llguidance.LLMatcher(
            vocabulary, grammar.text, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False)
        )
        error = matcher.get_error()
        if not error:
            began = time.thread_time()
            first = matcher.deep_copy()
            first.compute_bitmask()
            spent = time.thread_time() - began
            if spent > MAX_FIRST_MASK_S:
                raise GrammarError(f"it is too complex: finding the first token takes {spent:.1f} s")
            error = first.get_error()
    except GrammarError:
        raise
    except BaseException as fault:  # a panic inside the library is no subclass of Exception
        raise GrammarError("the grammar library failed on it") from fault
    if error:
        raise GrammarError(one_line(error))
    return matcher


def one_line(reason: str) -> str:
    """A library's message, without its listings and line breaks."""
    words = " ".join(reason.split("<state>")[0].replace("<non-verbose/>", "").split())
    if words == "NoExtensionBias":
        words = "no text satisfies it"
    return words if len(words) <= _MAX_REASON_CHARS else words[: _MAX_REASON_CHARS - 1] + "…"


def _deep_thread() -> ThreadPoolExecutor:
    """An executor of one thread whose stack is large; the thread is started here, under that setting."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor
