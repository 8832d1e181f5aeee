"""The terminal of a chat: what a person types, and answers as they come.

What a model writes is text, never commands to the terminal: control characters of answers are dropped there. Into
a pipe or a file answers pass as they are.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from headrace.cli.chat_http import Delta
from headrace.cli.chat_session import Answer

HISTORY_LINES = 1000
_DIM, _BOLD, _RED, _PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_BLOCK = '"""'


def wants_color(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """NO_COLOR and dumb terminals are honoured."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


class Screen:
    """Writes answers and remarks. ``fold``: thinking is named but not shown."""

    def __init__(self, out: TextIO, *, color: bool, plain: bool, fold: bool) -> None:
        self._out = out
        self._color = color
        self._plain = plain
        self._dropped = _CONTROLS if out.isatty() else {}
        self._fold = fold
        self._at_line_start = True

    def stream(self, deltas: Iterable[Delta], answer: Answer) -> None:
        """Show the deltas and add them to ``answer``; whatever ends them, the line and the colour end too."""
        began, first_text_s, was_thinking = time.monotonic(), None, False
        try:
            for delta in deltas:
                if first_text_s is None and (delta.text or delta.reasoning):
                    first_text_s = time.monotonic() - began
                answer.add(delta)
                if self._plain:
                    self._write(delta.text.translate(self._dropped))
                    continue
                if delta.reasoning:
                    self._thinks(delta.reasoning, begins=not was_thinking)
                    was_thinking = True
                if delta.text:
                    if was_thinking:
                        self._end_thinking()
                    was_thinking = False
                    self._write(delta.text.translate(self._dropped))
        finally:
            if self._color:
                self._out.write(_PLAIN)
            self.end_line()
        for call in answer.calls:
            self._call(call)
        if not self._plain:
            self._figures(answer, first_text_s, time.monotonic() - began)

    def remark(self, text: str) -> None:
        """A line that is no part of an answer."""
        self.end_line()
        self._out.write(self._painted(_DIM, text) + "\n")
        self._out.flush()

    def fault(self, text: str) -> None:
        """One line on standard error."""
        self.end_line()
        print(self._painted(_RED, " ".join(text.split()).translate(_CONTROLS)), file=sys.stderr, flush=True)

    def end_line(self) -> None:
        if not self._at_line_start:
            self._out.write("\n")
            self._at_line_start = True
        self._out.flush()

    # -- inside

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._at_line_start = text.endswith("\n")

    def _thinks(self, text: str, *, begins: bool) -> None:
        if self._fold:
            self._write(self._painted(_DIM, "(thinking …)") + "\n" if begins else "")
            return
        if begins and self._color:
            self._out.write(_DIM)
        self._write(("" if self._color or not begins else "[thinking] ") + text.translate(self._dropped))

    def _end_thinking(self) -> None:
        """Thinking and answer are told apart by a blank line, and without colour by their names."""
        if self._fold:
            return
        if self._color:
            self._out.write(_PLAIN)
        self.end_line()
        self._out.write("\n" if self._color else "[answer] ")

    def _call(self, call: Mapping[str, Any]) -> None:
        function = call["function"]
        line = f"{function['name']}({function['arguments']})"
        self.remark(line if self._plain else f"calls {line.translate(self._dropped)}")

    def _figures(self, answer: Answer, first_s: float | None, whole_s: float) -> None:
        notes = []
        tokens = (answer.usage or {}).get("completion_tokens")
        if isinstance(tokens, int):
            notes.append(f"{tokens} tokens")
            if first_s is not None and tokens > 1 and whole_s > first_s:
                notes.append(f"{(tokens - 1) / (whole_s - first_s):.1f} tok/s")
        if first_s is not None:
            notes.append(f"{first_s:.2f} s to the first")
        if answer.finish_reason == "length":
            notes.append("cut off at the token limit")
        if answer.finish_reason == "content_filter":
            notes.append("withheld by the server's filter")
        if notes:
            self.remark(f"[{', '.join(notes)}]")

    def _painted(self, paint: str, text: str) -> str:
        return f"{paint}{text}{_PLAIN}" if self._color else text


@dataclass
class Keyboard:
    """Reads what a person types: a line, lines ended with a backslash, a \"\"\" block, or up to an empty line.

    Attributes:
        multiline: every message ends with an empty line instead of the first line's end.
        readline: the module, None where there is none; ``input`` then reads plain lines.
    """

    color: bool
    readline: Any = None
    multiline: bool = False

    def read(self) -> str | None:
        """A message or command; None at the end of the input. KeyboardInterrupt drops what was typed so far."""
        line = self.line(self._prompt(">>> "))
        if line is None:
            return None
        head, mark, rest = line.partition(_BLOCK)
        if mark and head.strip() in ("", "/system"):
            return head + self._block(rest)
        lines = [line]
        while line.endswith("\\") or (self.multiline and line and not lines[0].startswith("/")):
            more = self.line(self._prompt("... "))
            if more is None:
                break
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(line := more)
        return "\n".join(lines).strip()

    def line(self, prompt: str) -> str | None:
        """One line; None at the end of the input."""
        if not sys.stdout.isatty():
            sys.stderr.write(prompt)
            sys.stderr.flush()
            prompt = ""
        try:
            typed = input(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError:
            return ""
        return typed.encode("utf-8", "replace").decode("utf-8")

    def _block(self, text: str) -> str:
        lines = [text]
        while _BLOCK not in lines[-1]:
            more = self.line(self._prompt("... "))
            if more is None:
                break
            lines.append(more)
        lines[-1] = lines[-1].partition(_BLOCK)[0]
        return "\n".join(lines).strip("\n")

    def _prompt(self, text: str) -> str:
        """Marked so that readline does not count the colours' characters."""
        if not self.color:
            return text
        return f"\x01{_BOLD}\x02{text}\x01{_PLAIN}\x02" if self.readline else f"{_BOLD}{text}{_PLAIN}"


class History:
    """Lines typed in earlier chats, in a file that only this user reads."""

    def __init__(self, readline: Any, path: Path) -> None:
        self._readline = readline
        self._path = path
        self._known = 0

    def begin(self) -> None:
        """A file that cannot be read is no reason not to chat."""
        try:
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            os.chmod(self._path, 0o600)
            self._readline.read_history_file(str(self._path))
        except OSError:
            pass
        self._known = self._readline.get_current_history_length()

    def end(self) -> None:
        """Add this chat's lines: another one may have added its own meanwhile."""
        new = self._readline.get_current_history_length() - self._known
        self._readline.set_history_length(HISTORY_LINES)
        try:
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(max(0, new), str(self._path))
            else:
                self._readline.write_history_file(str(self._path))
        except OSError:
            pass


def complete_with(readline: Any, names: Sequence[str]) -> None:
    """Tab completes the names of commands."""

    def complete(text: str, state: int) -> str | None:
        fits = [name for name in names if name.startswith(text)] if text.startswith("/") else []
        return fits[state] if state < len(fits) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \n")
    is_libedit = "libedit" in (getattr(readline, "__doc__", "") or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


def import_readline() -> Any:
    """None where Python was built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
