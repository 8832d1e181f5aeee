"""``headrace chat`` on a real pseudo-terminal: type, wait for what appears, send keys."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

HANG_S = 60.0
CHAT = (sys.executable, "-m", "headrace.cli.main", "chat")


class Terminal:
    """The person's side. ``screen`` is everything that has appeared."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self.screen = ""
        self._seen = 0

    def wait_for(self, text: str) -> str:
        """What appeared up to ``text``, from where the last wait ended."""
        deadline = time.monotonic() + HANG_S
        while (at := self.screen.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"{text!r} did not appear in:\n{self.screen[self._seen :]}"
            if not self._read(0.1) and self.process.poll() is not None:
                raise AssertionError(f"ended before {text!r}:\n{self.screen}")
        found = self.screen[self._seen : at]
        self._seen = at + len(text)
        return found

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def ask(self, line: str) -> None:
        """Wait for the prompt and send one line."""
        self.wait_for(">>> ")
        self.type(line + "\n")

    def end(self) -> int:
        """Wait for the program's end; its exit code."""
        deadline = time.monotonic() + HANG_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.screen
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return False
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # the other side is closed
            return False
        self.screen += re.sub(r"\x1b\[\?2004[hl]\r?", "", data.decode("utf-8", "replace"))
        return bool(data)


@contextmanager
def terminal(*words: str, environment: Mapping[str, str]) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*CHAT, *words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm", **environment}, preexec_fn=_take_terminal,
    )  # fmt: skip
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


def _take_terminal() -> None:
    """Make standard input the controlling terminal, so that its Ctrl-C is a signal, and heed it."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored by what a shell starts in the background
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
