"""A process that compiles grammars which nobody has vouched for: a small one can take a compiler minutes and
gigabytes, or crash it, and it is native code, so only a process can be stopped then.

    python -m headrace.text.grammars.checking MODEL [CHAT_TEMPLATE]

On standard input comes a JSON string per grammar, on standard output goes a JSON value: first null, once the
vocabulary is there, then for each grammar null or why it cannot be compiled. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
from collections.abc import Sequence

import msgspec

from headrace.errors import GrammarError
from headrace.params import Grammar
from headrace.text import model_text
from headrace.text.grammars.compiler import GrammarCompiler
from headrace.text.grammars.compose import parts_of

MEMORY_BYTES = 4 * 2**30
# After so long a signal ends the process, which needs no help of the interpreter. By then the one who waits for a
# verdict is gone; and without grammars nobody needs the memory that is held.
ALARM_S = 10
IDLE_S = 600
ANYTHING = Grammar('{"grammars": [{"lark_grammar": "start: /(?s:.*)/"}]}')


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory()
    model, template = argv[0], argv[1] if len(argv) > 1 else None
    compiler = GrammarCompiler(lambda: model_text.load(model, template))
    with contextlib.suppress(GrammarError):
        compiler.compile(ANYTHING).result()
    _say(None)
    signal.alarm(IDLE_S)
    for line in sys.stdin.buffer:
        signal.alarm(ALARM_S)
        _say(_verdict(compiler, Grammar(msgspec.json.decode(line, type=str))))
        signal.alarm(IDLE_S)
    return 0


def _verdict(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    try:
        compiler.compile(grammar).result()
        for part in parts_of(grammar):
            compiler.compile(part).result()
    except GrammarError as error:
        return str(error)
    return None


def _say(value: str | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    """Where the system knows such a limit (macOS does not)."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
