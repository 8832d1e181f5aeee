"""A progress bar on a terminal's standard error; elsewhere a line per finished run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from headrace.bench.observe import Sample

_WIDTH = 24
_REFRESH_S = 0.1


class Progress:
    """Told what is going on; writes nothing when not wanted."""

    def __init__(self, stream: TextIO, *, wanted: bool, bar: bool) -> None:
        self._stream = stream
        self._wanted = wanted
        self._bar = bar
        self._title = ""
        self._done = self._all = 0
        self._tokens = self._failed = 0
        self._shown_at = 0.0
        self._began_at = time.monotonic()

    def expect(self, requests: int) -> None:
        """So many more requests will be sent."""
        self._all += requests

    def title(self, title: str) -> None:
        self._title = title
        self._show(force=True)

    def request(self, sample: Sample) -> None:
        self._done += 1
        self._failed += sample.failure is not None
        self._tokens += sample.output_tokens
        self._show()

    def line(self, text: str) -> None:
        """A finished run."""
        if self._wanted:
            self._clear()
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._wanted and self._bar:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _show(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not (self._wanted and self._bar) or (not force and now - self._shown_at < _REFRESH_S):
            return
        self._shown_at = now
        share = min(1.0, self._done / self._all) if self._all else 0.0
        filled = round(share * _WIDTH)
        left_s = (now - self._began_at) * (1 - share) / share if share else None
        left = "" if left_s is None else f", {left_s:.0f} s left"
        failed = f", {self._failed} failed" if self._failed else ""
        bar = "#" * filled + "." * (_WIDTH - filled)
        self._stream.write(f"\r[{bar}] {self._done}/{self._all} {self._title}{failed}{left}\x1b[K")
        self._stream.flush()


def make_progress(stream: TextIO, *, wanted: bool) -> Progress:
    return Progress(stream, wanted=wanted, bar=stream.isatty())
