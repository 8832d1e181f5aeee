"""``headrace COMMAND …``: finds the command's module, imports only that, and turns faults into one line.

A command module has ``run(argv) -> int``: the arguments behind the command's name in, the exit code out. It
imports what it needs inside its functions, so that ``--help`` stays quick. Exit codes: 0 done, 1 the command
found something wrong or failed, 2 wrong usage or a permanent fault at start, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

# command -> (module, one line for --help)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("headrace.cli.serve", "serve a model over the OpenAI and Anthropic APIs"),
    "plan": ("headrace.cli.plan", "print the memory plan of a model without loading its weights"),
    "model": ("headrace.cli.model", "inspect and acquire models"),
    "chat": ("headrace.cli.chat", "a chat with a server in the terminal"),
    "bench-serve": ("headrace.cli.bench_serve", "measure an OpenAI-compatible server under load"),
    "bench": ("headrace.cli.bench", "measure the engine without a server"),
    "bench-kv-cache": ("headrace.cli.bench_kv_cache", "memory, error and time of packed KV caches"),
    "service": ("headrace.cli.service", "run the server as a service of launchd or systemd"),
    "doctor": ("headrace.cli.doctor", "check device, BLAS, compiler and kernels"),
}

# command -> what it will do
NOT_YET: dict[str, str] = {
    "batch": "a file of requests, offline",
    "config": "show the configuration in force",
    "download": "fetch a model; `model acquire` does that",
    "usage": "tokens by key and model",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The console scripts' entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_files()
    _take_any_character()
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # a reader that left is found here, not when the interpreter ends
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output left (`| head`); keep the interpreter from complaining when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from headrace.errors import HeadraceError, StartupError

        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            print(f"headrace: what it says cannot be written: {error.strerror}", file=sys.stderr)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as above
            return 1
        is_file_fault = isinstance(error, OSError) and error.filename is not None and error.strerror is not None
        if not isinstance(error, HeadraceError) and not is_file_fault:
            raise
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        command = f" {words[0]}" if words and words[0] in COMMANDS else ""
        print(f"headrace{command}: {' '.join(text.split())}", file=sys.stderr)
        return 2 if isinstance(error, StartupError) else 1


def _open_standard_files() -> None:
    """Without them their numbers would go to sockets, which libraries do not expect."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _take_any_character() -> None:
    """Names of models and files are printed in every locale, escaped where it lacks a character."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _dispatch(words: list[str]) -> int:
    command = words[0] if words else ""
    if command in ("-h", "--help", "help"):
        print(_help())
        return 0
    if command == "--version" or (command in (COMMANDS | NOT_YET) and "--version" in words[1:]):
        from headrace import __version__

        print(f"headrace {__version__}")
        return 0
    if command in NOT_YET:
        return _not_yet(command, words[1:])
    if command not in COMMANDS:
        return _unknown(command)
    from headrace.cli.flags import UsageError, is_unicode

    if not all(map(is_unicode, words)):
        raise UsageError("an argument is no text in the system's encoding (UTF-8, or what LANG says)")
    module = importlib.import_module(COMMANDS[command][0])
    code = module.run(words[1:])
    return int(code or 0)


def _help() -> str:
    lines = ["usage: headrace COMMAND [options]", "", "LLM inference server on MLX.", "", "commands:"]
    lines += [f"  {name:<14} {summary}" for name, (_, summary) in COMMANDS.items()]
    lines += ["", "  headrace COMMAND --help shows a command's options; --version prints the version."]
    return "\n".join(lines)


def _not_yet(command: str, words: list[str]) -> int:
    line = f"headrace {command}: not available yet ({NOT_YET[command]})"
    if "-h" in words or "--help" in words:
        print(line)
        return 0
    print(line, file=sys.stderr)
    return 2


def _unknown(command: str) -> int:
    if not command:
        print(_help(), file=sys.stderr)
        return 2
    from headrace.cli.flags import unknown

    what = "flag" if command.startswith("-") else "command"
    print(f"headrace: {unknown(command, [*COMMANDS, *NOT_YET], what)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
