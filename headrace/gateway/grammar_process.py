"""The gateway's side of ``headrace.text.grammars.checking``: a process that is started for the first grammar, is
ended when one takes too long, and is started anew for the next one when it has ended. Verdicts are kept.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from headrace.errors import GrammarError
from headrace.params import Grammar

LIMIT_S = 5.0
_START_S = 60.0
_END_S = 2.0
_KEPT = 64
_MODULE = "headrace.text.grammars.checking"


class GrammarProcess:
    """Judges grammars for one model. ``compile`` may be called from any thread.

    Args:
        model: path of the model.
        chat_template_file: the model's, where it was given apart.
    """

    def __init__(self, model: str, chat_template_file: str | None) -> None:
        template = [] if chat_template_file is None else [chat_template_file]
        self._child = _Child([sys.executable, "-m", _MODULE, model, *template])
        self._verdicts: OrderedDict[Grammar, GrammarError | None] = OrderedDict()
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        weakref.finalize(self, self._child.end)

    def compile(self, grammar: Grammar) -> Future[None]:
        """Done when the grammar was found to compile; fails with ``GrammarError``."""
        done: Future[None] = Future()
        with self._lock:
            if grammar not in self._verdicts:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar")
                return self._thread.submit(self._judge, grammar)
            self._verdicts.move_to_end(grammar)
            error = self._verdicts[grammar]
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        return done

    def _judge(self, grammar: Grammar) -> None:
        error: GrammarError | None = None
        try:
            self._child.judge(grammar.text)
        except GrammarError as found:
            error = found
        with self._lock:
            self._verdicts[grammar] = error
            while len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        if error is not None:
            raise error


class _KilledFromOutside(GrammarError):
    """The process was ended, by nobody here; or it had been idle for long."""


class _Child:
    """The process, used by one thread."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, text: str) -> None:
        """Raises GrammarError: what the process says, or what happened to it."""
        try:
            verdict = self._ask(text)
        except _KilledFromOutside:  # as by the kernel, for lack of memory: the grammar need not be at fault
            verdict = self._ask(text)
        if verdict is not None:
            raise GrammarError(verdict)

    def _ask(self, text: str) -> str | None:
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(text) + b"\n")
            process.stdin.flush()
            return self._read(process, LIMIT_S)
        except TimeoutError:
            self.end()
            raise GrammarError(f"it is too complex: compiling it takes more than {LIMIT_S:g} s") from None
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            killed = process.returncode in (-signal.SIGKILL, -signal.SIGALRM)
            self.end()
            raise (_KilledFromOutside if killed else GrammarError)("the grammar library failed on it") from None

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        """The process once it has the model's vocabulary."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.end()
        self._process = subprocess.Popen(  # its vocabulary takes a second or two
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is for the gateway alone
        )
        try:
            self._read(self._process, _START_S)
        except (OSError, EOFError):
            self.end()
            raise
        return self._process

    def _read(self, process: subprocess.Popen[bytes], limit_s: float) -> str | None:
        """The next line's value; TimeoutError, or EOFError when the process has ended."""
        assert process.stdout is not None
        deadline, line = time.monotonic() + limit_s, b""
        poller = select.poll()
        poller.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                raise EOFError
            line += data
        return msgspec.json.decode(line, type=str | None)
