"""The command line: ports, unknown flags, help and version without a model and without a network."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest
from support.server import ServerRoom

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMANDS = ("serve", "bench-serve", "model", "plan")


def command(*words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", *words],
        capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")],
)
def test_a_taken_port_ends_in_words(server_room: ServerRoom, family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as holder:
        try:
            holder.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} on this machine")
        holder.listen()
        port = str(holder.getsockname()[1])
        ended = server_room.ends(server_room.path("plain"), "--host", host, "--port", port, "--insecure")
    assert ended.code not in (0, -9)
    assert port in ended.output and "Traceback" not in ended.output


def test_wrong_flags_are_usage_errors(server_room: ServerRoom) -> None:
    model = server_room.path("plain")
    for words in (("--port", "70000"), ("--port", "x"), ("--no-such-flag",), ("--max-num-seqs", "0")):
        ended = server_room.ends(model, *words)
        assert ended.code == 2, words
        assert words[0] in ended.output and "Traceback" not in ended.output
    assert "--max-num-seqs" in server_room.ends(model, "--max-num-seq", "2").output  # the nearest name


def test_help_and_version_need_neither_model_nor_network(server_room: ServerRoom) -> None:
    nowhere = {**server_room.environment, "HTTPS_PROXY": "http://127.0.0.1:9", "HF_ENDPOINT": "http://127.0.0.1:9"}
    for words in ((), *((name,) for name in COMMANDS)):
        for flag in ("--help", "--version"):
            done = command(*words, flag, environment=nowhere)
            assert done.returncode == 0 and done.stdout.strip(), (words, flag, done.stderr)
            assert "Traceback" not in done.stderr


VALUES = {
    "N": "1", "X": "0.5", "MIB": "64", "JSON": "{}", "FILE": __file__, "PATH": "/x", "ORIGIN": "http://x", "URL": "http://x",
}  # fmt: skip


def test_every_flag_of_the_help_is_taken(server_room: ServerRoom) -> None:
    """All at once: they contradict each other, but none is unknown and none is refused its kind of value."""
    text = command("serve", "--help", environment=server_room.environment).stdout
    flags = re.findall(r"^ +(--[a-z-]+)(?: ([^ \n]+))?", text, re.MULTILINE)
    assert len(flags) > 30
    words = []
    for flag, value in flags:
        first = value.strip("{}").split(",")[0] if value.startswith("{") else VALUES.get(value, "x")
        words += [flag, first] if value else [flag]
    ended = server_room.ends("/nonexistent", *words)
    assert ended.code == 2
    assert not re.search("unknown|must be|needs a value", ended.output), ended.output
