"""A context that memory does not hold is cut, and that is said wherever one may look, with numbers and flags."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import scripted
from support.client import Client
from support.server import LITTLE_HEADROOM, SERVE, ServerRoom

from headrace.cli.main import main

POOL_MB = 16
TRAINED, BYTES_PER_TOKEN = scripted.CONTEXT, 2 * 10 * 64 * 4
# One block of 16 tokens is the null block.
HELD = (POOL_MB * 2**20 // (16 * BYTES_PER_TOKEN) - 1) * 16
FLAGS = ("--kv-memory-mb", str(POOL_MB), "--max-num-seqs", "4", *LITTLE_HEADROOM)


def says_it(text: str) -> bool:
    wanted = (f"from {TRAINED} to {HELD} tokens", f"{POOL_MB} MiB", "--kv-memory-mb", f"--max-model-len {HELD}")
    return all(part in text for part in wanted)


def test_plan_says_it(server_room: ServerRoom, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", server_room.path("plain"), *FLAGS]) == 0
    out = capsys.readouterr().out
    (note,) = [line for line in out.splitlines() if "lowered" in line]
    assert note.startswith("note: ") and says_it(note)
    assert f"longest sequence: {HELD:,} tokens" in out
    assert main(["plan", server_room.path("plain"), *FLAGS, "--max-model-len", str(HELD)]) == 0
    assert "lowered" not in capsys.readouterr().out


@contextmanager
def started(room: ServerRoom, *flags: str, log: Path) -> Iterator[tuple[list[str], str]]:
    """What a server printed to standard output until it was ready, and where it is."""
    words = [*SERVE, room.path("plain"), "--port", "0", "--served-model-name", "m", *flags]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=room.environment, text=True
        )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if line.startswith("Ready: "):
                yield lines, line.split()[1]
                return
        raise AssertionError(log.read_text())
    finally:
        process.terminate()
        process.stdout.close()
        process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_start_says_it_everywhere(server_room: ServerRoom, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started(server_room, *FLAGS, log=log) as (lines, url):
        note, ready = lines
        assert note.startswith("Note: ") and says_it(note) and ready.startswith("Ready: ")
        client = Client(url, "m")
        engine = client.get("/v1/status").json()["engine"]
        assert engine["max_model_len"] == HELD and says_it(engine["plan"]["model_len_lowered"])
        refused = client.chat("." * TRAINED)
        assert refused.status == 400 and str(HELD) in refused.message
        client.close()
    assert sum(says_it(line) for line in log.read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_start_with_room_says_nothing(server_room: ServerRoom, tmp_path: Path) -> None:
    flags = (*FLAGS, "--max-model-len", "1024")
    with started(server_room, *flags, log=tmp_path / "log") as (lines, url):
        assert len(lines) == 1
        client = Client(url, "m")
        assert "model_len_lowered" not in client.get("/v1/status").json()["engine"]["plan"]
        client.close()
