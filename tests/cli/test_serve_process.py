"""``headrace serve`` as a process: ports, faults at start, the line it prints when it can answer."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli import serve

pytestmark = pytest.mark.slow
SERVE = [sys.executable, "-m", "headrace.cli.main", "serve"]


def serve_until_it_ends(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SERVE, *words], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


@contextmanager
def held_port(family: socket.AddressFamily, host: str) -> Iterator[int]:
    with socket.socket(family) as holder:
        try:
            holder.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} on this machine")
        holder.listen()
        yield holder.getsockname()[1]


@pytest.mark.parametrize(
    ("family", "host"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (socket.AF_INET6, "::")],
)
def test_a_taken_port_is_named(
    family: socket.AddressFamily, host: str, scripted_folder: Callable[[str], Path]
) -> None:
    with held_port(family, host) as port:
        model = str(scripted_folder("plain"))
        done = serve_until_it_ends(model, "--host", host, "--port", str(port), "--insecure")
    assert done.returncode not in (0, -signal.SIGKILL)
    assert str(port) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [{}, {"config.json": "{"}, {"config.json": '{"model_type": "llama"}'}])
def test_a_broken_model_is_one_line(tmp_path: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    done = serve_until_it_ends(str(tmp_path), "--port", "0")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip()


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and the base URL in the line that says it is ready."""
    process = subprocess.Popen([*SERVE, *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r"https?://[^\s/]+", line)
            if found:
                yield process, found[0]
                return
        raise AssertionError(f"ended with {process.wait()} before it was ready")
    finally:
        process.terminate()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_while_the_model_is_fetched_a_hangup_ends_nothing_and_a_stop_does(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def fetch(argv: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        reached.append("behind the hangup")
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not heard")

    reached: list[str] = []
    monkeypatch.setattr(serve, "read_config", fetch)
    assert serve.run([]) == 0
    assert reached == ["behind the hangup"]


def post(url: str, body: dict[str, object]) -> dict[str, object]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        parsed: dict[str, object] = json.load(answer)
        return parsed


def test_the_walk_through_with_a_free_port(scripted_folder: Callable[[str], Path]) -> None:
    line = (
        "--served-model-name llama-3b --host 127.0.0.1 --port 0 --continuous-batching --use-paged-cache "
        "--cache-memory-mb 2048 --max-num-seqs 8 --stream-interval 1 --enable-metrics"
    )
    with serving(str(scripted_folder("plain")), *line.split()) as (process, url):
        assert not url.endswith(":0")
        message = {"role": "user", "content": "<|s05|>"}
        body = {"model": "llama-3b", "messages": [message], "temperature": 0, "max_tokens": 40}
        answer = post(f"{url}/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == "ABCDEFGH"  # type: ignore[index]
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as metrics:
            assert b"vllm:num_requests_running" in metrics.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
